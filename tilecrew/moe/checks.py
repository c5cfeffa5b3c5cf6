"""Checks of the layer's inputs. Everything here raises ValueError or TypeError before anything is launched or sent."""

import torch

from tilecrew._shapes import Sizes, require_dtype, require_same_device
from tilecrew.grouped_gemm.checks import DTYPES, HOST_DTYPES, MULTIPLE, check_addresses, check_strides
from tilecrew.grouped_gemm.hooks import FLOATS
from tilecrew.grouped_gemm.schedule import MAX_ROWS
from tilecrew.moe.experts import GATE_UP_LAYOUTS, SharedExperts


def check_layer(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    shared: SharedExperts | torch.Tensor | None,
    gate_up_layout: str,
) -> None:
    """Checks types, shapes, dtypes, devices and strides: all that one rank knows by itself but the values of ids."""
    sizes = Sizes()
    sizes.bind("x", x, "T H")
    sizes.bind("topk_ids", topk_ids, "T K")
    sizes.bind("topk_weights", topk_weights, "T K")
    sizes.bind("w_gate_up", w_gate_up, "L H N")
    if sizes["N"] % 2:
        raise ValueError(f"w_gate_up must have 2 * I columns, got shape {tuple(w_gate_up.shape)}")
    sizes.set("I", sizes["N"] // 2, "w_gate_up", w_gate_up.shape)
    sizes.bind("w_down", w_down, "L I H")
    require_dtype("x", x, HOST_DTYPES if x.device.type in ("cpu", "meta") else DTYPES)
    require_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    require_dtype("topk_weights", topk_weights, FLOATS)
    for name, symbol in (("x", "H"), ("w_down", "I")):
        if sizes[symbol] < MULTIPLE or sizes[symbol] % MULTIPLE:
            raise ValueError(f"{name} must have {symbol} a positive multiple of {MULTIPLE}, got {sizes[symbol]}")
    if sizes["K"] < 1:
        raise ValueError(f"topk_ids must have at least one route a token, got shape {tuple(topk_ids.shape)}")
    if topk_ids.numel() > MAX_ROWS:
        raise ValueError(f"topk_ids must have at most {MAX_ROWS} elements, got {topk_ids.numel()}")
    if gate_up_layout not in GATE_UP_LAYOUTS:
        names = " or ".join(repr(name) for name in GATE_UP_LAYOUTS)
        raise ValueError(f"gate_up_layout must be {names}, got {gate_up_layout!r}")
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        require_same_device(name, tensor, "x", x)
    _check_weight("w_gate_up", w_gate_up, x)
    _check_weight("w_down", w_down, x)
    if shared is not None:
        _check_shared(shared, x, sizes)


def check_num_experts(num_experts: int, top_k: int) -> None:
    """Raises unless it is an int, there is an expert, and a token can go to top_k different ones."""
    if isinstance(num_experts, bool) or not isinstance(num_experts, int):
        raise TypeError(f"num_experts must be None or an int, got {type(num_experts).__name__}")
    if num_experts < 1:
        raise ValueError("w_gate_up must have at least one expert, got none")
    if top_k > num_experts:
        raise ValueError(f"topk_ids must have K at most E = {num_experts} experts, got K = {top_k}")


def check_capacity(capacity: int | None) -> None:
    """Raises unless it is None or a positive int."""
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int)):
        raise TypeError(f"capacity must be None or an int, got {type(capacity).__name__}")
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity must be at least one token, got {capacity}")


def check_num_tokens(num_tokens: int, capacity: int | None, rank: int) -> None:
    """Raises ValueError where a rank has more tokens than its capacity."""
    if capacity is not None and num_tokens > capacity:
        raise ValueError(f"x of rank {rank} has {num_tokens} tokens, more than its capacity of {capacity}")


def _check_shared(shared: SharedExperts | torch.Tensor, x: torch.Tensor, sizes: Sizes) -> None:
    if isinstance(shared, torch.Tensor):
        sizes.bind("shared", shared, "T H")
        require_dtype("shared", shared, (x.dtype,), " (the dtype of x)")
        require_same_device("shared", shared, "x", x)
        return
    if not isinstance(shared, SharedExperts):
        raise TypeError(f"shared must be None, SharedExperts or a torch.Tensor, got {type(shared).__name__}")
    sizes.bind("shared.w_gate_up", shared.w_gate_up, "H shared_N")
    if sizes["shared_N"] < 2 * MULTIPLE or sizes["shared_N"] % (2 * MULTIPLE):
        raise ValueError(
            f"shared.w_gate_up must have 2 * S columns, S a positive multiple of {MULTIPLE}, "
            f"got shape {tuple(shared.w_gate_up.shape)}"
        )
    sizes.set("S", sizes["shared_N"] // 2, "shared.w_gate_up", shared.w_gate_up.shape)
    sizes.bind("shared.w_down", shared.w_down, "S H")
    _check_weight("shared.w_gate_up", shared.w_gate_up, x)
    _check_weight("shared.w_down", shared.w_down, x)
    if shared.output_gate is not None:
        sizes.bind("shared.output_gate", shared.output_gate, "H")
        require_dtype("shared.output_gate", shared.output_gate, (x.dtype,), " (the dtype of x)")
        require_same_device("shared.output_gate", shared.output_gate, "x", x)


def _check_weight(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    require_dtype(name, weight, (x.dtype,), " (the dtype of x)")
    require_same_device(name, weight, "x", x)
    if weight.numel() == 0:
        return  # a rank may have no experts
    if weight.stride(-1) != 1 and weight.stride(-2) != 1:
        raise ValueError(f"{name}: one of its last two dimensions must be contiguous, got strides {weight.stride()}")
    check_strides(name, weight if weight.stride(-1) == 1 else weight.transpose(-1, -2))
    if weight.device.type != "meta" and not torch.compiler.is_compiling():
        check_addresses(**{name: weight})
