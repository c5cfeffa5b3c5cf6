"""Layout choosers for Hopper's warp-group MMA (wgmma) and for mma.sync."""

from tilecrew.device.compat import gl, gluon


@gluon.constexpr_function
def accumulator_layout(num_columns, num_warps=4):
    """float32 accumulator of a wgmma with `num_columns` columns; every warp owns 16 rows of each 64."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, num_columns, 16])


@gluon.constexpr_function
def warp_accumulator_layout(num_warps=4):
    """float32 accumulator of mma.sync m16n8k16; warp w owns rows 16 w to 16 w + 15."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def operand_layout(accumulator, operand_index):
    """Register layout of a 16-bit MMA operand (0: left, 1: right) that goes with an accumulator layout."""
    return gl.DotOperandLayout(operand_index, accumulator, 2)


@gluon.constexpr_function
def tile_layout(shape, dtype):
    """Shared-memory layout of a tile that TMA fills and wgmma reads (the widest swizzle that fits)."""
    return gl.NVMMASharedLayout.get_default_for(shape, dtype)


@gluon.constexpr_function
def row_tile_layout():
    """Shared-memory layout of rows of float32 that TMA fills and roles read as vectors: no swizzle."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.constexpr_function
def vector_layout():
    """Shared-memory layout of a plain vector."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])
