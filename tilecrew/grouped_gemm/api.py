"""The public grouped GEMM: checks, and where gradients go. No tiles.

Symbols: M rows, K inner size, N columns, E groups.
"""

import torch

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
    checks.check_call(x, w, offs, gate, epilogue, out)
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
    if out is None:
        out = x.new_empty(x.shape[0], w.shape[2] // (1 if epilogue is None else epilogue.shrink))
    operators.run(x, w, offs, out, implementation, gate, epilogue)
    return out


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
