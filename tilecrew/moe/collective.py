"""The layer over torch.distributed's all-to-all, for ranks that cannot read each other's memory: NCCL, gloo.

    headers (agreement.py) -> ids of all ranks -> Plan -> for each chunk: rows out, experts, results back -> combine

A *chunk* is a part of every rank's experts. Rows of all chunks are sent off at once; while a chunk is computed, later
ones arrive and results of earlier ones leave. Each expert's rows are in one chunk, so its product is as large as
without chunks, and results do not depend on how many there are.

Sizes of exchanges are needed on the host, so a call waits once for the device. Every wait ends at the latest with the
process group's timeout. Backward sends as forward does, in an order that is the same on all ranks: that is why the
whole operator is one autograd function.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tilecrew.moe.agreement import Agreement, agree
from tilecrew.moe.experts import SharedExperts, compute_experts, compute_shared
from tilecrew.moe.operators import wide_dtype
from tilecrew.moe.routing import expert_range


def place_in(group: dist.ProcessGroup) -> tuple[int, int]:
    """Rank in the group, and its size. Raises TypeError for another kind of world, ValueError outside of the group."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "world must be None, a torch.distributed.ProcessGroup or a tilecrew.parallel.World, "
            f"got {type(group).__name__}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("world must be a group that this process is a member of")
    return rank, dist.get_world_size(group)


class Chunk(NamedTuple):
    """A part of the experts, as one rank sees it.

    experts                     the rank's own experts of this chunk, as a slice of its weights
    sent                        slice of the rank's routes, in the order of sending
    send_splits, recv_splits    rows to and from each rank
    order                       [rows] where in what arrives the row of each place stands, sorted by expert
    offs                        [experts] int32 row behind the last one of each
    """

    experts: slice
    sent: slice
    send_splits: list[int]
    recv_splits: list[int]
    order: torch.Tensor
    offs: torch.Tensor

    @property
    def num_rows(self) -> int:
        return sum(self.recv_splits)


@dataclass(frozen=True)
class Plan:
    """Who sends what to whom. send_routes [S]: this rank's routes in the order of sending; token_rows [T, K]: place of
    each route in that order, -1 for none."""

    send_routes: torch.Tensor
    token_rows: torch.Tensor
    chunks: list[Chunk]
    group: dist.ProcessGroup
    gate_up_layout: str
    agreement: Agreement


def collective_moe_forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    shared: SharedExperts | torch.Tensor | None,
    gate_up_layout: str,
    group: dist.ProcessGroup,
    capacity: int | None,
    num_chunks: int,
) -> torch.Tensor:
    """`tilecrew.moe_forward` with a process group; see there."""
    rank, world_size = place_in(group)
    options = (gate_up_layout, capacity, num_chunks)
    agreement = agree(x, topk_ids, topk_weights, (w_gate_up, w_down), shared, options, group)
    all_ids = _gather_ids(topk_ids, max(agreement.num_tokens), group)
    num_chunks = min(num_chunks, -(-agreement.num_experts // world_size))
    routes = _make_chunks(all_ids, rank, agreement.num_experts, num_chunks)
    plan = Plan(
        *_send_order(topk_ids, agreement.num_experts, num_chunks, world_size, routes), group, gate_up_layout, agreement
    )
    weights = topk_weights.to(wide_dtype(x.dtype))
    # Shared experts are computed inside, while rows are under way; an output that is there already is only added.
    base, tensors = (shared, ()) if isinstance(shared, torch.Tensor) else (None, shared or ())
    return _CollectiveMoE.apply(plan, x.contiguous(), weights, w_gate_up, w_down, base, *tensors)


def _gather_ids(topk_ids: torch.Tensor, num_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[W, T of the rank with the most, K], -1 behind a rank's tokens."""
    padded = topk_ids.new_full((num_tokens, topk_ids.shape[1]), -1, dtype=torch.int64)
    padded[: topk_ids.shape[0]] = topk_ids
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    return torch.stack(gathered)


def _make_chunks(all_ids: torch.Tensor, rank: int, num_experts: int, num_chunks: int) -> list[Chunk]:
    """Everything of the chunks, from the number of routes between each rank and each expert."""
    world_size, device = all_ids.shape[0], all_ids.device
    ids = all_ids.flatten(1)
    is_route = (ids >= 0) & (ids < num_experts)
    counts = torch.zeros(world_size, num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(1, torch.where(is_route, ids, num_experts), torch.ones_like(ids))
    routes = counts[:, :num_experts].tolist()  # waits for the device: the sizes of exchanges
    chunks, first = [], 0
    for chunk in range(num_chunks):
        ranges = [_chunk_of_rank(owner, num_experts, world_size, chunk, num_chunks) for owner in range(world_size)]
        send_splits = [sum(routes[rank][experts.start : experts.stop]) for experts in ranges]
        own = ranges[rank]
        recv_splits = [sum(source[own.start : own.stop]) for source in routes]
        # Rows arrive by source and, of one source, by expert. Wanted: by expert and, of one expert, by source.
        arrived_at, begin = {}, 0
        for source in range(world_size):
            for expert in own:
                arrived_at[expert, source] = begin
                begin += routes[source][expert]
        pieces = [(expert, (rank + distance) % world_size) for expert in own for distance in range(world_size)]
        lengths = [routes[source][expert] for expert, source in pieces]
        shifts = [
            arrived_at[piece] - end + size
            for piece, size, end in zip(pieces, lengths, accumulate(lengths), strict=True)
        ]
        places = torch.arange(begin, device=device)
        order = places + torch.repeat_interleave(
            torch.tensor(shifts, dtype=torch.int64, device=device),
            torch.tensor(lengths, dtype=torch.int64, device=device),
            output_size=begin,
        )
        ends = list(accumulate(sum(source[expert] for source in routes) for expert in own))
        local = expert_range(rank, num_experts, world_size).start
        chunks.append(
            Chunk(
                experts=slice(own.start - local, own.stop - local),
                sent=slice(first, first + sum(send_splits)),
                send_splits=send_splits,
                recv_splits=recv_splits,
                order=order,
                offs=torch.tensor(ends, dtype=torch.int32, device=device),
            )
        )
        first += sum(send_splits)
    return chunks


def _chunk_of_rank(owner: int, num_experts: int, world_size: int, chunk: int, num_chunks: int) -> range:
    experts = expert_range(owner, num_experts, world_size)
    return experts[len(experts) * chunk // num_chunks : len(experts) * (chunk + 1) // num_chunks]


def _send_order(
    topk_ids: torch.Tensor, num_experts: int, num_chunks: int, world_size: int, chunks: list[Chunk]
) -> tuple[torch.Tensor, torch.Tensor, list[Chunk]]:
    """send_routes, token_rows and the chunks: routes are sorted by chunk, then owner, expert, token and k."""
    device = topk_ids.device
    chunk_of_expert = [0] * num_experts
    for owner in range(world_size):
        for chunk in range(num_chunks):
            for expert in _chunk_of_rank(owner, num_experts, world_size, chunk, num_chunks):
                chunk_of_expert[expert] = chunk
    ids = topk_ids.flatten().to(torch.int64)
    is_route = (ids >= 0) & (ids < num_experts)
    experts = torch.where(is_route, ids, 0)
    # Experts of an owner are consecutive, and so are owners: chunk and expert suffice.
    key = torch.tensor(chunk_of_expert, device=device)[experts] * num_experts + experts
    key = torch.where(is_route, key, num_chunks * num_experts) * max(ids.numel(), 1)
    order = torch.argsort(key + torch.arange(ids.numel(), device=device))
    send_routes = order[: chunks[-1].sent.stop]
    token_rows = torch.full_like(ids, -1)
    token_rows[send_routes] = torch.arange(send_routes.shape[0], device=device)
    return send_routes.to(torch.int32), token_rows.to(torch.int32).reshape(topk_ids.shape), chunks


class _Exchange:
    """Rows under way: `wait` gives what arrived."""

    def __init__(
        self,
        rows: torch.Tensor,
        send_splits: list[int],
        recv_splits: list[int],
        group: dist.ProcessGroup,
        out: torch.Tensor | None = None,
    ) -> None:
        self.sent = rows.contiguous()
        self.out = rows.new_empty(sum(recv_splits), rows.shape[1]) if out is None else out
        # As bytes: not every backend knows every dtype.
        received, sent = (tensor.view(torch.uint8) for tensor in (self.out, self.sent))
        self.work = dist.all_to_all_single(received, sent, recv_splits, send_splits, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        if self.work is not None:  # None where nothing is asynchronous
            self.work.wait()
        return self.out


class _CollectiveMoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        x: torch.Tensor,
        weights: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        base: torch.Tensor | None,
        *shared: torch.Tensor | None,
    ) -> torch.Tensor:
        keeps_graph = plan.agreement.requires_gradient
        send = torch.ops.tilecrew.moe_gather(x, None, plan.send_routes, plan.token_rows)
        arriving = [_Exchange(send[c.sent], c.send_splits, c.recv_splits, plan.group) for c in plan.chunks]
        shared_output, base_leaves = None, []
        if shared:
            base_leaves = [_leaf(tensor, keeps_graph) for tensor in (x, *shared)]
            with torch.set_grad_enabled(keeps_graph):
                shared_output = compute_shared(base_leaves[0], SharedExperts(*base_leaves[1:]), plan.gate_up_layout)
            base = shared_output.detach()
        returned = torch.empty_like(send)
        leaving, graphs = [], []
        for chunk, exchange in zip(plan.chunks, arriving, strict=True):
            rows = exchange.wait()[chunk.order]
            y, leaves = rows, []
            if chunk.num_rows > 0:
                leaves = [_leaf(t, keeps_graph) for t in (rows, w_gate_up[chunk.experts], w_down[chunk.experts])]
                with torch.set_grad_enabled(keeps_graph):
                    y = compute_experts(leaves[0], leaves[1], leaves[2], chunk.offs, plan.gate_up_layout)
            graphs.append((y, leaves))
            leaving.append(_send_back(y.detach(), chunk, plan.group, returned[chunk.sent]))
        for exchange in leaving:
            exchange.wait()
        if keeps_graph:
            ctx.save_for_backward(weights, returned)
            ctx.plan, ctx.graphs, ctx.shared_output, ctx.base_leaves = plan, graphs, shared_output, base_leaves
            ctx.like = (w_gate_up.detach(), w_down.detach())
        return torch.ops.tilecrew.moe_combine(returned, weights, base, plan.send_routes, plan.token_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, returned = ctx.saved_tensors
        plan: Plan = ctx.plan
        if ctx.graphs is None:
            raise RuntimeError("backward through moe_forward with a process group works once; retain_graph cannot help")
        d_out = d_out.contiguous()
        tables = (plan.send_routes, plan.token_rows)
        d_returned = torch.ops.tilecrew.moe_gather(d_out, weights, *tables)
        arriving = [_Exchange(d_returned[c.sent], c.send_splits, c.recv_splits, plan.group) for c in plan.chunks]
        d_weights = torch.ops.tilecrew.moe_products(d_out, returned, *tables)
        d_shared: tuple[torch.Tensor | None, ...] = ()
        if ctx.shared_output is not None:
            d_shared = _gradients(ctx.shared_output, ctx.base_leaves, d_out)
        d_sent = torch.empty_like(returned)
        d_gate_up, d_down = (torch.empty_like(tensor) for tensor in ctx.like)
        leaving = []
        for chunk, exchange, (y, leaves) in zip(plan.chunks, arriving, ctx.graphs, strict=True):
            d_rows = exchange.wait()[chunk.order]
            d_chunk: tuple[torch.Tensor | None, ...] = (d_rows, None, None)
            if chunk.num_rows > 0:
                d_chunk = _gradients(y, leaves, d_rows)
            for target, gradient in zip((d_gate_up, d_down), d_chunk[1:], strict=True):
                target[chunk.experts] = 0 if gradient is None else gradient
            if plan.agreement.x_requires_gradient:
                assert d_chunk[0] is not None
                leaving.append(_send_back(d_chunk[0], chunk, plan.group, d_sent[chunk.sent]))
        dx = None
        for exchange in leaving:
            exchange.wait()
        if ctx.needs_input_grad[1]:
            dx = torch.ops.tilecrew.moe_combine(d_sent, None, d_shared[0] if d_shared else None, *tables)
        ctx.graphs = ctx.shared_output = ctx.base_leaves = None
        d_base = d_out if ctx.needs_input_grad[5] else None
        return None, dx, d_weights, d_gate_up, d_down, d_base, *d_shared[1:]


def _send_back(y: torch.Tensor, chunk: Chunk, group: dist.ProcessGroup, out: torch.Tensor) -> _Exchange:
    """Rows sorted by expert go back to where they came from, in the order in which they arrived."""
    arrived = torch.empty_like(y).index_copy_(0, chunk.order, y)
    return _Exchange(arrived, chunk.recv_splits, chunk.send_splits, group, out)


def _leaf(tensor: Any, requires_gradient: bool) -> Any:
    return None if tensor is None else tensor.detach().requires_grad_(requires_gradient)


def _gradients(y: torch.Tensor, leaves: list[torch.Tensor | None], dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = iter(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy))
    return tuple(None if leaf is None else next(gradients) for leaf in leaves)
