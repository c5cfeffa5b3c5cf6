"""The public grouped GEMM: checks, and where gradients go. No tiles.

Symbols: M rows, K inner size, N columns, E groups.
"""

from typing import Any

import torch

from tilecrew import _eager
from tilecrew._plans import PlainCall
from tilecrew.grouped_gemm import checks, operators, reference
from tilecrew.grouped_gemm.hooks import Epilogue, Gate
from tilecrew.grouped_gemm.schedule import Schedule


def grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    *,
    gate: Gate | None = None,
    epilogue: Epilogue | None = None,
    out: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Rows of x in groups, each group times its own matrix: out[offs[e-1]:offs[e]] = x[offs[e-1]:offs[e]] @ w[e].

    The convention of torch.nn.functional.grouped_mm. Products are summed in float32. Groups may have any number of
    rows, also none; rows behind the last offset give zeros. On a GPU offs is never read on the host: calls can be
    captured in CUDA graphs, and a replay may have other offsets.

    Gradients flow to x and w and, with an epilogue, to its tensors. A call with an epilogue and an input that requires
    a gradient is not fused: the accumulator is rounded to the dtype of x, and torch computes the epilogue's reference.
    Without hooks calls work under torch.compile(fullgraph=True).

    Args:
        x: [M, K] bfloat16, float16 or float32 (on the CPU also float64); K a multiple of 8; last dimension contiguous.
        w: [E, K, N] of the same dtype, N a multiple of 8; N contiguous, or K, as in the transposed view of [E, N, K].
        offs: [E] int32 row behind the last one of each group, on the device of x, never decreasing, at most M. Checked
            where it is on the host; wrong offsets on a device give undefined values, but no access outside of tensors.
        gate: an instance of `hooks.Gate` that holds each row block back until its rows are there, e.g. CountGate.
        epilogue: an instance of `hooks.Epilogue`, applied to the float32 accumulator: Bias, SiLU, GELU, SwiGLU,
            RouteWeight, or one of your own; NotifyRowBlock around one of them tells others which rows have landed.
        out: [M, N / epilogue.shrink] in the dtype of x, written and returned; not where an input requires a gradient.
        implementation: None chooses (`explain_grouped_gemm` tells what and why); "hopper", "mma_sync", "portable" or
            "torch" force one.

    Returns:
        [M, N / epilogue.shrink] in the dtype of x.

    Raises:
        TypeError: an argument of the wrong type or dtype, a hook that is a class or lacks a method.
        ValueError: shapes, devices, strides, addresses (multiples of 16 bytes) or options that do not fit, or a forced
            implementation that cannot run: the message names the argument, what it is and what was expected.
    """
    call = _plain_call(x, w, offs, gate, epilogue, out, implementation)
    plan = operators.PLANS.find(call)
    if call is not None and plan is not None:
        if epilogue is not None:
            epilogue.check(x, w)  # may look at more than the signature tells
        results = plan.run(call.tensors, call.addresses)
        if results is not None:
            return results[0]
    checks.check_call(x, w, offs, gate, epilogue, out)
    if call is not None:
        return operators.run_directly(x, w, offs, gate, epilogue, out, implementation, call)
    requires_gradient = _requires_gradient(x, w, epilogue)
    if requires_gradient and out is not None:
        raise ValueError("out must be None where an input requires a gradient")
    if requires_gradient and gate is not None:
        raise ValueError("gate must be None where an input requires a gradient")
    if requires_gradient and epilogue is not None and epilogue.landed is not None:
        raise ValueError("epilogue must have no landed where an input requires a gradient")
    if gate is None and epilogue is None:
        if out is None:
            return torch.ops.tilecrew.grouped_gemm(x, w, offs, implementation)
        torch.ops.tilecrew.grouped_gemm_out(x, w, offs, out, implementation)
        return out
    if requires_gradient and epilogue is not None:
        accumulator = torch.ops.tilecrew.grouped_gemm(x, w, offs, implementation)
        wide = accumulator.to(torch.promote_types(x.dtype, torch.float32))
        return reference.apply_epilogue(epilogue, wide, offs, w.shape[0]).to(x.dtype)
    return operators.run_with_hooks(x, w, offs, gate, epilogue, out, implementation)


def explain_grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    *,
    gate: Gate | None = None,
    epilogue: Epilogue | None = None,
    out: torch.Tensor | None = None,
    implementation: str | None = None,
) -> Schedule:
    """What `grouped_gemm` with the same arguments would run, and why; nothing is computed.

    Takes the arguments of `grouped_gemm`. Returns a Schedule, whose `str()` is one readable line. Raises what that
    function would raise.
    """
    checks.check_call(x, w, offs, gate, epilogue, out)
    return operators.schedule_of(x, w, gate, epilogue, implementation)


def _plain_call(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    gate: Gate | None,
    epilogue: Epilogue | None,
    out: torch.Tensor | None,
    implementation: str | None,
) -> PlainCall | None:
    """The call where it may be repeated by a plan, else None: then it goes through all checks and the dispatcher."""
    tensors: list[torch.Tensor | None] = [x, w, offs, out]
    options: list[Any] = [implementation]
    if torch.compiler.is_compiling():
        return None
    try:
        if gate is not None:
            _add_hook(tensors, options, type(gate), gate.wait, gate.tensors)  # type: ignore[attr-defined]
        if epilogue is not None:
            if torch.is_grad_enabled() and _has_gradient(epilogue):
                return None
            e: Any = epilogue
            _add_hook(tensors, options, type(e), e.apply, e.tensors)
            _add_hook(tensors, options, e.landed, e.constants, e.landed_tensors)
            options += e.shrink, e.keeps_zero
        call = _eager.plain_call(tensors, tuple(options))
    except (AttributeError, TypeError):  # something that is no hook: checks tell what it lacks
        return None
    # A plan launches on the current device.
    is_elsewhere = call is not None and x.device.type == "cuda" and x.device.index != torch.cuda.current_device()
    return None if is_elsewhere else call


def _add_hook(tensors: list[Any], options: list[Any], *parts: Any) -> None:
    """Notes parts of a hook, the last of which are its tensors, and numbers between them."""
    options += parts[:-1]
    for value in parts[-1]:
        is_tensor = isinstance(value, torch.Tensor)
        (tensors if is_tensor else options).append(value)
        options.append(is_tensor)


def _requires_gradient(x: torch.Tensor, w: torch.Tensor, epilogue: Epilogue | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or w.requires_grad or _has_gradient(epilogue)


def _has_gradient(epilogue: Epilogue | None) -> bool:
    """Whether a tensor of the epilogue, or of one inside of it, requires a gradient."""
    if epilogue is None:
        return False
    values = vars(epilogue).values()
    return any(
        _has_gradient(value) if isinstance(value, Epilogue) else isinstance(value, torch.Tensor) and value.requires_grad
        for value in values
    )
