"""The grouped GEMM as torch operators: schemas, implementations, fake implementations for tracing, gradients.

    grouped_gemm(x, w, offs, implementation) -> out
    grouped_gemm_out(x, w, offs, out, implementation)         writes into out; not differentiable
    grouped_gemm_weight_gradient(x, dy, offs) -> dw           [E, K, N]

dx is a grouped GEMM with transposed weights, dw sums over the rows of each group; each of the two is differentiable
through the other. Calls with hooks go through `run` directly, because an operator cannot take a hook.
"""

import importlib
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew._plans import PlainCall, PlanCache
from tilecrew.grouped_gemm import checks, reference
from tilecrew.grouped_gemm.hooks import Epilogue, Gate
from tilecrew.grouped_gemm.schedule import ROW_BLOCK, Problem, Schedule, pick, supports

LIBRARY = torch.library.Library("tilecrew", "FRAGMENT")
PLANS = PlanCache()


def schedule_of(
    x: torch.Tensor, w: torch.Tensor, gate: Gate | None, epilogue: Epilogue | None, implementation: str | None
) -> Schedule:
    """What a call will run. Raises ValueError where the forced implementation cannot."""
    return pick(problem_of(x, w, gate, epilogue), hardware_of(x.device), implementation)


def problem_of(x: torch.Tensor, w: torch.Tensor, gate: Gate | None = None, epilogue: Epilogue | None = None) -> Problem:
    """The part of the arguments that schedules depend on."""
    num_groups, num_inner, num_columns = w.shape
    dtype = str(x.dtype).removeprefix("torch.")
    notifies = epilogue is not None and epilogue.landed is not None
    return Problem(x.shape[0], num_groups, num_inner, num_columns, dtype, gate is not None, notifies)


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    implementation: str | None,
    gate: Gate | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """Computes a checked call into out, whatever tensors require; no gradients."""
    checks.check_addresses(x=x, w=w, out=out)
    checks.check_offsets(offs, x.shape[0])
    schedule = schedule_of(x, w, gate, epilogue, implementation)
    if x.shape[0] == 0:
        return
    offs = offs.contiguous()
    if schedule.tiles is not None:
        _crew(x, w, offs, out, schedule, gate, epilogue)
    elif schedule.implementation == "portable":
        _portable(x, w, offs, out, epilogue)
    else:
        _torch(x, w, offs, out, gate, epilogue)


def run_with_hooks(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    gate: Gate | None,
    epilogue: Epilogue | None,
    out: torch.Tensor | None,
    implementation: str | None,
) -> torch.Tensor:
    """As `run`, but out may have to be made."""
    if out is None:
        out = x.new_empty(x.shape[0], w.shape[2] // (1 if epilogue is None else epilogue.shrink))
    run(x, w, offs, out, implementation, gate, epilogue)
    return out


def run_directly(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    gate: Gate | None,
    epilogue: Epilogue | None,
    out: torch.Tensor | None,
    implementation: str | None,
    call: PlainCall,
) -> torch.Tensor:
    """What a checked call gives that only this package can see; noted as a plan where it comes again."""

    def compute() -> tuple[torch.Tensor]:
        return (run_with_hooks(x, w, offs, gate, epilogue, out, implementation),)

    return PLANS.run(call, compute)[0]


def _crew(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    schedule: Schedule,
    gate: Gate | None,
    epilogue: Epilogue | None,
) -> None:
    kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
    hooks = kernel.hooks_of(gate, epilogue)
    with torch.cuda.device(x.device):
        kernel.launch(x, w, offs, out, schedule.tiles, schedule.num_programs, hooks).run()


def _portable(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, out: torch.Tensor, epilogue: Epilogue | None
) -> None:
    kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_portable")
    accumulator = out
    if epilogue is not None:
        accumulator = torch.empty(x.shape[0], w.shape[2], dtype=torch.float32, device=x.device)
    kernel.launch(x, w, offs, accumulator).run()
    if epilogue is not None:
        out.copy_(reference.apply_epilogue(epilogue, accumulator, offs, w.shape[0]))


def _torch(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    gate: Gate | None,
    epilogue: Epilogue | None,
) -> None:
    ends = reference.bounds(offs)
    num_rows_of_blocks = [min(ROW_BLOCK, end - row) for begin, end in ends for row in range(begin, end, ROW_BLOCK)]
    if gate is not None:
        gate.check(num_rows_of_blocks)
    _torch_products(x, w, offs, out, epilogue)
    if epilogue is not None and epilogue.landed is not None:
        epilogue.landed_reference(num_rows_of_blocks)


def _torch_products(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, out: torch.Tensor, epilogue: Epilogue | None
) -> None:
    bounds = reference.bounds(offs)
    if epilogue is None:
        for group, (begin, end) in enumerate(bounds):
            if end > begin:
                torch.mm(x[begin:end], w[group], out=out[begin:end])
        out[bounds[-1][1] :] = 0
        return
    wide = torch.promote_types(x.dtype, torch.float32)
    accumulator = torch.zeros(x.shape[0], w.shape[2], dtype=wide, device=x.device)
    for group, (begin, end) in enumerate(bounds):
        if end > begin:
            accumulator[begin:end] = x[begin:end].to(wide) @ w[group].to(wide)
    out.copy_(reference.apply_epilogue(epilogue, accumulator, offs, w.shape[0]))


def _grouped_gemm(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, implementation: str | None) -> torch.Tensor:
    out = _empty_output(x, w)
    run(x, w, offs, out, implementation)
    return out


def _grouped_gemm_out(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, out: torch.Tensor, implementation: str | None
) -> None:
    run(x, w, offs, out, implementation)


def _weight_gradient(x: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    checks.check_offsets(offs, x.shape[0])
    dw = x.new_empty(offs.shape[0], x.shape[1], dy.shape[1])
    if supports("portable", problem_of(x, dw), hardware_of(x.device)) is None:
        kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_portable")
        with torch.cuda.device(x.device):
            kernel.weight_gradient_launch(x, dy, offs.contiguous(), dw).run()
        return dw
    for group, (begin, end) in enumerate(reference.bounds(offs)):
        torch.mm(x[begin:end].T, dy[begin:end], out=dw[group])
    return dw


def _empty_output(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


def _grouped_gemm_fake(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, implementation: str | None
) -> torch.Tensor:
    return _empty_output(x, w)


def _grouped_gemm_out_fake(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, out: torch.Tensor, implementation: str | None
) -> None:
    return None


def _weight_gradient_fake(x: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return x.new_empty(offs.shape[0], x.shape[1], dy.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, offs, ctx.implementation = inputs
    ctx.save_for_backward(x, w, offs)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w, offs = ctx.saved_tensors
    dy = dy.contiguous()
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.tilecrew.grouped_gemm(dy, w.transpose(1, 2), offs, ctx.implementation)
    if ctx.needs_input_grad[1]:
        dw = torch.ops.tilecrew.grouped_gemm_weight_gradient(x, dy, offs)
    return dx, dw, None, None


def _save_weight_gradient(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _weight_gradient_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """dw = x^T dy, so x gets dy gradient^T and dy gets x gradient, each a grouped GEMM."""
    x, dy, offs = ctx.saved_tensors
    gradient = gradient.contiguous()
    dx = torch.ops.tilecrew.grouped_gemm(dy, gradient.transpose(1, 2), offs, None)
    ddy = torch.ops.tilecrew.grouped_gemm(x, gradient, offs, None)
    return dx, ddy, None


LIBRARY.define("grouped_gemm(Tensor x, Tensor w, Tensor offs, str? implementation) -> Tensor")
LIBRARY.define("grouped_gemm_out(Tensor x, Tensor w, Tensor offs, Tensor(a!) out, str? implementation) -> ()")
LIBRARY.define("grouped_gemm_weight_gradient(Tensor x, Tensor dy, Tensor offs) -> Tensor")
LIBRARY.impl("grouped_gemm", _grouped_gemm, "CompositeExplicitAutograd")
LIBRARY.impl("grouped_gemm_out", _grouped_gemm_out, "CompositeExplicitAutograd")
LIBRARY.impl("grouped_gemm_weight_gradient", _weight_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("tilecrew::grouped_gemm", _grouped_gemm_fake, lib=LIBRARY)
torch.library.register_fake("tilecrew::grouped_gemm_out", _grouped_gemm_out_fake, lib=LIBRARY)
torch.library.register_fake("tilecrew::grouped_gemm_weight_gradient", _weight_gradient_fake, lib=LIBRARY)
torch.library.register_autograd("tilecrew::grouped_gemm", _gradients, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(
    "tilecrew::grouped_gemm_weight_gradient",
    _weight_gradient_gradients,
    setup_context=_save_weight_gradient,
    lib=LIBRARY,
)
