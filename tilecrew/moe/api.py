"""The mixture-of-experts layer: router outputs in, tokens out. Checks, defaults, the module; no tiles.

Symbols: T tokens of this rank, H hidden size, K routes a token, E experts of all ranks, L experts of this rank, I
intermediate size, S that of the shared experts.
"""

import math
from typing import TYPE_CHECKING

import torch

from tilecrew.moe import checks, one_rank, operators
from tilecrew.moe.experts import SharedExperts, compute_experts, compute_shared, interleave_gate_up
from tilecrew.moe.routing import build_routing, expert_range

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import TypeIs

    from tilecrew.parallel.world import World


def moe_forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    shared: SharedExperts | torch.Tensor | None = None,
    gate_up_layout: str = "interleaved",
    world: "ProcessGroup | World | None" = None,
    capacity: int | None = None,
    num_chunks: int = 2,
    num_experts: int | None = None,
) -> torch.Tensor:
    """out[t] = sum over k of topk_weights[t, k] * expert_{topk_ids[t, k]}(x[t]) + the shared experts' output.

    expert(x) = (silu(x gate) * (x up)) down. Each token's experts are added in float32 in the order of k, with float32
    weights, then the shared experts' output, and rounded once: the same bits in every run.

    Without `world` all experts are here. On a GPU nothing waits for the device: a call can be captured in a CUDA graph,
    and a replay may have other tokens, ids and weights. On Hopper, in bfloat16 or float16, the first product of a call
    without gradients reads tokens where they are. With a process group, experts are spread over its ranks and tokens
    travel by all-to-all (NCCL on GPUs, gloo on the CPU); every rank must make the call, also one without tokens, and
    with gradients every rank must call backward, because that sends as well.

    With a World (bfloat16 or float16 on GPUs) ranks address each other's memory: products read tokens, and store
    results, where they belong, or rows are moved beside them. Ranks call in one order, and all of them with gradients
    or none. On a GPU the result is on the rank's stream; a call can be captured in a CUDA graph. Where a wait for
    another rank has failed the result is NaN, and `World.synchronize` raises WaitError on every rank; on the CPU the
    call does. The first call with new sizes makes a `workspace.MoEWorkspace`, which the World keeps.

    Gradients flow to x, topk_weights, w_gate_up, w_down and the shared experts' tensors. Twice differentiable without
    `world`.

    Args:
        x: [T, H] bfloat16, float16 or float32 (on the CPU also float64), H a multiple of 8. T may be 0, and differ
            between ranks.
        topk_ids: [T, K] int32 or int64 experts of each token, numbered over all ranks; K at most E. -1 is no route: it
            adds nothing, whatever its weight. An expert may occur twice. Other values raise where they are on the host;
            on a GPU, where that cannot be seen without waiting, they count as -1.
        topk_weights: [T, K] floating point.
        w_gate_up: [L, H, 2 * I] in the dtype of x, I a multiple of 8; contiguous in its last dimension, or in the one
            before. L is E without `world`, else `len(tilecrew.moe.expert_range(rank, E, world_size))`, which may be 0.
        w_down: [L, I, H] in the dtype of x, contiguous likewise.
        shared: experts that every token goes to, whole on every rank; or their output [T, H] in the dtype of x, which
            is then only added.
        gate_up_layout: "interleaved" as `tilecrew.moe.interleave_gate_up` makes it, or "halves": I gate columns, then I
            up columns. The first is faster on Hopper GPUs, where SwiGLU is then part of the first product.
        world: None, a torch.distributed process group, or a tilecrew.parallel.World.
        capacity: the most tokens that x may have, None for any; the same on all ranks. Not None with a World, which
            allocates for it once.
        num_chunks: with a process group, parts of the experts whose tokens travel separately, so that one part is
            computed while another is under way; the same on all ranks.
        num_experts: E; needed with a World whose ranks have different numbers of experts. None: L times the ranks of
            the World; otherwise counted.

    Returns:
        [T, H] in the dtype of x.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes, devices, strides or values that do not fit, or too many tokens; the message names the
            argument, what it is and what was expected. With a process group, and a World of processes on the CPU, all
            ranks raise where one does; with other Worlds on the first call with new sizes.
    """
    if world is not None and _is_world(world):
        from tilecrew.moe.expert_parallel import expert_parallel_moe_forward

        return expert_parallel_moe_forward(
            x,
            topk_ids,
            topk_weights,
            w_gate_up,
            w_down,
            num_experts=num_experts,
            shared=shared,
            gate_up_layout=gate_up_layout,
            world=world,
            capacity=capacity,
        )
    if num_experts is not None and world is not None:
        raise ValueError(f"num_experts must be None without a tilecrew.parallel.World, got {num_experts!r}")
    if world is not None:
        from tilecrew.moe.collective import collective_moe_forward

        return collective_moe_forward(
            x,
            topk_ids,
            topk_weights,
            w_gate_up,
            w_down,
            shared=shared,
            gate_up_layout=gate_up_layout,
            group=world,
            capacity=capacity,
            num_chunks=num_chunks,
        )
    checks.check_layer(x, topk_ids, topk_weights, w_gate_up, w_down, shared, gate_up_layout)
    if num_experts not in (None, w_gate_up.shape[0]):
        raise ValueError(f"num_experts must be None without a tilecrew.parallel.World, got {num_experts!r}")
    checks.check_num_experts(w_gate_up.shape[0], topk_ids.shape[1])
    checks.check_capacity(capacity)
    checks.check_num_tokens(x.shape[0], capacity, rank=0)
    # Nothing waits for blocks of rows here, so experts' rows need no padding.
    routing = build_routing(topk_ids[None], num_experts=w_gate_up.shape[0], row_block=1)
    token_rows = routing.combine_indices[:, 1].reshape(topk_ids.shape).contiguous()
    x = x.contiguous()
    base = compute_shared(x, shared, gate_up_layout) if isinstance(shared, SharedExperts) else shared
    if one_rank.requires_gradient(shared, x, topk_weights, w_gate_up, w_down):
        rows = torch.ops.tilecrew.moe_gather(x, None, routing.row_routes, token_rows)
        y = compute_experts(rows, w_gate_up, w_down, routing.offs, gate_up_layout)
    else:
        y = one_rank.compute_experts_of_tokens(
            x, routing.row_routes, token_rows, w_gate_up, w_down, routing.offs, gate_up_layout
        )
    weights = topk_weights.to(operators.wide_dtype(x.dtype))
    return torch.ops.tilecrew.moe_combine(y, weights, base, routing.row_routes, token_rows)


class ExpertParallelMoE(torch.nn.Module):
    """`moe_forward` with parameters: the experts of this rank, and shared experts.

    forward(x [T, H], topk_ids [T, K], topk_weights [T, K]) -> [T, H]; see `moe_forward`.

    Parameters, in `dtype` (default: torch's) on `device`, uniform in ±1 / sqrt(inputs) until they are loaded:
        w_gate_up             [L, H, 2 * I], interleaved
        w_down                [L, I, H]
        shared_w_gate_up      [H, 2 * S], shared_w_down [S, H]: None without shared experts
        shared_output_gate    [H], or None

    Args:
        num_experts: E, of all ranks; this rank gets `experts`, a range.
        hidden_size: H, a multiple of 8.
        intermediate_size: I, a multiple of 8.
        shared_intermediate_size: S, a multiple of 8; 0: no shared experts.
        shared_output_gate: the shared experts' output is multiplied by sigmoid(x shared_output_gate).
        world, capacity, num_chunks: as in `moe_forward`. With a World, `prepare` allocates before the first call.
    """

    shared_w_gate_up: torch.nn.Parameter | None
    shared_w_down: torch.nn.Parameter | None
    shared_output_gate: torch.nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        shared_intermediate_size: int = 0,
        shared_output_gate: bool = False,
        world: "ProcessGroup | World | None" = None,
        capacity: int | None = None,
        num_chunks: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.check_capacity(capacity)
        for name, value, smallest, multiple in (
            ("num_experts", num_experts, 1, 1),
            ("hidden_size", hidden_size, 8, 8),
            ("intermediate_size", intermediate_size, 8, 8),
            ("shared_intermediate_size", shared_intermediate_size, 0, 8),
        ):
            if not isinstance(value, int) or value < smallest or value % multiple:
                kind = f"a multiple of {multiple}" if multiple > 1 else "an int"
                raise ValueError(f"{name} must be {kind}, at least {smallest}, got {value!r}")
        if shared_output_gate and not shared_intermediate_size:
            raise ValueError("shared_output_gate needs shared experts, got shared_intermediate_size=0")
        rank, world_size = _place_in(world)
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.world, self.capacity, self.num_chunks = world, capacity, num_chunks
        self.experts = expert_range(rank, num_experts, world_size)
        L, H, I, S = len(self.experts), hidden_size, intermediate_size, shared_intermediate_size

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.w_gate_up, self.w_down = parameter(L, H, 2 * I), parameter(L, I, H)
        self.register_parameter("shared_w_gate_up", parameter(H, 2 * S) if S else None)
        self.register_parameter("shared_w_down", parameter(S, H) if S else None)
        self.register_parameter("shared_output_gate", parameter(H) if shared_output_gate else None)
        self.reset_parameters()

    def prepare(self, top_k: int) -> None:
        """Collective, with a World: allocates for calls with `top_k` routes a token, and loads kernels.

        Raises TypeError or ValueError for sizes that do not fit, on every rank where ranks differ in them.
        """
        if self.world is None or not _is_world(self.world):
            raise ValueError(f"world must be a tilecrew.parallel.World for prepare, got {type(self.world).__name__}")
        from tilecrew.moe.workspace import MoESizes, MoEWorkspace

        if self.capacity is None:
            raise ValueError("capacity must be the most tokens of a rank where world is a World, got None")
        dtype = self.w_gate_up.dtype
        sizes = MoESizes(self.capacity, top_k, self.num_experts, self.hidden_size, self.intermediate_size, dtype)
        if sizes not in self.world.workspaces:
            MoEWorkspace(self.world, sizes)

    def reset_parameters(self) -> None:
        """Draws all parameters anew, uniform in ±1 / sqrt(inputs)."""
        for parameter in self.parameters():
            num_inputs = parameter.shape[-2] if parameter.dim() > 1 else parameter.shape[0]
            torch.nn.init.uniform_(parameter, -1 / math.sqrt(num_inputs), 1 / math.sqrt(num_inputs))

    @torch.no_grad()
    def load_experts(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Copies this rank's part of gate and up [E, H, I] and down [E, I, H] of all ranks into the parameters."""
        E, H, I = self.num_experts, self.hidden_size, self.intermediate_size
        for name, tensor, shape in (("gate", gate, (E, H, I)), ("up", up, (E, H, I)), ("down", down, (E, I, H))):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        own = slice(self.experts.start, self.experts.stop)
        self.w_gate_up.copy_(interleave_gate_up(gate[own], up[own]))
        self.w_down.copy_(down[own])

    @torch.no_grad()
    def load_shared_experts(
        self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, output_gate: torch.Tensor | None = None
    ) -> None:
        """Copies gate and up [H, S], down [S, H] and output_gate [H] into the parameters."""
        if self.shared_w_gate_up is None or self.shared_w_down is None:
            raise ValueError("this layer has no shared experts: make it with shared_intermediate_size")
        if (output_gate is None) != (self.shared_output_gate is None):
            raise ValueError(f"output_gate must be {'None' if self.shared_output_gate is None else 'a tensor [H]'}")
        shape = (self.hidden_size, self.shared_w_gate_up.shape[1] // 2)
        for name, tensor, expected in (("gate", gate, shape), ("up", up, shape), ("down", down, shape[::-1])):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
        self.shared_w_gate_up.copy_(interleave_gate_up(gate, up))
        self.shared_w_down.copy_(down)
        if output_gate is not None and self.shared_output_gate is not None:
            self.shared_output_gate.copy_(output_gate)

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        shared = None
        if self.shared_w_gate_up is not None and self.shared_w_down is not None:
            shared = SharedExperts(self.shared_w_gate_up, self.shared_w_down, self.shared_output_gate)
        return moe_forward(
            x,
            topk_ids,
            topk_weights,
            self.w_gate_up,
            self.w_down,
            shared=shared,
            world=self.world,
            capacity=self.capacity,
            num_chunks=self.num_chunks,
            num_experts=self.num_experts if self.world is not None and _is_world(self.world) else None,
        )

    def extra_repr(self) -> str:
        """What print shows."""
        return (
            f"experts={self.experts.start}..{self.experts.stop} of {self.num_experts}, "
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, capacity={self.capacity}"
        )


def _is_world(world: object) -> "TypeIs[World]":
    """Whether it is a tilecrew.parallel.World, whose module needs torch.distributed."""
    from tilecrew.parallel.world import World

    return isinstance(world, World)


def _place_in(world: "ProcessGroup | World | None") -> tuple[int, int]:
    """Rank and number of ranks."""
    if world is None:
        return 0, 1
    if _is_world(world):
        return world.rank, world.size
    from tilecrew.moe.collective import place_in

    return place_in(world)
