"""Device functions of the epilogues.

Each is called on pieces of an accumulator:

    apply(accumulator, group, rows, columns, tensors, constants) -> [R, C / shrink]

accumulator [R, C] float32 in registers; group: number of the rows' group; rows [R] and columns [C]: indices into x and
into the columns of w, 0 where there is none, in the accumulator's layout without the other dimension; tensors: the
hook's tensors, as pointers; constants: its compile-time values.
"""

from tilecrew.device.compat import gl, gluon
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
    return accumulator * gl.load(tensors[0] + rows * tensors[1]).to(gl.float32)[:, None]
