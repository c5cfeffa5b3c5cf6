"""TMA descriptors of tensors, made on the host for a launch.

Layouts of tiles depend on shapes and dtypes only and take Triton long to build: each is built once.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from tilecrew.device.compat import TensorDescriptor, gl
from tilecrew.device.mma import row_tile_layout, tile_layout

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def token_descriptor(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """64 tokens of one head, `columns` columns of it, as a TMA box of a strided [B, T, H, K] tensor."""
    # TMA wants strides in multiples of 16 bytes, also of dimensions of size 1, whose strides mean nothing.
    strides = [stride if size > 1 else 128 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return descriptor(x, [*strides, 1], (1, 64, 1, columns))


def matrix_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of a contiguous tensor, seen as a matrix of its last dimension."""
    matrix = x.view(-1, x.shape[-1])
    return descriptor(matrix, matrix.stride(), (rows, columns))


def with_row_stride(x: torch.Tensor) -> torch.Tensor:
    """The stride of a dimension of size 1 means nothing, but TMA wants a multiple of 16 bytes from it."""
    return x if x.shape[0] > 1 else x.as_strided(x.shape, (x.shape[1], 1))


def stack_descriptor(w: torch.Tensor, rows: int, columns: int, transposed: bool) -> TensorDescriptor:
    """Tiles [rows, columns] of one matrix of a stack [E, K, N]; transposed: K is what is contiguous."""
    matrix = w.transpose(1, 2) if transposed else w
    tile = (1, columns, rows) if transposed else (1, rows, columns)
    strides = [stride if size > 1 else 8 for size, stride in zip(matrix.shape, matrix.stride(), strict=True)]
    return descriptor(matrix, [*strides[:2], 1], tile)


def descriptor(x: torch.Tensor, strides: Sequence[int], tile: tuple[int, ...]) -> TensorDescriptor:
    """TensorDescriptor(...) without its checks, which take most of its time and which the driver repeats."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(_tile_fields(tile, x.dtype), base=x, shape=list(x.shape), strides=list(strides))
    return made


@functools.cache
def _tile_fields(tile: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The fields that do not depend on the tensor. 16-bit tiles are swizzled for wgmma; float32 rows are read as
    vectors."""
    layout = row_tile_layout() if dtype == torch.float32 else tile_layout(list(tile), DTYPES[dtype])
    fields = dataclasses.fields(TensorDescriptor)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return {**defaults, "block_shape": list(tile), "layout": layout}
