"""Device functions of the epilogues.

Each is called on pieces of an accumulator:

    apply(accumulator, group, rows, columns, tensors, constants) -> [R, C / shrink]

accumulator [R, C] float32 in registers; group: number of the rows' group; rows [R] and columns [C]: indices into x and
into the columns of w, 0 where there is none, in the accumulator's layout without the other dimension; tensors: the
hook's tensors, as pointers; constants: its compile-time values.

And of those that tell others what has landed in global memory:

    landed(row_block, column_block, num_rows, num_calls, tensors)

once a tile, by the one warp of the notify role. See hooks.Epilogue.
"""

from tilecrew.device.compat import gl, gluon
from tilecrew.device.signal import add_acquire_release
from tilecrew.device.tiles import LOG2_E, exp2

HALF_SQRT_2 = gl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = gl.constexpr(0.7978845608028654)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp2(x * -LOG2_E))


@gluon.jit
def identity(accumulator, group, rows, columns, tensors, constants: gl.constexpr):
    return accumulator


@gluon.jit
def bias(accumulator, group, rows, columns, tensors, constants: gl.constexpr):
    """tensors: bias [E, N], its strides."""
    first = tensors[0] + group.to(gl.int64) * tensors[1]
    return accumulator + gl.load(first + columns * tensors[2]).to(gl.float32)[None, :]


@gluon.jit
def silu(accumulator, group, rows, columns, tensors, constants: gl.constexpr):
    return accumulator * sigmoid(accumulator)


@gluon.jit
def gelu(accumulator, group, rows, columns, tensors, constants: gl.constexpr):
    """constants: whether tanh approximates the error function."""
    x = accumulator
    if constants[0]:
        inner = SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
        result = x * sigmoid(2.0 * inner)  # (1 + tanh(y)) / 2 = sigmoid(2 y)
    else:
        result = 0.5 * x * (1.0 + gl.erf(x * HALF_SQRT_2))
    return result


@gluon.jit
def swiglu(accumulator, group, rows, columns, tensors, constants: gl.constexpr):
    """constants: how many gate columns come before as many up columns."""
    RUN: gl.constexpr = constants[0]
    ROWS: gl.constexpr = accumulator.shape[0]
    COLUMNS: gl.constexpr = accumulator.shape[1]
    runs = accumulator.reshape([ROWS, COLUMNS // (2 * RUN), 2, RUN]).permute((0, 1, 3, 2))
    gate, up = runs.split()
    return (gate * sigmoid(gate) * up).reshape([ROWS, COLUMNS // 2])


@gluon.jit
def route_weight(accumulator, group, rows, columns, tensors, constants: gl.constexpr):
    """tensors: weight [M], its stride."""
    return accumulator * gl.load(tensors[0] + rows.to(gl.int64) * tensors[1]).to(gl.float32)[:, None]


@gluon.jit
def nothing_landed(row_block, column_block, num_rows, num_calls, tensors):
    pass


@gluon.jit
def is_last_call(counter, num_calls):
    """Whether this is the last of `num_calls` calls that count with `counter` (int32 in global memory, 0 before the
    first), and sees what all others have released. The last one sets it to 0 again, for the next launch."""
    is_last = add_acquire_release(counter, 1, "gpu") == num_calls - 1
    if is_last:
        gl.store(counter, 0)
    return is_last


@gluon.jit
def notify_row_block(row_block, column_block, num_rows, num_calls, tensors):
    """tensors: rows, arrivals."""
    if is_last_call(tensors[1] + row_block, num_calls):
        gl.atomic_xchg(tensors[0] + row_block, num_rows, sem="release", scope="gpu")
