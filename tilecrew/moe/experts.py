"""What a rank's experts compute from rows that are sorted by expert: two grouped GEMMs and SwiGLU between them."""

from typing import NamedTuple

import torch

from tilecrew.grouped_gemm.api import grouped_gemm
from tilecrew.grouped_gemm.hooks import SwiGLU

SWIGLU = SwiGLU(8)
GATE_UP_LAYOUTS = ("interleaved", "halves")


class SharedExperts(NamedTuple):
    """Experts that every token goes to, as one: several become one by joining columns of w_gate_up, rows of w_down.

    w_gate_up      [H, 2 * S], S a multiple of 8, in the same layout as the routed experts'
    w_down         [S, H]
    output_gate    [H] or None: the output is multiplied by sigmoid(x output_gate)
    """

    w_gate_up: torch.Tensor
    w_down: torch.Tensor
    output_gate: torch.Tensor | None = None


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate and up [..., H, I], I a multiple of 8 -> w_gate_up [..., H, 2 * I] of the layout "interleaved".

    8 gate columns and 8 up columns alternate, which lets the first product's epilogue apply SwiGLU.
    """
    if gate.shape != up.shape:
        raise ValueError(f"up must have the shape of gate, {tuple(gate.shape)}, got {tuple(up.shape)}")
    if gate.shape[-1] % SWIGLU.run:
        raise ValueError(f"gate must have I a multiple of {SWIGLU.run}, got {gate.shape[-1]}")
    return SWIGLU.interleave(gate, up)


def compute_experts(
    rows: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, offs: torch.Tensor, gate_up_layout: str
) -> torch.Tensor:
    """rows [P, H], w_gate_up [L, H, 2 * I], w_down [L, I, H], offs [L] -> [P, H]; zeros behind the last offset.

    "interleaved": SwiGLU is the epilogue of the first product. "halves" (I gate columns, then I up columns): the
    product is stored first.
    """
    if gate_up_layout == "interleaved":
        return grouped_gemm(grouped_gemm(rows, w_gate_up, offs, epilogue=SWIGLU), w_down, offs)
    return grouped_gemm(silu_times_up(grouped_gemm(rows, w_gate_up, offs)), w_down, offs)


def silu_times_up(product: torch.Tensor) -> torch.Tensor:
    """[P, 2 * I] of the layout "halves" -> [P, I]."""
    gate, up = product.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def compute_shared(x: torch.Tensor, shared: SharedExperts, gate_up_layout: str) -> torch.Tensor:
    """x [T, H] -> [T, H]."""
    offs = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    y = compute_experts(x, shared.w_gate_up[None], shared.w_down[None], offs, gate_up_layout)
    if shared.output_gate is None:
        return y
    return torch.sigmoid(x @ shared.output_gate)[:, None] * y
