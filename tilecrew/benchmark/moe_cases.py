"""Problems of `tilecrew bench moe`, and what a measured one says."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tilecrew.moe.routing import expert_range

ROUTINGS = ("uniform", "skewed")
LAYER, GRAPH, ONE_RANK, ALL_TO_ALL = "layer", "layer, graph", "torch, one rank", "all-to-all"
# What a fused part joins, of which the slowest remains at best; of it what has been measured, but the first at least.
BOUNDS = {"dispatch_gemm": ("first_gemm", "copy"), "gemm_combine": ("second_gemm", "combine", "transfer")}
# A first product that gathers makes no copy of rows.
GATHERING_BOUNDS = {**BOUNDS, "dispatch_gemm": ("first_gemm", "bring")}


@dataclass(frozen=True)
class Shape:
    """Experts of all ranks, routes of a token, hidden size, intermediate size of an expert."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


SHAPES = {
    "DeepSeek-V3": Shape(256, 8, 7168, 2048),
    "Qwen3-30B": Shape(128, 8, 2048, 768),
    "Qwen3-Next": Shape(512, 10, 2048, 512),
    "small": Shape(10, 2, 64, 48),
}
TARGETS = ("DeepSeek-V3", "Qwen3-30B", "Qwen3-Next")


@dataclass(frozen=True)
class Case:
    """A named shape on a number of ranks, each with num_tokens tokens; routing: one of ROUTINGS."""

    shape: str
    routing: str
    num_ranks: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.routing} routing, {self.num_ranks} ranks, {self.num_tokens} tokens each"

    @property
    def flops(self) -> int:
        """Of one rank's tokens."""
        shape = SHAPES[self.shape]
        return 6 * self.num_tokens * shape.top_k * shape.hidden_size * shape.intermediate_size


@dataclass(frozen=True)
class Row:
    """A measured case.

    hottest_expert    routes of the expert that has most, over the mean of all experts
    busiest_rank      routes of the rank that has most, over the mean of all ranks
    dispatch, combine, num_comm_blocks    how rows and results are moved, None on the CPU, and how many blocks do
    predicted         milliseconds of dispatch_gemm by the model of moe.schedule, None for other forms
    milliseconds      of the layer, its parts, and what stands beside it; a wrong result has none
    teraflops         of the whole layers among them
    bounds            milliseconds of the slower of what a fused part joins, by the names of both
    ratios            of milliseconds, by what is divided; of two layers above 1: tilecrew is faster
    failures          why a time is missing
    """

    case: Case
    hottest_expert: float
    busiest_rank: float
    dispatch: str | None
    combine: str | None
    num_comm_blocks: int
    predicted: float | None
    milliseconds: dict[str, float]
    teraflops: dict[str, float]
    bounds: dict[str, float]
    ratios: dict[str, float]
    failures: dict[str, str]

    def as_dict(self) -> dict:
        """For JSON, the case's fields among its own."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("case"), **fields}


def ratios_of(milliseconds: dict[str, float], gathers: bool) -> tuple[dict[str, float], dict[str, float]]:
    """bounds and ratios of a Row: of what has been measured.

    gathers: the first product gathers; where "bring" has been measured, its time is without that of the tables, which
    have to be made in any case, and beside which tokens are brought.
    """
    bounds, ratios = {}, {}
    for fused, alone in (GATHERING_BOUNDS if gathers else BOUNDS).items():
        measured = [part for part in alone if part in milliseconds]
        if alone[0] not in measured:
            continue
        name = f"max({', '.join(measured)})" if len(measured) > 1 else alone[0]
        bounds[name] = max(milliseconds[part] for part in measured)
        if fused in milliseconds and fused == "dispatch_gemm" and "bring" in measured and "tables" in milliseconds:
            ratios[f"({fused} - tables) / {name}"] = (milliseconds[fused] - milliseconds["tables"]) / bounds[name]
        elif fused in milliseconds:
            ratios[f"{fused} / {name}"] = milliseconds[fused] / bounds[name]
    for other in (ONE_RANK, ALL_TO_ALL):
        for ours in (LAYER, GRAPH):
            if other in milliseconds and ours in milliseconds:
                ratios[f"{other} / {ours}"] = milliseconds[other] / milliseconds[ours]
    return bounds, ratios


def loads_of(routes_of_experts: torch.Tensor, num_ranks: int) -> tuple[float, float]:
    """hottest_expert and busiest_rank of a Row. routes_of_experts: [E], of the tokens of all ranks."""
    routes = routes_of_experts.double()
    ranges = [expert_range(rank, len(routes), num_ranks) for rank in range(num_ranks)]
    ranks = torch.stack([routes[own.start : own.stop].sum() for own in ranges])
    return float(routes.max() / routes.mean()), float(ranks.max() / ranks.mean())


def weights_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """w_gate_up [E, H, 2 * I] and w_down [E, I, H] of all experts."""

    def random(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(std=sizes[1] ** -0.5)

    E, H, I = shape.num_experts, shape.hidden_size, shape.intermediate_size
    return random(E, H, 2 * I), random(E, I, H)


def tokens_of(
    shape: Shape, routing: str, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H], ids [T, K] of different experts, and weights [T, K] that add up to one.

    "uniform": all experts are equally likely. "skewed": the n-th most popular one has a probability of 1 / n times that
    of the first (Zipf); which experts are popular is the same for all ranks, drawn once.
    """
    E = shape.num_experts
    x = torch.randn(num_tokens, shape.hidden_size, device=device).to(dtype)
    # The top of scores with Gumbel noise is a draw without replacement.
    scores = torch.empty(num_tokens, E, device=device).exponential_().log_().neg_()
    if routing == "skewed":
        popularity = torch.randperm(E, generator=torch.Generator().manual_seed(0))
        scores -= (1 + popularity).log().to(device)
    values, ids = scores.topk(shape.top_k, 1)
    return x, ids, values.softmax(1)


def routes_of_experts(ids: Iterable[torch.Tensor], num_experts: int) -> torch.Tensor:
    """[E] on the CPU: how many routes go to each expert."""
    return torch.stack([torch.bincount(part.flatten().cpu(), minlength=num_experts) for part in ids]).sum(0)
