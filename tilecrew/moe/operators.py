"""Dispatch and combine as torch operators: schemas, implementations, fake implementations for tracing, gradients.

    moe_gather(x, weights?, row_routes, token_rows) -> [P, H]          tokens to rows
    moe_combine(y, weights?, base?, row_routes, token_rows) -> [T, H]  rows to tokens
    moe_products(a, y, row_routes, token_rows) -> [T, K]               what a route weight's gradient is

x, a [T, H], y [P, H], weights [T, K], base [T, H]. row_routes [P] and token_rows [T, K] are inverse to each other: row
p holds the route row_routes[p] = t * K + k, and token_rows[t, k] = p; -1 where there is none. Each operator takes both,
because the gradients of the three are the three again: that of a combine is a weighted gather, and so on.

    moe_routing(topk_ids, num_tokens?, num_experts, rank, row_block) -> the six tables of `routing.Routing`

weights and products have the wide dtype of x: float32, or float64 for float64.
"""

import importlib
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew.moe.routing import max_rows, torch_tables

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LIBRARY = torch.library.Library("tilecrew", "FRAGMENT")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are held in."""
    return torch.promote_types(dtype, torch.float32)


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether the operators run as Triton kernels on this tensor's device and dtype; elsewhere torch computes them."""
    return tensor.dtype in KERNEL_DTYPES and hardware_of(tensor.device).triton_limit() is None


def _gather(
    x: torch.Tensor, weights: torch.Tensor | None, row_routes: torch.Tensor, token_rows: torch.Tensor
) -> torch.Tensor:
    top_k = token_rows.shape[1]
    if runs_kernels(x):
        out = x.new_empty(row_routes.shape[0], x.shape[1])
        with torch.cuda.device(x.device):
            _kernels().gather_launch(*_contiguous(x, weights, row_routes), out, top_k).run()
        return out
    is_route = row_routes >= 0
    if x.shape[0] == 0:
        return x.new_zeros(row_routes.shape[0], x.shape[1])
    routes = row_routes.clamp_min(0)
    rows = x[routes // top_k]
    if weights is not None:
        rows = (rows.to(weights.dtype) * weights.flatten()[routes, None]).to(x.dtype)
    return torch.where(is_route[:, None], rows, 0)


def _combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    base: torch.Tensor | None,
    row_routes: torch.Tensor,
    token_rows: torch.Tensor,
) -> torch.Tensor:
    shape = (token_rows.shape[0], y.shape[1])
    if runs_kernels(y):
        out = y.new_empty(shape)
        with torch.cuda.device(y.device):
            _kernels().combine_launch(*_contiguous(y, weights, token_rows, base), out).run()
        return out
    total = torch.zeros(shape, dtype=wide_dtype(y.dtype), device=y.device)
    if y.shape[0] > 0:
        for k in range(token_rows.shape[1]):
            rows = token_rows[:, k]
            values = y[rows.clamp_min(0)].to(total.dtype)
            if weights is not None:
                values = values * weights[:, k, None]
            total += torch.where((rows >= 0)[:, None], values, 0)
    if base is not None:
        total += base
    return total.to(y.dtype)


def _products(a: torch.Tensor, y: torch.Tensor, row_routes: torch.Tensor, token_rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty(token_rows.shape, dtype=wide_dtype(a.dtype), device=a.device)
    if runs_kernels(a):
        with torch.cuda.device(a.device):
            _kernels().products_launch(*_contiguous(a, y, token_rows), out).run()
        return out
    if y.shape[0] == 0:
        return out.zero_()
    wide = a.to(out.dtype)
    for k in range(token_rows.shape[1]):
        rows = token_rows[:, k]
        product = (wide * y[rows.clamp_min(0)].to(out.dtype)).sum(1)
        out[:, k] = torch.where(rows >= 0, product, 0)
    return out


def _routing(
    topk_ids: torch.Tensor, num_tokens: torch.Tensor | None, num_experts: int, rank: int, row_block: int
) -> tuple[torch.Tensor, ...]:
    if topk_ids.numel() == 0 or hardware_of(topk_ids.device).triton_limit() is not None:
        return torch_tables(topk_ids, num_tokens, num_experts, rank, row_block)
    kernel = importlib.import_module("tilecrew.moe.kernel_routing")
    tables = kernel.Tables(*_routing_fake(topk_ids, num_tokens, num_experts, rank, row_block))
    ids, counts = _contiguous(topk_ids, num_tokens)
    with torch.cuda.device(topk_ids.device):
        kernel.build(ids, counts, num_experts, rank, row_block, tables)
    return tuple(tables)


def _routing_fake(
    topk_ids: torch.Tensor, num_tokens: torch.Tensor | None, num_experts: int, rank: int, row_block: int
) -> tuple[torch.Tensor, ...]:
    world_size, num_own_tokens, top_k = topk_ids.shape
    # As len(expert_range(...)), which a symbolic number of ranks has not.
    num_local = num_experts // world_size + int(rank < num_experts % world_size)
    num_rows = max_rows(topk_ids.numel(), num_local, row_block)
    num_own = num_own_tokens * top_k
    shapes = ((num_local,), (num_local,), (num_rows, 2), (num_rows,), (num_own, 2), (num_own, 3))
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _kernels() -> Any:
    return importlib.import_module("tilecrew.moe.kernel_rows")


def _contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _gather_fake(
    x: torch.Tensor, weights: torch.Tensor | None, row_routes: torch.Tensor, token_rows: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(row_routes.shape[0], x.shape[1])


def _combine_fake(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    base: torch.Tensor | None,
    row_routes: torch.Tensor,
    token_rows: torch.Tensor,
) -> torch.Tensor:
    return y.new_empty(token_rows.shape[0], y.shape[1])


def _products_fake(
    a: torch.Tensor, y: torch.Tensor, row_routes: torch.Tensor, token_rows: torch.Tensor
) -> torch.Tensor:
    return a.new_empty(token_rows.shape, dtype=wide_dtype(a.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gather_gradients(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weights, row_routes, token_rows = ctx.saved_tensors
    dx = d_weights = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.tilecrew.moe_combine(d_rows, weights, None, row_routes, token_rows)
    if ctx.needs_input_grad[1]:
        d_weights = torch.ops.tilecrew.moe_products(x, d_rows, row_routes, token_rows)
    return dx, d_weights, None, None


def _combine_gradients(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    y, weights, _, row_routes, token_rows = ctx.saved_tensors
    dy = d_weights = None
    if ctx.needs_input_grad[0]:
        dy = torch.ops.tilecrew.moe_gather(d_out, weights, row_routes, token_rows)
    if ctx.needs_input_grad[1]:
        d_weights = torch.ops.tilecrew.moe_products(d_out, y, row_routes, token_rows)
    return dy, d_weights, d_out if ctx.needs_input_grad[2] else None, None, None


def _products_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, y, row_routes, token_rows = ctx.saved_tensors
    da = dy = None
    if ctx.needs_input_grad[0]:
        da = torch.ops.tilecrew.moe_combine(y, gradient, None, row_routes, token_rows)
    if ctx.needs_input_grad[1]:
        dy = torch.ops.tilecrew.moe_gather(a, gradient, row_routes, token_rows)
    return da, dy, None, None


LIBRARY.define("moe_gather(Tensor x, Tensor? weights, Tensor row_routes, Tensor token_rows) -> Tensor")
LIBRARY.define("moe_combine(Tensor y, Tensor? weights, Tensor? base, Tensor row_routes, Tensor token_rows) -> Tensor")
LIBRARY.define(
    "moe_routing(Tensor topk_ids, Tensor? num_tokens, int num_experts, int rank, int row_block) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("moe_routing", _routing, "CompositeExplicitAutograd")
torch.library.register_fake("tilecrew::moe_routing", _routing_fake, lib=LIBRARY)
LIBRARY.define("moe_products(Tensor a, Tensor y, Tensor row_routes, Tensor token_rows) -> Tensor")
for _name, _implementation, _fake, _gradients in (
    ("moe_gather", _gather, _gather_fake, _gather_gradients),
    ("moe_combine", _combine, _combine_fake, _combine_gradients),
    ("moe_products", _products, _products_fake, _products_gradients),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilecrew::{_name}", _fake, lib=LIBRARY)
    torch.library.register_autograd(f"tilecrew::{_name}", _gradients, setup_context=_save, lib=LIBRARY)
