"""Device code of stage (2): A = (I + L)^-1 of one chunk, for the value heads of a program of kernel_prepare, from 16x16
blocks.

With X = A, D_j = (I + L_jj)^-1 and blocks of 16:
    X_wj = [w = j] D_j - (sum over m > j of X_wm L_mj) D_j,    columns right to left; warp w owns the rows of block w.
MMA operands are kept as parts: one fp16 part, or a high and a low bf16 part (three products make about 16 bits).
"""

from tilecrew.device.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mma_v2,
    reinterpret,
    tma_store,
    tma_store_wait,
)
from tilecrew.device.mma import accumulator_layout, operand_layout, tile_layout, vector_layout, warp_accumulator_layout
from tilecrew.device.tiles import exp2
from tilecrew.device.triangular import invert_diagonal_blocks, left_and_middle, own_lower_blocks, scale_columns
from tilecrew.gated_delta_rule.chunk_blocks import allocate_matrices, matrix_of, store_lower
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK

BLOCK = gl.constexpr(16)
# Bounds of beta |k|^2 and |k|^2 for merges in fp16.
LARGEST_WRITE, LARGEST_SQUARE = gl.constexpr(2.1), gl.constexpr(64.0)


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


@gluon.jit
def has_long_keys(squares, beta, config: gl.constexpr):
    """1 where beta |k|^2 of a token passes 2.1, or |k|^2 64: the inverse in fp16 may overflow there (README.md)."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    square = squares.load(layout)
    largest = gl.max(square, 0) / LARGEST_SQUARE
    GROUP: gl.constexpr = config.head_group
    for group_idx in gl.static_range(GROUP):
        largest = gl.maximum(largest, gl.max(square * beta.index(group_idx).load(layout), 0) / LARGEST_WRITE)
    return largest > 1.0


@gluon.jit
def store_gated(KK, g, beta, parts, FIRST_COLUMN: gl.constexpr, SPLIT: gl.constexpr):
    """-L of some columns into a tile of their own, with beta where SPLIT, from K K^T of these columns."""
    rows: gl.constexpr = gl.SliceLayout(1, KK.type.layout)
    COLUMNS: gl.constexpr = KK.shape[1]
    columns = g.slice(FIRST_COLUMN, COLUMNS).load(gl.SliceLayout(0, KK.type.layout))
    minus_L = -KK * exp2(g.load(rows)[:, None] - columns[None, :])
    if SPLIT:
        minus_L *= beta.load(rows)[:, None]
    store_parts(minus_L, parts, SPLIT)


@gluon.jit
def gated_blocks(KK_blocks, g):
    """The strictly lower parts of -L's blocks on the diagonal, [64, 16], without beta, from those of K K^T."""
    NUM_BLOCKS: gl.constexpr = CHUNK // BLOCK
    blocks = gl.reshape(KK_blocks, [NUM_BLOCKS, BLOCK, BLOCK])
    layout: gl.constexpr = blocks.type.layout
    tile = reinterpret(g, gl.float32, [NUM_BLOCKS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    rows = gl.expand_dims(tile.load(gl.SliceLayout(2, layout)), 2)
    columns = gl.expand_dims(tile.load(gl.SliceLayout(1, layout)), 1)
    # Above the diagonal the exponent may be large, and an infinite factor times the zeros there would be NaN.
    gated = gl.where(blocks == 0.0, 0.0, -blocks * exp2(rows - columns))
    return gl.convert_layout(gl.reshape(gated, [CHUNK, BLOCK]), warp_accumulator_layout(), assert_trivial=True)


@gluon.jit
def invert_heads(KK, log2_decay, beta, inverse_desc, first_row, SPLIT: gl.constexpr, config: gl.constexpr):
    """The inverse of every value head of the group, each stored by TMA while the next one is computed."""
    square: gl.constexpr = accumulator_layout(CHUNK)
    layout: gl.constexpr = warp_accumulator_layout()
    # Two tiles, as the compiler puts a barrier between stores into one. Nobody reads the last block column.
    L_left, L_middle = allocate_parts(CHUNK // 2, SPLIT), allocate_parts(BLOCK, SPLIT)
    D_parts = allocate_parts(BLOCK, SPLIT)
    # What is rounded to bfloat16 in the end, and merged in fp16, loses nothing by products of fp16 in its blocks.
    PRODUCTS: gl.constexpr = not SPLIT and inverse_desc.dtype == gl.bfloat16
    ones = gl.allocate_shared_memory(gl.float32, [CHUNK], vector_layout())
    if config.for_scan:
        blocks = allocate_matrices(1, inverse_desc.dtype)
        inverse = matrix_of(blocks, 0)
    else:
        inverse = gl.allocate_shared_memory(inverse_desc.dtype, [CHUNK, CHUNK], inverse_desc.layout)
        blocks = inverse
    if config.gate_inside_inverse:
        ones.store(gl.full([CHUNK], 1.0, gl.float32, gl.BlockedLayout([1], [32], [4], [0])))
    else:
        left, middle = left_and_middle(KK)
        store_parts(left, L_left, SPLIT)
        store_parts(middle, L_middle, SPLIT)
    KK_blocks = own_lower_blocks(KK)
    # The barrier in front of a head's TMA store also tells that every warp has read L and D.
    for group_idx in range(config.head_group):
        head_beta = beta.index(group_idx)
        beta_rows = head_beta.load(gl.SliceLayout(1, layout))[:, None]
        if config.gate_inside_inverse:
            g = log2_decay.index(group_idx)
            # Above the diagonal e^{g_i - g_j} may be infinite: nothing there is read, the blocks on it have zeros.
            left, middle = left_and_middle(KK)
            minus_L = gated_blocks(KK_blocks, g)
            store_gated(left, g, head_beta, L_left, 0, SPLIT)
            store_gated(middle, g, head_beta, L_middle, 32, SPLIT)
            if SPLIT:
                D = invert_diagonal_blocks(minus_L * beta_rows, False)
            else:
                # A_g beta_j comes out where the D beta_j go in, and L without beta.
                D = scale_columns(invert_diagonal_blocks(minus_L * beta_rows, PRODUCTS), beta_rows)
        else:
            D = invert_diagonal_blocks(KK_blocks * -beta_rows, PRODUCTS)
        store_parts(D, D_parts, SPLIT)
        tma_store_wait(0)
        barrier()  # L and D are there, and A of the head before has left shared memory
        if config.gate_inside_inverse and not SPLIT:
            X_0, X_1, X_2, X_3 = merge_columns(D, L_left[0], L_middle[0], D_parts[0])
            inverse.store(join_columns(X_0, X_1, X_2, X_3, square).to(inverse.dtype))
        elif config.gate_inside_inverse:
            merge_blocks(D, (L_left, L_middle), D_parts, ones, head_beta, inverse, -1.0, config.for_scan, SPLIT)
        else:
            merge_blocks(D, (L_left, L_middle), D_parts, head_beta, head_beta, inverse, 1.0, config.for_scan, SPLIT)
        fence_async_shared()
        barrier()
        if config.for_scan:
            store_lower(inverse_desc, first_row + group_idx, blocks, 0)
        else:
            tma_store(inverse_desc, [(first_row + group_idx) * CHUNK, 0], inverse)
    tma_store_wait(0)
