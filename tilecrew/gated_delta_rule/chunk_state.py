"""Device code that brings a block of the state between global memory and the accumulator of a wgmma.

The state is float32 [N, HV, K, V], or [N, HV, V, K] where V comes first; K = V = 128. One of a block's two strides is
1, the other 128: kernels that hold S and kernels that hold its transpose differ in which.
"""

from tilecrew.device.compat import gl, gluon
from tilecrew.device.mma import accumulator_layout
from tilecrew.device.tiles import opaque
from tilecrew.gated_delta_rule.chunk_sizes import DIM

BLOCK_COLUMNS = gl.constexpr(8)


@gluon.jit
def state_pointer(states, state_idx, walk, config: gl.constexpr):
    """First element of this head's and V block's part of state number state_idx, in either state layout."""
    first = (state_idx * config.num_value_heads + walk.head).to(gl.int64) * (DIM * DIM)
    return states + first + walk.value_offset * (DIM if config.state_v_first else 1)


@gluon.jit
def store_state(S, first, COLUMN_STRIDE: gl.constexpr, ROW_STRIDE: gl.constexpr):
    """Stores the state in blocks of 8 columns: the addresses of all columns at once would not fit the registers."""
    ROWS: gl.constexpr = S.shape[0]
    COLUMNS: gl.constexpr = S.shape[1]
    if COLUMNS > BLOCK_COLUMNS:
        left, right = gl.split(gl.permute(gl.reshape(S, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))
        store_state(left, first, COLUMN_STRIDE, ROW_STRIDE)
        half = opaque(COLUMNS // 2)
        store_state(right, first + half * COLUMN_STRIDE, COLUMN_STRIDE, ROW_STRIDE)
    else:
        LAYOUT: gl.constexpr = S.type.layout
        gl.store(first + state_offsets(ROWS, COLUMNS, LAYOUT, COLUMN_STRIDE, ROW_STRIDE), S)


@gluon.jit
def load_state(first, ROWS: gl.constexpr, COLUMNS: gl.constexpr, COLUMN_STRIDE: gl.constexpr, ROW_STRIDE: gl.constexpr):
    """The state's [ROWS, COLUMNS] block as an accumulator, in blocks of 8 columns (see store_state)."""
    if COLUMNS > BLOCK_COLUMNS:
        left = load_state(first, ROWS, COLUMNS // 2, COLUMN_STRIDE, ROW_STRIDE)
        half = opaque(COLUMNS // 2)
        right = load_state(first + half * COLUMN_STRIDE, ROWS, COLUMNS // 2, COLUMN_STRIDE, ROW_STRIDE)
        S = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [ROWS, COLUMNS])
    else:
        LAYOUT: gl.constexpr = accumulator_layout(COLUMNS, gl.num_warps())
        S = gl.load(first + state_offsets(ROWS, COLUMNS, LAYOUT, COLUMN_STRIDE, ROW_STRIDE))
    return gl.convert_layout(S, accumulator_layout(COLUMNS, gl.num_warps()), assert_trivial=True)


@gluon.jit
def state_offsets(
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
    COLUMN_STRIDE: gl.constexpr,
    ROW_STRIDE: gl.constexpr,
):
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    return row * ROW_STRIDE + column * COLUMN_STRIDE
