"""Device code that brings the state S [128, V block] between global memory and the accumulator of a wgmma, in either
layout.

The state is float32 [N, HV, K, V], or [N, HV, V, K] where V comes first; K = V = 128.
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
def store_state(S, first, V_FIRST: gl.constexpr):
    """Stores the state in blocks of 8 columns: the addresses of all columns at once would not fit the registers."""
    COLUMNS: gl.constexpr = S.shape[1]
    if COLUMNS > BLOCK_COLUMNS:
        left, right = gl.split(gl.permute(gl.reshape(S, [DIM, 2, COLUMNS // 2]), (0, 2, 1)))
        store_state(left, first, V_FIRST)
        half = opaque(COLUMNS // 2)
        store_state(right, first + half * (DIM if V_FIRST else 1), V_FIRST)
    else:
        LAYOUT: gl.constexpr = S.type.layout
        gl.store(first + state_offsets(COLUMNS, LAYOUT, V_FIRST), S)


@gluon.jit
def load_state(first, COLUMNS: gl.constexpr, V_FIRST: gl.constexpr):
    """The state's [128, COLUMNS] block, in blocks of 8 columns (see store_state)."""
    if COLUMNS > BLOCK_COLUMNS:
        left = load_state(first, COLUMNS // 2, V_FIRST)
        half = opaque(COLUMNS // 2)
        right = load_state(first + half * (DIM if V_FIRST else 1), COLUMNS // 2, V_FIRST)
        S = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [DIM, COLUMNS])
    else:
        LAYOUT: gl.constexpr = accumulator_layout(COLUMNS)
        S = gl.load(first + state_offsets(COLUMNS, LAYOUT, V_FIRST))
    return gl.convert_layout(S, accumulator_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def state_offsets(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, V_FIRST: gl.constexpr):
    row = gl.arange(0, DIM, gl.SliceLayout(1, LAYOUT)).to(gl.int64)[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)).to(gl.int64)[None, :]
    return row + column * DIM if V_FIRST else row * DIM + column
