"""What the mixture-of-experts operator computes, in plain torch and loops: the truth of its tests.

Any device and dtype; give it float64. Experts are those of all ranks, and nothing here knows of ranks, but for
`routing_by_loops`, the twin of `routing.build_routing`.
"""

import torch

from tilecrew.moe.routing import ROW_BLOCK, Routing, expert_range, max_rows


def expert(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [T, H], gate and up [H, I], down [I, H] -> [T, H]: (silu(x gate) * (x up)) down."""
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """out[t] = sum over k of topk_weights[t, k] * expert_{topk_ids[t, k]}(x[t]); ids of -1 add nothing.

    x [T, H], topk_ids and topk_weights [T, K], gate and up [E, H, I], down [E, I, H]. Differentiable by autograd.
    """
    out = torch.zeros_like(x)
    for number in range(gate.shape[0]):
        tokens, slots = (topk_ids == number).nonzero(as_tuple=True)
        y = expert(x[tokens], gate[number], up[number], down[number])
        out = out.index_add(0, tokens, topk_weights[tokens, slots, None] * y)
    return out


def shared_experts(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, output_gate: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, H], gate and up [H, S], down [S, H], output_gate [H] -> [T, H]: sigmoid(x output_gate) * expert(x)."""
    y = expert(x, gate, up, down)
    return y if output_gate is None else torch.sigmoid(x @ output_gate)[:, None] * y


def routing_by_loops(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    rank: int = 0,
    num_tokens: torch.Tensor | None = None,
    row_block: int = ROW_BLOCK,
) -> Routing:
    """Twin of `routing.build_routing`: the same arguments and the same tables, by appending row after row."""
    world_size, capacity, top_k = topk_ids.shape
    ids = topk_ids.tolist()
    counts = [capacity] * world_size if num_tokens is None else num_tokens.tolist()
    combine = [[-1, -1] for _ in range(capacity * top_k)]
    pulls = []  # what they are sorted by, and what they are
    for owner in range(world_size):
        rows: list[list[int]] = []
        routes: list[int] = []
        offs, tokens_per_expert = [], []
        for place, number in enumerate(expert_range(owner, num_experts, world_size)):
            first = len(rows)
            for distance in range(world_size):
                source = (owner + distance) % world_size
                for token in range(counts[source]):
                    for k in range(top_k):
                        if ids[source][token][k] == number:
                            if source == rank:
                                combine[token * top_k + k] = [owner, len(rows)]
                                if owner != rank:
                                    order = (place, (owner - rank) % world_size, len(rows))
                                    pulls.append((order, [owner, len(rows), token * top_k + k]))
                            rows.append([source, token])
                            routes.append((source * capacity + token) * top_k + k)
            tokens_per_expert.append(len(rows) - first)
            while len(rows) % row_block:
                rows.append([-1, -1])
                routes.append(-1)
            offs.append(len(rows))
        if owner == rank:
            tables = (offs, tokens_per_expert, rows, routes)
    offs, tokens_per_expert, rows, routes = tables
    pulled = [pull for _, pull in sorted(pulls)]
    num_behind = max_rows(topk_ids.numel(), len(offs), row_block) - len(rows)

    def table(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=topk_ids.device)

    return Routing(
        rank=rank,
        world_size=world_size,
        num_experts=num_experts,
        row_block=row_block,
        offs=table(offs),
        tokens_per_expert=table(tokens_per_expert),
        pull_dispatch_indices=table(rows + [[-1, -1]] * num_behind).reshape(-1, 2),
        row_routes=table(routes + [-1] * num_behind),
        combine_indices=table(combine).reshape(-1, 2),
        pull_combine_indices=table(pulled + [[-1] * 3] * (capacity * top_k - len(pulled))).reshape(-1, 3),
    )
