"""The layer of torch's own functions, which stands beside tilecrew's, and its error against float64."""

import torch
import torch.distributed as dist

from tilecrew.moe.experts import SWIGLU
from tilecrew.moe.routing import expert_range

# Norm of the difference over the norm of the truth, largest over sampled tokens.
LARGEST_ERROR = {torch.bfloat16: 1.5e-2, torch.float32: 1e-5}
SAMPLED_TOKENS = 16


def one_rank_layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor
) -> torch.Tensor:
    """All experts on one rank: torch._grouped_mm and index copies."""
    flat = ids.flatten()
    order = flat.argsort()
    counts = _counts(flat, w_gate_up.shape[0])
    y = _experts(x[order // ids.shape[1]], w_gate_up, w_down, counts.cumsum(0).to(torch.int32))
    return _combined(y, order, ids, weights)


def all_to_all_layer(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Experts spread over the ranks of the default group, rows sorted by expert and sent by all-to-all (NCCL on GPUs),
    products of torch._grouped_mm. tokens: x, ids and weights of this rank; the weights are this rank's experts."""
    x, ids, weights = tokens
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = ids.flatten()
    order = flat.argsort()
    counts = _counts(flat, num_experts)
    own = expert_range(rank, num_experts, size)
    all_counts = torch.empty(size * num_experts, dtype=torch.int64, device=x.device)
    dist.all_gather_into_tensor(all_counts, counts)
    all_counts = all_counts.view(size, num_experts)
    ranges = [expert_range(r, num_experts, size) for r in range(size)]
    send = [int(n) for n in torch.stack([counts[e.start : e.stop].sum() for e in ranges]).tolist()]
    received_counts = all_counts[:, own.start : own.stop]
    receive = received_counts.sum(1).tolist()
    rows = x.new_empty(sum(receive), x.shape[1])
    dist.all_to_all_single(rows, x[order // ids.shape[1]], receive, send)
    expert = torch.arange(len(own), device=x.device).repeat(size)
    by_expert = torch.repeat_interleave(expert, received_counts.flatten()).argsort(stable=True)
    offs = received_counts.sum(0).cumsum(0).to(torch.int32)
    y = torch.empty_like(rows)
    y[by_expert] = _experts(rows[by_expert], w_gate_up, w_down, offs)
    returned = x.new_empty(order.shape[0], x.shape[1])
    dist.all_to_all_single(returned, y, send, receive)
    return _combined(returned, order, ids, weights)


def error_of(
    out: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
) -> float:
    """Of sampled tokens, relative to float64, with the weights of all experts; NaN anywhere gives NaN."""
    if not bool(out.isfinite().all()):
        return float("nan")
    x, ids, weights = tokens
    worst = 0.0
    for token in torch.linspace(0, x.shape[0] - 1, min(SAMPLED_TOKENS, x.shape[0])).long().tolist():
        wanted = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for k, expert in enumerate(ids[token].tolist()):
            gate_up = (x[token].double() @ w_gate_up[expert].double())[None]
            hidden = SWIGLU.reference(gate_up, gate_up)
            wanted += weights[token, k].double() * (hidden @ w_down[expert].double())[0]
        worst = max(worst, float((out[token].double() - wanted).norm() / wanted.norm()))
    return worst


def require_right(
    out: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    w_all: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Raises AssertionError where the error is too large."""
    error, largest = error_of(out, tokens, *w_all), LARGEST_ERROR[out.dtype]
    if not error <= largest:
        raise AssertionError(f"error {error:.1e} is above {largest:.0e}")


def _counts(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))


def _experts(rows: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    gate, up = torch._grouped_mm(rows, w_gate_up, offs=offs).unflatten(-1, (-1, 2, SWIGLU.run)).unbind(-2)
    hidden = (torch.nn.functional.silu(gate) * up).flatten(-2)
    return torch._grouped_mm(hidden, w_down, offs=offs)


def _combined(y: torch.Tensor, order: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows in the order of experts -> the weighted sum of each token's."""
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return (y[back].unflatten(0, ids.shape) * weights[..., None]).sum(1).to(y.dtype)
