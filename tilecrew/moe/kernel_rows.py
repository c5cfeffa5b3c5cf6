"""Rows between tokens and experts, in plain Triton: gather, combine, and products for the gradients of weights.

Computes    gather      out[p] = weights[r] * x[r // K],  r = row_routes[p];  zeros where r is -1          (README, 1)
            combine     out[t] = sum over k, in order, of weights[t, k] * y[token_rows[t, k]] + base[t]    (README, 2)
            products    out[t, k] = a[t] . y[token_rows[t, k]];  0 where token_rows is -1                  (README, 3)
Sums and products are float32, rounded once. weights and base may be missing (None): factor one, and nothing to add.
A route that is -1 is not read and not multiplied: whatever its weight is, NaN too, it adds nothing.

Roles       one: a program of four warps computes BLOCK columns of one row, of one token, or one product.
Timeline    gather: route -> row -> store. combine: for each k: row number and weight -> row -> sum; store.
            products: for each block of columns: both -> sum; reduce; store. No program waits for another.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilecrew.device.launch import Launch

MAX_BLOCK = 1024
# Routes of a token up to which all of their loads are in flight at once.
MAX_UNROLLED_ROUTES = tl.constexpr(16)


class Sizes(NamedTuple):
    """What a program is compiled for. block: columns, a power of two."""

    num_columns: int
    top_k: int
    block: int


def gather_launch(
    x: torch.Tensor, weights: torch.Tensor | None, row_routes: torch.Tensor, out: torch.Tensor, top_k: int
) -> Launch:
    """The launch for x [T, H], weights [T, K] float32 or None, row_routes [P] int32, out [P, H]; all contiguous."""
    sizes = _sizes(out.shape[1], top_k)
    return Launch(gather_kernel, _num_programs(out, sizes), (x, weights, row_routes, out, sizes), {"num_warps": 4})


def combine_launch(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    token_rows: torch.Tensor,
    base: torch.Tensor | None,
    out: torch.Tensor,
) -> Launch:
    """The launch for y [P, H], weights [T, K] float32 or None, token_rows [T, K] int32, base and out [T, H], base or
    None; all contiguous."""
    sizes = _sizes(out.shape[1], token_rows.shape[1])
    args = (y, weights, token_rows, base, out, sizes)
    return Launch(combine_kernel, _num_programs(out, sizes), args, {"num_warps": 4})


def products_launch(a: torch.Tensor, y: torch.Tensor, token_rows: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch for a [T, H], y [P, H], token_rows [T, K] int32, out [T, K] float32; all contiguous."""
    sizes = _sizes(a.shape[1], token_rows.shape[1])
    return Launch(products_kernel, token_rows.numel(), (a, y, token_rows, out, sizes), {"num_warps": 4})


def _sizes(num_columns: int, top_k: int) -> Sizes:
    return Sizes(num_columns, top_k, min(MAX_BLOCK, triton.next_power_of_2(num_columns)))


def _num_programs(out: torch.Tensor, sizes: Sizes) -> int:
    return out.shape[0] * triton.cdiv(sizes.num_columns, sizes.block)


@triton.jit
def gather_kernel(x, weights, row_routes, out, sizes: tl.constexpr):
    NUM_COLUMNS: tl.constexpr = sizes.num_columns
    TOP_K: tl.constexpr = sizes.top_k
    row, columns, mask = place_of(NUM_COLUMNS, sizes.block)
    route = tl.load(row_routes + row)
    is_route = route >= 0
    source = x + (route // TOP_K).to(tl.int64) * NUM_COLUMNS + columns
    values = tl.load(source, mask=mask & is_route, other=0.0).to(tl.float32)
    if weights is not None:
        values *= tl.load(weights + route, mask=is_route, other=0.0)
    tl.store(out + row * NUM_COLUMNS + columns, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(y, weights, token_rows, base, out, sizes: tl.constexpr):
    NUM_COLUMNS: tl.constexpr = sizes.num_columns
    TOP_K: tl.constexpr = sizes.top_k
    BLOCK: tl.constexpr = sizes.block
    token, columns, mask = place_of(NUM_COLUMNS, BLOCK)
    first = token * TOP_K
    total = tl.zeros([BLOCK], tl.float32)
    if TOP_K <= MAX_UNROLLED_ROUTES:
        for k in tl.static_range(TOP_K):
            total = add_route(total, y, weights, token_rows, first + k, columns, mask, NUM_COLUMNS)
    else:
        for k in range(TOP_K):
            total = add_route(total, y, weights, token_rows, first + k, columns, mask, NUM_COLUMNS)
    target = token * NUM_COLUMNS + columns
    if base is not None:
        total += tl.load(base + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def products_kernel(a, y, token_rows, out, sizes: tl.constexpr):
    NUM_COLUMNS: tl.constexpr = sizes.num_columns
    TOP_K: tl.constexpr = sizes.top_k
    BLOCK: tl.constexpr = sizes.block
    route = tl.program_id(0).to(tl.int64)
    row = tl.load(token_rows + route).to(tl.int64)
    left_row = a + route // TOP_K * NUM_COLUMNS
    right_row = y + row * NUM_COLUMNS
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, NUM_COLUMNS, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = (columns < NUM_COLUMNS) & (row >= 0)
        left = tl.load(left_row + columns, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(right_row + columns, mask=mask, other=0.0).to(tl.float32)
        total += left * right
    tl.store(out + route, tl.sum(total, 0))


@triton.jit
def add_route(total, y, weights, token_rows, route, columns, mask, NUM_COLUMNS: tl.constexpr):
    row = tl.load(token_rows + route).to(tl.int64)
    is_route = row >= 0
    values = tl.load(y + row * NUM_COLUMNS + columns, mask=mask & is_route, other=0.0).to(tl.float32)
    if weights is not None:
        values *= tl.load(weights + route, mask=is_route, other=0.0)
    return total + values


@triton.jit
def place_of(NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Row of the output, its columns, and which of them there are."""
    num_blocks: tl.constexpr = (NUM_COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    return row, columns, columns < NUM_COLUMNS
