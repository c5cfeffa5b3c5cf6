"""The layer over ranks that address each other's memory: forward, and its dual backward. README.md has the protocol.

    forward     share x -> dispatch + product with w_gate_up -> SwiGLU -> product with w_down + combine
    backward    share d_out -> dispatch + product with w_down^T -> ... -> product with w_gate_up^T + combine

Each sends in the same order on all ranks, whatever their inputs require.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tilecrew.moe import checks, fused
from tilecrew.moe.experts import GATE_UP_LAYOUTS, SWIGLU, SharedExperts, compute_shared
from tilecrew.moe.operators import wide_dtype
from tilecrew.moe.routing import check_ids, expert_range
from tilecrew.moe.workspace import MoESizes, MoEWorkspace, tell
from tilecrew.parallel import fusion
from tilecrew.parallel.world import World


def expert_parallel_moe_forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    num_experts: int | None,
    shared: SharedExperts | torch.Tensor | None,
    gate_up_layout: str,
    world: World,
    capacity: int | None,
) -> torch.Tensor:
    """`tilecrew.moe_forward` with a World; see there."""
    world.require_open()
    try:
        checks.check_layer(x, topk_ids, topk_weights, w_gate_up, w_down, shared, gate_up_layout)
        if capacity is None:
            raise ValueError("capacity must be the most tokens of a rank where world is a World, got None")
        checks.check_capacity(capacity)
        if num_experts is None:
            num_experts = w_gate_up.shape[0] * world.size
        checks.check_num_experts(num_experts, topk_ids.shape[1])
        checks.check_num_tokens(x.shape[0], capacity, world.rank)
        _check_place(x, world)
        check_ids(topk_ids, num_experts)
        _check_experts(w_gate_up, num_experts, world)
        I = w_down.shape[1]
        sizes = MoESizes(capacity, topk_ids.shape[1], num_experts, x.shape[1], I, x.dtype)
        more = shared if isinstance(shared, SharedExperts) else (shared,)
        inputs = (x, topk_weights, w_gate_up, w_down, *more)
        keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    except (TypeError, ValueError) as error:
        _tell(world, f"an error: {error}")
        raise
    if world.device.type == "cpu":
        world.agree(f"a call of {sizes}, gate_up_layout {gate_up_layout!r}, {'with' if keeps else 'without'} gradients")
    workspace = MoEWorkspace.of(world, sizes)
    fusion.follow_caller(world)
    with world.use():
        base = compute_shared(x, shared, gate_up_layout) if isinstance(shared, SharedExperts) else shared
        base = None if base is None else base.contiguous()
        weights = topk_weights.to(wide_dtype(x.dtype)).contiguous()
        options = (workspace, gate_up_layout, keeps)
        return _ExpertParallelMoE.apply(options, x.contiguous(), topk_ids, weights, w_gate_up, w_down, base)


def _tell(world: World, what: str) -> None:
    """The others learn that this rank has raised, where they agree in this call: processes on the CPU before every
    call, those with GPUs when they make their first workspace."""
    if world.device.type == "cpu" or not world.workspaces:
        tell(world, what)


def _check_place(x: torch.Tensor, world: World) -> None:
    if x.device != world.device:
        raise ValueError(f"x must be on the device of the world, {world.device}, got {x.device}")


def _check_experts(w_gate_up: torch.Tensor, num_experts: int, world: World) -> None:
    expected = len(expert_range(world.rank, num_experts, world.size))
    if w_gate_up.shape[0] != expected:
        raise ValueError(
            f"w_gate_up of rank {world.rank} must have {expected} of E = {num_experts} experts "
            f"(tilecrew.moe.expert_range), got {w_gate_up.shape[0]}"
        )


class _ExpertParallelMoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[MoEWorkspace, str, bool],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        base: torch.Tensor | None,
    ) -> torch.Tensor:
        workspace, layout, keeps = options
        gathers = workspace.gathers and not keeps  # gradients need the rows
        routing = workspace.share_tokens(x, topk_ids, weights, brings=gathers)
        num_rows, num_columns = workspace.num_rows, w_gate_up.shape[2]
        rows = None if gathers else x.new_empty(num_rows, x.shape[1])
        if layout == "interleaved" and not keeps:
            hidden = x.new_empty(num_rows, num_columns // 2)
            fused.dispatch_gemm(workspace, routing, w_gate_up, SWIGLU, rows, hidden)
        else:
            gate_up = x.new_empty(num_rows, num_columns)
            fused.dispatch_gemm(workspace, routing, w_gate_up, None, rows, gate_up)
            hidden = _activate(gate_up, layout)
        out = fused.gemm_combine(workspace, routing, hidden, w_down, weights, base, x.shape[0])
        if keeps:
            ctx.save_for_backward(rows, gate_up, workspace.row_weights(routing), w_gate_up, w_down)
            ctx.workspace, ctx.layout, ctx.routing = workspace, layout, routing
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        workspace: MoEWorkspace = ctx.workspace
        with workspace.world.use():
            gradients = _backward(workspace, ctx.layout, ctx.routing, ctx.saved_tensors, d_out.contiguous())
        return None, gradients[0], None, *gradients[1:], d_out if ctx.needs_input_grad[6] else None


def _backward(
    workspace: MoEWorkspace, layout: str, routing: Any, saved: tuple[torch.Tensor, ...], d_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, d_weights, d_w_gate_up, d_w_down."""
    rows, gate_up, row_weights, w_gate_up, w_down = saved
    num_tokens = d_out.shape[0]
    workspace.share_gradients(d_out)
    d_rows = torch.empty_like(rows)
    d_hidden = rows.new_empty(rows.shape[0], w_down.shape[1])
    # Of results without their route's weight, which follows: its own gradient is hidden . d_hidden.
    fused.dispatch_gemm(workspace, routing, w_down.transpose(1, 2), None, d_rows, d_hidden)
    with torch.enable_grad():
        leaf = gate_up.detach().requires_grad_()
        hidden = _activate(leaf, layout)
    wide = row_weights.dtype
    products = (hidden.detach().to(wide) * d_hidden.to(wide)).sum(1)
    is_row = routing.row_routes >= 0
    workspace.row_values.local[: rows.shape[0]].copy_(torch.where(is_row, products, 0))
    weighted = (d_hidden.to(wide) * row_weights[:, None]).to(rows.dtype)
    (d_gate_up,) = torch.autograd.grad(hidden, leaf, weighted)
    dx = fused.gemm_combine(workspace, routing, d_gate_up, w_gate_up.transpose(1, 2), None, None, num_tokens)
    d_weights = fused.pull_values(workspace, routing, num_tokens)
    if rows.shape[0] == 0:
        return dx, d_weights, torch.zeros_like(w_gate_up), torch.zeros_like(w_down)
    weighted = (hidden.detach().to(wide) * row_weights[:, None]).to(rows.dtype)
    d_w_gate_up = torch.ops.tilecrew.grouped_gemm_weight_gradient(rows, d_gate_up, routing.offs)
    d_w_down = torch.ops.tilecrew.grouped_gemm_weight_gradient(weighted, d_rows, routing.offs)
    return dx, d_weights, d_w_gate_up, d_w_down


def _activate(gate_up: torch.Tensor, layout: str) -> torch.Tensor:
    """[P, 2 * I] -> [P, I]: SwiGLU in the wide dtype, rounded once."""
    wide = gate_up.to(wide_dtype(gate_up.dtype))
    if layout == "interleaved":
        return SWIGLU.reference(wide, wide).to(gate_up.dtype)
    gate, up = wide.chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def load(workspace: MoEWorkspace) -> None:
    """Runs everything on tokens without routes, as many as a call may have and a single one, for which torch has other
    kernels: nothing of it waits while the workspace is loading."""
    sizes, device = workspace.sizes, workspace.world.device
    L, H, I = len(workspace.experts), sizes.hidden_size, sizes.intermediate_size

    def matrices(num_inner: int, num_columns: int) -> torch.Tensor:
        # All experts in almost the same memory.
        values = torch.zeros(num_inner + L, num_columns, dtype=sizes.dtype, device=device)
        return values.as_strided((L, num_inner, num_columns), (num_columns, num_columns, 1))

    w_gate_up, w_down = matrices(H, 2 * I), matrices(I, H)
    for transposed in (False, True):
        if transposed:  # contiguous in the dimension before the last
            w_gate_up, w_down = (matrices(w.shape[2], w.shape[1]).transpose(1, 2) for w in (w_gate_up, w_down))
        for num_tokens, ids_dtype, weights_dtype in (
            (sizes.capacity, torch.int64, torch.float32),
            (1, torch.int32, sizes.dtype),
        ):
            x = torch.zeros(num_tokens, H, dtype=sizes.dtype, device=device)
            routes = (num_tokens, sizes.top_k)
            ids = torch.full(routes, -1, dtype=ids_dtype, device=device)
            weights = torch.zeros(routes, dtype=weights_dtype, device=device).to(torch.float32)
            for layout in GATE_UP_LAYOUTS:
                for keeps in (False, True):
                    for base in (None, x):
                        inputs = [x, weights, w_gate_up, w_down, base]
                        if keeps:
                            inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
                        options = (workspace, layout, keeps)
                        out = _ExpertParallelMoE.apply(options, inputs[0], ids, *inputs[1:])
                        if keeps:
                            out.backward(torch.zeros_like(out))
