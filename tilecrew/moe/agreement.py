"""Before ranks exchange tokens they agree: one small exchange of sizes, options and errors, so that all raise or none.

A rank that raised alone would leave the others waiting in their next exchange until the process group's timeout.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from tilecrew.moe import checks, routing
from tilecrew.moe.experts import GATE_UP_LAYOUTS, SharedExperts

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MESSAGE_BYTES = 400
MAX_CHUNKS = 64


class Header(NamedTuple):
    """What a rank tells the others, all int. The first group must be the same on all ranks."""

    hidden_size: int = 0
    top_k: int = 0
    num_gate_up_columns: int = 0
    dtype: int = 0
    gate_up_layout: int = 0
    capacity: int = 0
    num_chunks: int = 0
    requires_gradient: int = 0
    # These may differ.
    failed: int = 0
    num_tokens: int = 0
    num_local_experts: int = 0
    lowest_id: int = -1
    highest_id: int = -1
    x_requires_gradient: int = 0


class Agreement(NamedTuple):
    """What all ranks know then. num_tokens: of each rank."""

    num_experts: int
    num_tokens: tuple[int, ...]
    requires_gradient: bool
    x_requires_gradient: bool


# Field, the argument that it belongs to, and how its value reads.
EQUAL = (
    ("hidden_size", "x", "H = {}"),
    ("dtype", "x", "dtype {}"),
    ("top_k", "topk_ids", "K = {}"),
    ("num_gate_up_columns", "w_gate_up", "2 * I = {}"),
    ("gate_up_layout", "gate_up_layout", "{}"),
    ("capacity", "capacity", "{}"),
    ("num_chunks", "num_chunks", "{}"),
    ("requires_gradient", "the inputs", "requires_grad {}"),
)


def agree(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    shared: SharedExperts | torch.Tensor | None,
    options: tuple[str, int | None, int],
    group: dist.ProcessGroup,
) -> Agreement:
    """Checks this rank's call, exchanges headers, and raises on all ranks where one has an error or they differ.

    options: gate_up_layout, capacity, num_chunks. The arguments may be anything: they are checked here.
    """
    gate_up_layout, capacity, num_chunks = options
    failure: Exception | None = None
    header = Header(failed=1)
    try:
        checks.check_layer(x, topk_ids, topk_weights, *weights, shared, gate_up_layout)
        checks.check_capacity(capacity)
        if isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or not 1 <= num_chunks <= MAX_CHUNKS:
            raise ValueError(f"num_chunks must be an int from 1 to {MAX_CHUNKS}, got {num_chunks!r}")
        header = _header(x, topk_ids, topk_weights, weights, shared, options)
    except (TypeError, ValueError) as error:
        failure = error
    headers, messages = _exchange(header, "" if failure is None else str(failure), _device_of(x, group), group)
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if headers[rank].failed:
            raise ValueError(f"rank {rank} raised: {message}")
    _require_equal(headers)
    num_experts = sum(header.num_local_experts for header in headers)
    checks.check_num_experts(num_experts, headers[0].top_k)
    for rank, header in enumerate(headers):
        expected = len(routing.expert_range(rank, num_experts, len(headers)))
        if header.num_local_experts != expected:
            raise ValueError(
                f"w_gate_up of rank {rank} must have {expected} of E = {num_experts} experts "
                f"(tilecrew.moe.expert_range), got {header.num_local_experts}"
            )
        checks.check_num_tokens(header.num_tokens, header.capacity or None, rank)
        routing.check_id_range(header.lowest_id, header.highest_id, num_experts, f" of rank {rank}")
    return Agreement(
        num_experts=num_experts,
        num_tokens=tuple(header.num_tokens for header in headers),
        requires_gradient=bool(headers[0].requires_gradient),
        x_requires_gradient=any(header.x_requires_gradient for header in headers),
    )


def _header(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    shared: SharedExperts | torch.Tensor | None,
    options: tuple[str, int | None, int],
) -> Header:
    gate_up_layout, capacity, num_chunks = options
    shared_tensors = (shared,) if isinstance(shared, torch.Tensor) else shared or ()
    inputs = [x, topk_weights, *weights, *(tensor for tensor in shared_tensors if tensor is not None)]
    lowest = highest = -1
    if topk_ids.device.type == "cpu" and topk_ids.numel() > 0:
        lowest, highest = (int(value) for value in torch.aminmax(topk_ids))
    return Header(
        hidden_size=x.shape[1],
        top_k=topk_ids.shape[1],
        num_gate_up_columns=weights[0].shape[2],
        dtype=DTYPES.index(x.dtype),
        gate_up_layout=GATE_UP_LAYOUTS.index(gate_up_layout),
        capacity=capacity or 0,
        num_chunks=num_chunks,
        requires_gradient=int(torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)),
        num_tokens=x.shape[0],
        num_local_experts=weights[0].shape[0],
        lowest_id=lowest,
        highest_id=highest,
        x_requires_gradient=int(torch.is_grad_enabled() and x.requires_grad),
    )


def _exchange(
    header: Header, message: str, device: torch.device, group: dist.ProcessGroup
) -> tuple[list[Header], list[str]]:
    text = message.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    own = torch.tensor([*header, *text], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    values = [tensor.tolist() for tensor in gathered]
    size = len(header)
    texts = [bytes(value[size:]).rstrip(b"\0").decode(errors="ignore") for value in values]
    return [Header(*value[:size]) for value in values], texts


def _require_equal(headers: list[Header]) -> None:
    names = {"dtype": DTYPES, "gate_up_layout": GATE_UP_LAYOUTS, "requires_gradient": (False, True)}
    for field, argument, form in EQUAL:
        values = [getattr(header, field) for header in headers]
        for rank, value in enumerate(values):
            if value != values[0]:
                shown = [names[field][v] if field in names else v for v in (values[0], value)]
                if field == "capacity":
                    shown = [v or None for v in shown]
                raise ValueError(
                    f"{argument} must be alike on all ranks, got {form.format(shown[0])} on rank 0 "
                    f"and {form.format(shown[1])} on rank {rank}"
                )


def _device_of(x: object, group: dist.ProcessGroup) -> torch.device:
    """Where headers travel: the device of x, or, where x is no tensor, one that the group can send from."""
    if isinstance(x, torch.Tensor) and x.device.type != "meta":
        return x.device
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
