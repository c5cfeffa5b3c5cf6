"""Lower triangular matrices [64, 64] of chunks as blocks [32, 32]: what is above the diagonal is not moved.

In global memory there are three blocks one behind the other, [..., 3, 32, 32]: top left, bottom left, bottom right. In
shared memory a matrix has four, by columns, so that a swizzle of 64 bytes makes a tile [64, 64] of them that MMAs read.
"""

import torch

from tilecrew.device.compat import TensorDescriptor, gl, gluon, reinterpret, tma_load, tma_store
from tilecrew.device.descriptors import descriptor
from tilecrew.device.mma import tile_layout
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK

BLOCK = gl.constexpr(CHUNK // 2)
NUM_BLOCKS = gl.constexpr(3)  # of a matrix in global memory
PLACES = gl.constexpr((0, 1, 3))  # of these blocks among the four in shared memory; 2 is the top right one


def whole_matrices(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 3, 32, 32] in global memory as matrices [..., 64, 64], with zeros for their top right blocks."""
    top_left, bottom_left, bottom_right = blocks.unbind(-3)
    top = torch.cat([top_left, torch.zeros_like(top_left)], -1)
    return torch.cat([top, torch.cat([bottom_left, bottom_right], -1)], -2)


def block_descriptor(x: torch.Tensor) -> TensorDescriptor:
    """A block of a matrix as a TMA box, of blocks [..., 3, 32, 32] that lie one below the other."""
    matrices = x.view(-1, NUM_BLOCKS.value * BLOCK.value, BLOCK.value)
    return descriptor(matrices, matrices.stride(), (1, BLOCK.value, BLOCK.value))


@gluon.jit
def allocate_matrices(NUM_MATRICES: gl.constexpr, dtype: gl.constexpr):
    """Room for that many matrices in shared memory, [4 NUM_MATRICES, 1, 32, 32]."""
    layout: gl.constexpr = tile_layout([1, BLOCK, BLOCK], dtype)
    return gl.allocate_shared_memory(dtype, [4 * NUM_MATRICES, 1, BLOCK, BLOCK], layout)


@gluon.jit
def matrix_of(blocks, matrix):
    """One matrix in shared memory as a tile [64, 64]: the same bytes."""
    dtype: gl.constexpr = blocks.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    NUM_MATRICES: gl.constexpr = blocks.shape[0] // 4
    return reinterpret(blocks, dtype, [NUM_MATRICES, CHUNK, CHUNK], layout).index(matrix)


@gluon.jit
def clear_top_right(blocks):
    """Zeros in the top right block of every matrix, where `load_lower` leaves them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    tile: gl.constexpr = tile_layout([BLOCK, BLOCK], blocks.dtype)
    NUM_MATRICES: gl.constexpr = blocks.shape[0] // 4
    for matrix in gl.static_range(NUM_MATRICES):
        block = reinterpret(blocks.index(4 * matrix + 2), blocks.dtype, [BLOCK, BLOCK], tile)
        block.store(gl.zeros([BLOCK, BLOCK], blocks.dtype, layout))


@gluon.jit
def load_lower(desc, index, full, blocks, matrix):
    """TMA of the three blocks of number `index` in global memory into one matrix; `full` gets their bytes."""
    for block in gl.static_range(NUM_BLOCKS):
        tma_load(desc, [index, block * BLOCK, 0], full, blocks.index(4 * matrix + PLACES[block]))


@gluon.jit
def store_lower(desc, index, blocks, matrix):
    """TMA of three blocks of one matrix in shared memory to number `index` in global memory."""
    for block in gl.static_range(NUM_BLOCKS):
        tma_store(desc, [index, block * BLOCK, 0], blocks.index(4 * matrix + PLACES[block]))
