"""Grouped GEMM in plain Triton, for every GPU that Triton compiles for; and the gradient of the weights.

Computes    out[m, :] = x[m, :] w[e]                       for every row m of group e, zeros behind the last group
            dw[e] = sum over rows m of group e of x[m]^T dy[m]

One program computes one tile. Rows are cut into slots such that no count of blocks is needed in advance: group e,
whose rows begin at b, has the slots from b // BLOCK_M + e on, which are always enough, and at most one too many.
Example: rows 0 to 129, none, 130 to 199 in blocks of 128 have the slots 0 and 1, 2 (empty), 3; rows behind them follow
as one more group.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilecrew.device.launch import Launch


class Sizes(NamedTuple):
    """Tiles and groups a program is compiled for. search: a power of two above the number of groups."""

    num_groups: int
    search: int
    block_m: int
    block_n: int
    block_k: int


def launch(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch for x [M, K], w [E, K, N] of any strides, offs [E] int32, out [M, N] of x's dtype or float32."""
    num_rows, num_groups, num_columns = x.shape[0], w.shape[0], w.shape[2]
    sizes = _sizes(num_rows, num_groups, x.dtype)
    num_slots = num_rows // sizes.block_m + num_groups + 1
    strides = (*x.stride(), *w.stride(), *out.stride())
    args = (x, w, offs, out, (num_rows, x.shape[1], num_columns), strides, sizes)
    return Launch(portable_kernel, num_slots * triton.cdiv(num_columns, sizes.block_n), args, _options(x.dtype))


def weight_gradient_launch(x: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor, dw: torch.Tensor) -> Launch:
    """The launch for x [M, K], dy [M, N], dw [E, K, N] contiguous."""
    num_groups, num_inner, num_columns = dw.shape
    sizes = _sizes(x.shape[0], num_groups, x.dtype)._replace(block_m=64)
    blocks = triton.cdiv(num_inner, sizes.block_m) * triton.cdiv(num_columns, sizes.block_n)
    strides = (*x.stride(), *dy.stride(), *dw.stride())
    args = (x, dy, offs, dw, (x.shape[0], num_inner, num_columns), strides, sizes)
    return Launch(weight_gradient_kernel, num_groups * blocks, args, _options(x.dtype))


def _sizes(num_rows: int, num_groups: int, dtype: torch.dtype) -> Sizes:
    block_m = 16
    while block_m < min(64, num_rows // num_groups):
        block_m *= 2
    block_k = 32 if dtype == torch.float32 else 64
    return Sizes(num_groups, triton.next_power_of_2(num_groups), block_m, 64, block_k)


def _options(dtype: torch.dtype) -> dict[str, int]:
    return {"num_warps": 4, "num_stages": 2 if dtype == torch.float32 else 3}


@triton.jit
def portable_kernel(x, w, offs, out, shape, strides, sizes: tl.constexpr):
    num_rows, num_inner, num_columns = shape
    x_row, x_inner, w_group, w_inner, w_column, out_row, out_column = strides
    BLOCK_M: tl.constexpr = sizes.block_m
    BLOCK_N: tl.constexpr = sizes.block_n
    BLOCK_K: tl.constexpr = sizes.block_k
    NUM_GROUPS: tl.constexpr = sizes.num_groups
    num_column_blocks = tl.cdiv(num_columns, BLOCK_N)
    slot = tl.program_id(0) // num_column_blocks
    column_block = tl.program_id(0) % num_column_blocks
    groups = tl.arange(0, sizes.search)
    ends = tl.load(offs + groups, mask=groups < NUM_GROUPS, other=0)
    is_before = (groups < NUM_GROUPS) & (ends // BLOCK_M + groups + 1 <= slot)
    group = tl.sum(is_before.to(tl.int32), 0)
    begin = tl.max(tl.where(is_before, ends, 0), 0)
    end = num_rows
    if group < NUM_GROUPS:
        end = tl.load(offs + group)
    first_row = begin + (slot - begin // BLOCK_M - group) * BLOCK_M
    if first_row < end:
        rows = first_row + tl.arange(0, BLOCK_M)
        columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = (rows < end)[:, None]
        column_mask = (columns < num_columns)[None, :]
        accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if group < NUM_GROUPS:
            inner = tl.arange(0, BLOCK_K)
            x_first = x + rows.to(tl.int64)[:, None] * x_row
            w_first = w + group.to(tl.int64) * w_group + columns.to(tl.int64)[None, :] * w_column
            for k in range(0, num_inner, BLOCK_K):
                inner_mask = k + inner < num_inner
                offset = (k + inner).to(tl.int64)
                left = tl.load(x_first + offset[None, :] * x_inner, mask=row_mask & inner_mask[None, :], other=0.0)
                right = tl.load(w_first + offset[:, None] * w_inner, mask=inner_mask[:, None] & column_mask, other=0.0)
                accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
        target = out + rows.to(tl.int64)[:, None] * out_row + columns[None, :] * out_column
        tl.store(target, accumulator.to(out.dtype.element_ty), mask=row_mask & column_mask)


@triton.jit
def weight_gradient_kernel(x, dy, offs, dw, shape, strides, sizes: tl.constexpr):
    """block_m and block_n: tile of dw; block_k: rows of a step."""
    num_rows, num_inner, num_columns = shape
    x_row, x_inner, dy_row, dy_column, dw_group, dw_inner, dw_column = strides
    BLOCK_M: tl.constexpr = sizes.block_m
    BLOCK_N: tl.constexpr = sizes.block_n
    BLOCK_K: tl.constexpr = sizes.block_k
    num_column_blocks = tl.cdiv(num_columns, BLOCK_N)
    num_inner_blocks = tl.cdiv(num_inner, BLOCK_M)
    column_block = tl.program_id(0) % num_column_blocks
    inner_block = tl.program_id(0) // num_column_blocks % num_inner_blocks
    group = tl.program_id(0) // (num_column_blocks * num_inner_blocks)
    begin = tl.load(offs + group - 1, mask=group > 0, other=0)
    end = tl.minimum(tl.load(offs + group), num_rows)
    inner = inner_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    inner_mask = inner < num_inner
    column_mask = (columns < num_columns)[None, :]
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(begin, end, BLOCK_K):
        rows = first + tl.arange(0, BLOCK_K)
        row_mask = rows < end
        offset = rows.to(tl.int64)
        left = tl.load(
            x + offset[None, :] * x_row + inner[:, None] * x_inner,
            mask=inner_mask[:, None] & row_mask[None, :],
            other=0.0,
        )
        right = tl.load(
            dy + offset[:, None] * dy_row + columns[None, :] * dy_column,
            mask=row_mask[:, None] & column_mask,
            other=0.0,
        )
        accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
    target = dw + group.to(tl.int64) * dw_group + inner.to(tl.int64)[:, None] * dw_inner + columns[None, :] * dw_column
    tl.store(target, accumulator.to(dw.dtype.element_ty), mask=inner_mask[:, None] & column_mask)
