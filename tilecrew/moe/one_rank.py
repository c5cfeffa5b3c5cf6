"""One rank without gradients: the first product reads tokens where they are, nobody writes or reads a sorted copy.

    moe_gather_gemm(x, row_routes, token_rows, w_gate_up, offs, gate_up_layout) -> [P, I] or [P, 2 * I]

    out[p] = epilogue(x[t] w_gate_up[e]),  t = row_routes[p] // K, e the group of row p    (README, 1)

x [T, H], w_gate_up [L, H, 2 * I], offs [L]; row_routes [P] and token_rows [T, K] as in `operators`. "interleaved": the
epilogue is SwiGLU, and I columns are stored; "halves": there is none, and 2 * I are. Groups may begin at any row, so
tables need no padding. A row without a route is zeros, and so are rows from offs[-1] on, which no combine reads.

Where the hopper kernel runs, its load role gathers: it asks `kernel_dispatch_gemm.place_of_own_token` where a row lies.
Elsewhere the operator is moe_gather and a grouped GEMM. It is not differentiable: gradients of weights need the copy,
and calls with gradients make it (`requires_gradient`).
"""

import dataclasses
import importlib
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew._launches import LaunchMemory
from tilecrew._plans import ADDRESS_ALIGNMENT
from tilecrew.grouped_gemm import operators
from tilecrew.grouped_gemm.api import grouped_gemm
from tilecrew.grouped_gemm.checks import check_addresses
from tilecrew.grouped_gemm.hooks import Epilogue
from tilecrew.grouped_gemm.schedule import Problem, pick, supports
from tilecrew.moe.experts import SWIGLU, SharedExperts, silu_times_up
from tilecrew.moe.operators import LIBRARY

LAUNCHES = LaunchMemory()


def requires_gradient(shared: SharedExperts | torch.Tensor | None, *tensors: torch.Tensor) -> bool:
    """Whether a call with these tensors has to be differentiable."""
    of_shared = shared if isinstance(shared, SharedExperts) else (shared,)
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*tensors, *of_shared)
    )


def compute_experts_of_tokens(
    x: torch.Tensor,
    row_routes: torch.Tensor,
    token_rows: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    offs: torch.Tensor,
    gate_up_layout: str,
) -> torch.Tensor:
    """As `experts.compute_experts` of the rows of the tokens x [T, H] -> [P, H]; not differentiable."""
    hidden = torch.ops.tilecrew.moe_gather_gemm(x, row_routes, token_rows, w_gate_up, offs, gate_up_layout)
    if gate_up_layout == "halves":
        hidden = silu_times_up(hidden)
    return grouped_gemm(hidden, w_down, offs)


def problem_of(x: torch.Tensor, w: torch.Tensor, num_rows: int) -> Problem:
    """Of the product that gathers."""
    return dataclasses.replace(operators.problem_of(x, w), num_rows=num_rows, gathers=True)


def _gather_gemm(
    x: torch.Tensor,
    row_routes: torch.Tensor,
    token_rows: torch.Tensor,
    w_gate_up: torch.Tensor,
    offs: torch.Tensor,
    gate_up_layout: str,
) -> torch.Tensor:
    epilogue = _epilogue_of(gate_up_layout)
    if supports("hopper", problem_of(x, w_gate_up, row_routes.shape[0]), hardware_of(x.device)) is not None:
        rows = torch.ops.tilecrew.moe_gather(x, None, row_routes, token_rows)
        return grouped_gemm(rows, w_gate_up, offs, epilogue=epilogue)
    out = _gather_gemm_fake(x, row_routes, token_rows, w_gate_up, offs, gate_up_layout)
    if out.shape[0] == 0:
        return out
    check_addresses(w_gate_up=w_gate_up)
    x = x.contiguous()
    if x.data_ptr() % ADDRESS_ALIGNMENT:
        x = x.clone()  # the load role copies 16 bytes at a time
    tensors = (x, row_routes.contiguous(), offs.contiguous(), w_gate_up, out)
    top_k = token_rows.shape[1]
    key = (x.device, x.shape, w_gate_up.shape, w_gate_up.stride(), out.shape, top_k, gate_up_layout)
    with torch.cuda.device(x.device):
        LAUNCHES.run(key, tensors, lambda: gather_gemm_launch(*tensors, top_k, epilogue))
    return out


def gather_gemm_launch(
    x: torch.Tensor,
    row_routes: torch.Tensor,
    offs: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
    epilogue: Epilogue | None,
) -> Any:
    """The grouped GEMM whose rows are tokens, read where they are. All but w contiguous; addresses are multiples of 16
    bytes."""
    kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
    row_bytes = x.shape[1] * x.element_size()
    hooks = kernel.hooks_of(None, epilogue)._replace(
        source=importlib.import_module("tilecrew.moe.kernel_dispatch_gemm").place_of_own_token,
        source_tensors=(x, row_routes, top_k, row_bytes),
    )
    schedule = pick(problem_of(x, w, out.shape[0]), hardware_of(x.device), "hopper")
    return kernel.launch(x, w, offs, out, schedule.tiles, schedule.num_programs, hooks)


def _gather_gemm_fake(
    x: torch.Tensor,
    row_routes: torch.Tensor,
    token_rows: torch.Tensor,
    w_gate_up: torch.Tensor,
    offs: torch.Tensor,
    gate_up_layout: str,
) -> torch.Tensor:
    epilogue = _epilogue_of(gate_up_layout)
    return x.new_empty(row_routes.shape[0], w_gate_up.shape[2] // (1 if epilogue is None else epilogue.shrink))


def _epilogue_of(gate_up_layout: str) -> Epilogue | None:
    return SWIGLU if gate_up_layout == "interleaved" else None


LIBRARY.define(
    "moe_gather_gemm(Tensor x, Tensor row_routes, Tensor token_rows, Tensor w_gate_up, Tensor offs, "
    "str gate_up_layout) -> Tensor"
)
LIBRARY.impl("moe_gather_gemm", _gather_gemm, "CompositeExplicitAutograd")
torch.library.register_fake("tilecrew::moe_gather_gemm", _gather_gemm_fake, lib=LIBRARY)
