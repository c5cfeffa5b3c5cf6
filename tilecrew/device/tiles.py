"""Tile operations that more than one kernel uses."""

from tilecrew.device.compat import gl, gluon, reinterpret
from tilecrew.device.mma import tile_layout, vector_layout

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def matrix_view(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A [1, ROWS, 1, COLUMNS] tile, as TMA filled it from a [B, T, H, K] tensor, seen as a matrix: the same bytes."""
    dtype: gl.constexpr = tile.dtype
    return reinterpret(tile, dtype, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def vectors_view(tile, ROWS: gl.constexpr, LENGTH: gl.constexpr):
    """An unswizzled float32 [ROWS, LENGTH] tile as ROWS vectors: `.index(r)` is the r-th."""
    return reinterpret(tile, gl.float32, [ROWS, LENGTH], vector_layout())


@gluon.jit
def scalar(vector, INDEX: gl.constexpr, LAYOUT: gl.constexpr):
    """Element INDEX of a shared vector, as a scalar (LAYOUT: any layout of a vector in the calling role)."""
    return gl.sum(vector.slice(INDEX, 1).load(LAYOUT), 0)


@gluon.jit
def exp2(x):
    """2^x in one instruction; results below 2^-126 are 0. Gates are at most 1, so what is lost counts for nothing."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """Logarithm to base 2 in one instruction; -inf of 0."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def opaque(x):
    """x (int32), hidden from the compiler.

    Roles run inside a dispatch loop. What they compute from kernel arguments alone is moved in front of that loop,
    where it stays live in every role and spills in the small ones; what they compute from captured values is not.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_kernel_start():
    """Programmatic dependent launch: a kernel launched behind this one with `launch_pdl` may take SMs that are free.

    It starts when every program of this kernel has come here or has ended.
    """
    opaque_instruction("griddepcontrol.launch_dependents;")


@gluon.jit
def wait_for_kernel_before():
    """Programmatic dependent launch: waits until the kernel before has ended and its writes can be seen.

    Whoever reads what it wrote waits, in every warp that does. Without `launch_pdl` it has ended already.
    """
    opaque_instruction("griddepcontrol.wait;")


@gluon.jit
def wait_until_stores_complete():
    """Waits until what this thread has stored by TMA can be seen in global memory; tma_store_wait, which waits until
    the shared memory of the stores has been read, says nothing about that."""
    opaque_instruction("cp.async.bulk.wait_group 0;")


@gluon.jit
def opaque_instruction(PTX: gl.constexpr):
    # An element-wise instruction needs an operand.
    TEXT: gl.constexpr = PTX + " mov.b32 $0, $1;"
    zero = gl.to_tensor(0)
    gl.inline_asm_elementwise(TEXT, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def row_groups(tile):
    """A 16-bit [R, C] tile as a buffer of [8, W] blocks, W = min(C, 64): the pieces of the swizzled layout.

    Block `column_group * R / 8 + row_group` can be indexed at run time: loops over rows stay loops and need few
    registers, which the roles that use them do not have.
    """
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    WIDTH: gl.constexpr = COLUMNS if COLUMNS < 64 else 64
    dtype: gl.constexpr = tile.dtype
    return reinterpret(tile, dtype, [ROWS * COLUMNS // (8 * WIDTH), 8, WIDTH], tile_layout([8, WIDTH], dtype))


@gluon.jit
def zero_rows(tile, first_row):
    """Zeros in the rows from `first_row` on of a 16-bit [R, C] tile; one warp is enough."""
    blocks = row_groups(tile)
    ROW_GROUPS: gl.constexpr = tile.shape[0] // 8
    COLUMN_GROUPS: gl.constexpr = blocks.shape[0] // ROW_GROUPS
    LANES: gl.constexpr = blocks.shape[2] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    for row_group in range(first_row // 8, ROW_GROUPS):
        for column_group in range(COLUMN_GROUPS):
            block = blocks.index(column_group * ROW_GROUPS + row_group)
            value = block.load(layout)
            block.store(gl.where(row + row_group * 8 < first_row, value, gl.zeros_like(value)))


@gluon.jit
def store_rows(tile, first, ROW_STRIDE: gl.constexpr, num_rows):
    """The first `num_rows` rows of a 16-bit [R, C] tile to global memory by ordinary stores; one warp is enough.

    first: pointer to the first element of the first row; ROW_STRIDE: elements from one row to the next.
    """
    blocks = row_groups(tile)
    ROW_GROUPS: gl.constexpr = tile.shape[0] // 8
    COLUMN_GROUPS: gl.constexpr = blocks.shape[0] // ROW_GROUPS
    WIDTH: gl.constexpr = blocks.shape[2]
    LANES: gl.constexpr = WIDTH // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    for row_group in range(0, gl.cdiv(num_rows, 8)):
        for column_group in range(COLUMN_GROUPS):
            value = blocks.index(column_group * ROW_GROUPS + row_group).load(layout)
            pointers = first + row_group * (8 * ROW_STRIDE) + row * ROW_STRIDE + (column + column_group * WIDTH)
            gl.store(pointers, value, mask=row + row_group * 8 < num_rows)
