"""Tile operations that more than one kernel uses."""

from tilecrew.device.compat import gl, gluon
from tilecrew.device.mma import vector_layout

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def matrix_view(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A [1, ROWS, 1, COLUMNS] tile, as TMA filled it from a [B, T, H, K] tensor, seen as a matrix: the same bytes."""
    return tile._reinterpret(tile.dtype, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def vectors_view(tile, ROWS: gl.constexpr, LENGTH: gl.constexpr):
    """An unswizzled float32 [ROWS, LENGTH] tile as ROWS vectors: `.index(r)` is the r-th."""
    return tile._reinterpret(gl.float32, [ROWS, LENGTH], vector_layout())


@gluon.jit
def scalar(vector, INDEX: gl.constexpr, LAYOUT: gl.constexpr):
    """Element INDEX of a shared vector, as a scalar (LAYOUT: any layout of a vector in the calling role)."""
    return gl.sum(vector.slice(INDEX, 1).load(LAYOUT), 0)


@gluon.jit
def exp2(x):
    """2^x in one instruction; results below 2^-126 are 0. Gates are at most 1, so what is lost counts for nothing."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def opaque(x):
    """x (int32), hidden from the compiler.

    Roles run inside a dispatch loop. What they compute from kernel arguments alone is moved in front of that loop,
    where it stays live in every role and spills in the small ones; what they compute from captured values is not.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def zero_rows(tile, first_row):
    """Zeros in the rows from `first_row` on of a 16-bit [R, C] tile; a few registers, one warp is enough."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    THREADS_ALONG: gl.constexpr = COLUMNS // 8 if COLUMNS < 128 else 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS_ALONG, THREADS_ALONG], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for start in gl.static_range(0, ROWS, 8):
        if start + 8 > first_row:
            rows = tile.slice(start, 8)
            value = rows.load(layout)
            rows.store(gl.where((row + start < first_row)[:, None], value, gl.zeros_like(value)))
