"""Device code of stage (2): A = (I + L)^-1 of one chunk and value head, from 16x16 blocks. Called by kernel_prepare.

With X = A, D_j = (I + L_jj)^-1 and blocks of 16:
    X_wj = [w = j] D_j - (sum over m > j of X_wm L_mj) D_j,    columns right to left; warp w owns the rows of block w.
MMA operands are kept as parts: one fp16 part, or a high and a low bf16 part (three products make about 16 bits).
"""

from tilecrew.device.compat import gl, gluon, mma_v2
from tilecrew.device.mma import operand_layout, tile_layout, warp_accumulator_layout
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK

BLOCK = gl.constexpr(16)
NUM_BLOCKS = gl.constexpr(4)


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
def diagonal_blocks(L):
    """[64, 64] -> [64, 16]: the diagonal 16x16 blocks, stacked: a sum over four blocks of which all but one are
    masked."""
    blocks = gl.reshape(L, [CHUNK, NUM_BLOCKS, BLOCK])
    layout: gl.constexpr = blocks.type.layout
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    block = gl.arange(0, NUM_BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    own = gl.expand_dims(gl.expand_dims(row // BLOCK, 1) == gl.expand_dims(block, 0), 2)
    return gl.convert_layout(gl.sum(gl.where(own, blocks, 0.0), 1), warp_accumulator_layout())


@gluon.jit
def merge_blocks(D, L_parts, D_parts, row_factor, inverse, SPLIT: gl.constexpr):
    """Writes A into the tile `inverse` [64, 64], block column by block column.

    D          [64, 16] float32, the inverses of the diagonal blocks, stacked; D_parts: the same in shared memory
    L_parts    L in shared memory, without the factor of its rows
    row_factor shared vector [64] that multiplies the rows of L (beta, where L_parts holds K K^T)
    """
    layout: gl.constexpr = warp_accumulator_layout()
    row_block = (gl.arange(0, CHUNK, gl.SliceLayout(1, layout)) // BLOCK)[:, None]
    column: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros([CHUNK, BLOCK], gl.float32, layout)

    X = gl.where(row_block == 3, D, 0.0)
    store_column(X, inverse, 3)
    XL = X * row_factor.slice(3 * BLOCK, BLOCK).load(column)[None, :]
    sum_2 = multiply_accumulate(XL, L_parts, 3, 2, zero, SPLIT)
    sum_1 = multiply_accumulate(XL, L_parts, 3, 1, zero, SPLIT)
    sum_0 = multiply_accumulate(XL, L_parts, 3, 0, zero, SPLIT)

    X = gl.where(row_block == 2, D, 0.0) - multiply_accumulate(sum_2, D_parts, 2, 0, zero, SPLIT)
    store_column(X, inverse, 2)
    XL = X * row_factor.slice(2 * BLOCK, BLOCK).load(column)[None, :]
    sum_1 = multiply_accumulate(XL, L_parts, 2, 1, sum_1, SPLIT)
    sum_0 = multiply_accumulate(XL, L_parts, 2, 0, sum_0, SPLIT)

    X = gl.where(row_block == 1, D, 0.0) - multiply_accumulate(sum_1, D_parts, 1, 0, zero, SPLIT)
    store_column(X, inverse, 1)
    XL = X * row_factor.slice(BLOCK, BLOCK).load(column)[None, :]
    sum_0 = multiply_accumulate(XL, L_parts, 1, 0, sum_0, SPLIT)

    X = gl.where(row_block == 0, D, 0.0) - multiply_accumulate(sum_0, D_parts, 0, 0, zero, SPLIT)
    store_column(X, inverse, 0)


@gluon.jit
def store_column(X, inverse, COLUMN_BLOCK: gl.constexpr):
    inverse.slice(COLUMN_BLOCK * BLOCK, BLOCK, 1).store(X.to(inverse.dtype))
