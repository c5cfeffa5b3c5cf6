"""TMA descriptors of tensors, made on the host for a launch.

Layouts of tiles depend on shapes and dtypes only and take Triton long to build: each is built once.
"""

import functools
from collections.abc import Sequence

import torch

from tilecrew.device.compat import TensorDescriptor, gl
from tilecrew.device.mma import row_tile_layout, tile_layout

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def token_descriptor(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """64 tokens of one head, `columns` columns of it, as a TMA box of a strided [B, T, H, K] tensor."""
    # TMA wants strides in multiples of 16 bytes, also of dimensions of size 1, whose strides mean nothing.
    strides = [stride if size > 1 else 128 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return _descriptor(x, [*strides, 1], (1, 64, 1, columns))


def matrix_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of a contiguous tensor, seen as a matrix of its last dimension."""
    matrix = x.view(-1, x.shape[-1])
    return _descriptor(matrix, matrix.stride(), (rows, columns))


def _descriptor(x: torch.Tensor, strides: Sequence[int], tile: tuple[int, ...]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(strides), list(tile), _layout(tile, x.dtype))


@functools.cache
def _layout(tile: tuple[int, ...], dtype: torch.dtype):
    """16-bit tiles are swizzled for wgmma; float32 rows are read as vectors."""
    return row_tile_layout() if dtype == torch.float32 else tile_layout(list(tile), DTYPES[dtype])
