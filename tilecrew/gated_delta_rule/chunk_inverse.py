"""Device code of stage (2): A = (I + L)^-1 of one chunk and value head, from 16x16 blocks. Called by kernel_prepare.

With X = A, D_j = (I + L_jj)^-1 and blocks of 16:
    X_wj = [w = j] D_j - (sum over m > j of X_wm L_mj) D_j,    columns right to left; warp w owns the rows of block w.
MMA operands are kept as parts: one fp16 part, or a high and a low bf16 part (three products make about 16 bits).
"""

from tilecrew.device.compat import gl, gluon, mma_v2
from tilecrew.device.mma import operand_layout, tile_layout, warp_accumulator_layout
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK

BLOCK = gl.constexpr(16)


@gluon.jit
def allocate_parts(COLUMNS: gl.constexpr, SPLIT: gl.constexpr):
    """A [64, COLUMNS] tile in shared memory as a pair of parts; without SPLIT the second is the first."""
    dtype: gl.constexpr = gl.bfloat16 if SPLIT else gl.float16
    layout: gl.constexpr = tile_layout([CHUNK, COLUMNS], dtype)
    high = gl.allocate_shared_memory(dtype, [CHUNK, COLUMNS], layout)
    low = high
    if SPLIT:
        low = gl.allocate_shared_memory(dtype, [CHUNK, COLUMNS], layout)
    return high, low


@gluon.jit
def store_parts(x, parts, SPLIT: gl.constexpr):
    dtype: gl.constexpr = parts[0].dtype
    high = x.to(dtype)
    parts[0].store(high)
    if SPLIT:
        parts[1].store((x - high.to(gl.float32)).to(dtype))


@gluon.jit
def multiply_accumulate(a, parts, ROW_BLOCK: gl.constexpr, COLUMN_BLOCK: gl.constexpr, acc, SPLIT: gl.constexpr):
    """acc [64, 16] += a [64, 16] times the 16x16 block (ROW_BLOCK, COLUMN_BLOCK) of a tile in shared memory."""
    layout: gl.constexpr = warp_accumulator_layout()
    left: gl.constexpr = operand_layout(layout, 0)
    right: gl.constexpr = operand_layout(layout, 1)
    dtype: gl.constexpr = parts[0].dtype
    b_high = parts[0].slice(ROW_BLOCK * BLOCK, BLOCK).slice(COLUMN_BLOCK * BLOCK, BLOCK, 1).load(right)
    a_high = a.to(dtype)
    if SPLIT:
        b_low = parts[1].slice(ROW_BLOCK * BLOCK, BLOCK).slice(COLUMN_BLOCK * BLOCK, BLOCK, 1).load(right)
        a_low = gl.convert_layout((a - a_high.to(gl.float32)).to(dtype), left)
        acc = mma_v2(a_low, b_high, acc)
        acc = mma_v2(gl.convert_layout(a_high, left), b_low, acc)
    return mma_v2(gl.convert_layout(a_high, left), b_high, acc)


@gluon.jit
def merge_blocks(
    D,
    L_parts,
    D_parts,
    row_factor,
    column_factor,
    inverse,
    SIGN: gl.constexpr,
    MULTIPLY: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Writes A, or A_ij times column_factor_j where MULTIPLY, into the tile `inverse` [64, 64], block column by block
    column.

    D          [64, 16] float32, the inverses of the diagonal blocks, stacked; D_parts: the same in shared memory
    L_parts    SIGN times L in shared memory, without the factor of its rows: parts of columns 0 to 31, of 32 to 47
    row_factor shared vector [64] that multiplies the rows of L (beta, where L_parts holds K K^T)
    """
    left, middle = L_parts
    zero = gl.zeros([CHUNK, BLOCK], gl.float32, warp_accumulator_layout())
    X = inverse_column(D, zero, D_parts, 3, SIGN, SPLIT)
    store_column(X, column_factor, inverse, 3, MULTIPLY)
    XL = scale_column(X, row_factor, 3)
    sum_2 = multiply_accumulate(XL, middle, 3, 0, zero, SPLIT)
    sum_1 = multiply_accumulate(XL, left, 3, 1, zero, SPLIT)
    sum_0 = multiply_accumulate(XL, left, 3, 0, zero, SPLIT)
    X = inverse_column(D, sum_2, D_parts, 2, SIGN, SPLIT)
    store_column(X, column_factor, inverse, 2, MULTIPLY)
    XL = scale_column(X, row_factor, 2)
    sum_1 = multiply_accumulate(XL, left, 2, 1, sum_1, SPLIT)
    sum_0 = multiply_accumulate(XL, left, 2, 0, sum_0, SPLIT)
    X = inverse_column(D, sum_1, D_parts, 1, SIGN, SPLIT)
    store_column(X, column_factor, inverse, 1, MULTIPLY)
    XL = scale_column(X, row_factor, 1)
    sum_0 = multiply_accumulate(XL, left, 1, 0, sum_0, SPLIT)
    store_column(inverse_column(D, sum_0, D_parts, 0, SIGN, SPLIT), column_factor, inverse, 0, MULTIPLY)


@gluon.jit
def inverse_column(D, sum, D_parts, COLUMN_BLOCK: gl.constexpr, SIGN: gl.constexpr, SPLIT: gl.constexpr):
    """Block column of A: the diagonal block where it is, minus the sum of the columns to its right times D."""
    layout: gl.constexpr = warp_accumulator_layout()
    row_block = (gl.arange(0, CHUNK, gl.SliceLayout(1, layout)) // BLOCK)[:, None]
    X = gl.where(row_block == COLUMN_BLOCK, D, 0.0)
    if COLUMN_BLOCK < 3:
        X -= SIGN * multiply_accumulate(sum, D_parts, COLUMN_BLOCK, 0, gl.zeros_like(X), SPLIT)
    return X


@gluon.jit
def scale_column(X, factor, COLUMN_BLOCK: gl.constexpr):
    column: gl.constexpr = gl.SliceLayout(0, warp_accumulator_layout())
    return X * factor.slice(COLUMN_BLOCK * BLOCK, BLOCK).load(column)[None, :]


@gluon.jit
def store_column(X, factor, inverse, COLUMN_BLOCK: gl.constexpr, MULTIPLY: gl.constexpr):
    if MULTIPLY:
        X = scale_column(X, factor, COLUMN_BLOCK)
    inverse.slice(COLUMN_BLOCK * BLOCK, BLOCK, 1).store(X.to(inverse.dtype))


@gluon.jit
def merge_columns(D, left, middle, D_tile):
    """(I + L)^-1 as four block columns [64, 16] in registers; fp16 operands, -L and D in shared memory.

    left, middle: columns 0 to 31 and 32 to 47 of -L.
    """
    layout: gl.constexpr = warp_accumulator_layout()
    row_block = (gl.arange(0, CHUNK, gl.SliceLayout(1, layout)) // BLOCK)[:, None]
    zero = gl.zeros([CHUNK, BLOCK], gl.float32, layout)
    X_3 = gl.where(row_block == 3, D, 0.0)
    a_3 = left_operand(X_3)
    sum_2 = mma_v2(a_3, right_operand(middle, 3, 0), zero)
    sum_1 = mma_v2(a_3, right_operand(left, 3, 1), zero)
    sum_0 = mma_v2(a_3, right_operand(left, 3, 0), zero)
    X_2 = mma_v2(left_operand(sum_2), right_operand(D_tile, 2, 0), gl.where(row_block == 2, D, 0.0))
    a_2 = left_operand(X_2)
    sum_1 = mma_v2(a_2, right_operand(left, 2, 1), sum_1)
    sum_0 = mma_v2(a_2, right_operand(left, 2, 0), sum_0)
    X_1 = mma_v2(left_operand(sum_1), right_operand(D_tile, 1, 0), gl.where(row_block == 1, D, 0.0))
    sum_0 = mma_v2(left_operand(X_1), right_operand(left, 1, 0), sum_0)
    X_0 = mma_v2(left_operand(sum_0), right_operand(D_tile, 0, 0), gl.where(row_block == 0, D, 0.0))
    return X_0, X_1, X_2, X_3


@gluon.jit
def left_operand(x):
    return gl.convert_layout(x.to(gl.float16), operand_layout(warp_accumulator_layout(), 0))


@gluon.jit
def right_operand(tile, ROW_BLOCK: gl.constexpr, COLUMN_BLOCK: gl.constexpr):
    block = tile.slice(ROW_BLOCK * BLOCK, BLOCK).slice(COLUMN_BLOCK * BLOCK, BLOCK, 1)
    return block.load(operand_layout(warp_accumulator_layout(), 1))


@gluon.jit
def join_columns(X_0, X_1, X_2, X_3, LAYOUT: gl.constexpr):
    """Four [64, 16] block columns side by side; no data moves between threads."""
    joined = gl.join(
        gl.join(X_0, X_1), gl.join(X_2, X_3)
    )  # [64, 16, 2, 2]: the last two count the blocks, low bit first
    matrix = gl.reshape(gl.permute(joined, (0, 3, 2, 1)), [CHUNK, CHUNK])
    return gl.convert_layout(matrix, LAYOUT, assert_trivial=True)
