"""Problems for the tests of the mixture of experts, and the tables that its operators take."""

import torch

from tilecrew.grouped_gemm import SwiGLU
from tilecrew.moe.routing import build_routing

BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 3e-6, torch.float64: 1e-13}


def tables_of(topk_ids, num_experts, row_block=1):
    """(row_routes [P], token_rows [T, K]) of one rank's ids [T, K]."""
    routing = build_routing(topk_ids[None], num_experts=num_experts, row_block=row_block)
    return routing.row_routes, routing.combine_indices[:, 1].reshape(topk_ids.shape).contiguous()


def random_ids(num_tokens, top_k, num_experts, *, kind="uniform", seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    if kind == "one expert":
        ids[:] = min(1, num_experts - 1)
    elif kind == "some missing":
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    elif kind == "all missing":
        ids[:] = -1
    elif kind == "ends empty":
        ids.clamp_(min(1, num_experts - 1), max(num_experts - 2, 0))
    return ids


class Problem:
    """Tokens, routes, weights of experts and shared experts: float64 values, rounded to `dtype`."""

    def __init__(
        self,
        num_tokens,
        top_k,
        num_experts,
        hidden,
        intermediate,
        *,
        kind="uniform",
        dtype=torch.float32,
        device="cpu",
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed + 1000)

        def random(*shape, scale=1.0):
            values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
            return values.to(dtype).to(device)

        self.num_experts = num_experts
        self.x = random(num_tokens, hidden)
        self.topk_ids = random_ids(num_tokens, top_k, num_experts, kind=kind, seed=seed).to(device)
        weight_dtype = torch.promote_types(dtype, torch.float32)
        self.topk_weights = torch.rand(num_tokens, top_k, generator=generator).to(device, weight_dtype)
        self.gate = random(num_experts, hidden, intermediate, scale=hidden**-0.5)
        self.up = random(num_experts, hidden, intermediate, scale=hidden**-0.5)
        self.down = random(num_experts, intermediate, hidden, scale=intermediate**-0.5)
        self.shared_gate = random(hidden, 24, scale=hidden**-0.5)
        self.shared_up = random(hidden, 24, scale=hidden**-0.5)
        self.shared_down = random(24, hidden, scale=24**-0.5)
        self.output_gate = random(hidden, scale=hidden**-0.5)

    @property
    def w_gate_up(self):
        return SwiGLU(8).interleave(self.gate, self.up)


def assert_rows_close(actual, wanted, bound):
    """Every row by itself, so that no row hides behind the others."""
    actual, wanted = actual.double(), wanted.double()
    assert actual.shape == wanted.shape
    error, size = (actual - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert (error <= bound * size + 1e-30).all(), f"largest error of a row {float((error / size).max()):.2e}"
