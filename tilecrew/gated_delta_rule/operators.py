"""The chunked gated delta rule as torch operators: schemas, implementations, fake implementations for tracing,
gradients.

Registered with torch.library directly, whose calls cost less than those of its custom_op decorator. The schemas are
made from the dataclasses that the implementations take, so that an operator's arguments are the fields in their order.
An absent output is a tensor of no elements. Everything that reads values or hardware happens inside the operators,
where torch.compile does not look.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew._plans import PlainCall, PlanCache
from tilecrew.gated_delta_rule import checks
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.schedule import Problem, Schedule, pick

LIBRARY = torch.library.Library("tilecrew", "FRAGMENT")
FIELDS = tuple(field.name for field in dataclasses.fields(ForwardArguments))
TMA_ALIGNMENT = 16
PLANS = PlanCache()
KERNELS = {"scan": "kernel_forward_scan", "roles": "kernel_forward_roles", "portable": "kernel_portable"}

_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    float: "float",
    int: "int",
    bool: "bool",
    str | None: "str?",
}


def schema_of(arguments_type: type) -> str:
    """The operator arguments that are the fields of a dataclass."""
    return ", ".join(f"{_SCHEMA_TYPES[field.type]} {field.name}" for field in dataclasses.fields(arguments_type))


def chunk_forward(arguments: ForwardArguments, requires_gradient: bool, implementation: str | None) -> ForwardResult:
    """Runs the forward operator. With requires_gradient the gates must have been applied (`gates.apply_gates`)."""
    values = [getattr(arguments, name) for name in FIELDS]
    o, final_state, h = torch.ops.tilecrew.chunk_gated_delta_rule_forward(*values, requires_gradient, implementation)
    return ForwardResult(
        o,
        final_state if arguments.output_final_state else None,
        h.detach() if arguments.output_h else None,
    )


def chunk_forward_directly(arguments: ForwardArguments, implementation: str | None, call: PlainCall) -> ForwardResult:
    """What the forward operator does, for a call that has been checked and that only this package can see."""

    def run() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        result = _checked_forward(arguments, False, implementation)
        return result.o, result.final_state, result.h

    return ForwardResult(*PLANS.run(call, run))


def schedule_of(arguments: ForwardArguments, requires_gradient: bool, implementation: str | None) -> Schedule:
    """What the forward operator will run. Raises ValueError where the forced implementation cannot."""
    return pick(problem_of(arguments, requires_gradient), hardware_of(arguments.q.device), implementation)


def problem_of(arguments: ForwardArguments, requires_gradient: bool) -> Problem:
    """The part of the arguments that schedules depend on."""
    return sizes_of(
        arguments.q,
        arguments.v,
        arguments.num_sequences,
        chunk_size=arguments.chunk_size,
        is_aligned=all(_is_aligned(tensor) for tensor in (arguments.q, arguments.k, arguments.v)),
        requires_gradient=requires_gradient,
        normalises=arguments.use_qk_l2norm,
        output_h=arguments.output_h,
        has_initial_state=arguments.initial_state is not None,
        batch_invariant=arguments.batch_invariant,
    )


def sizes_of(q: torch.Tensor, v: torch.Tensor, num_sequences: int, **rest: Any) -> Problem:
    """A Problem with the sizes of these tensors; the rest is as given, or as Problem has it by default."""
    return Problem(
        batch=q.shape[0],
        num_tokens=q.shape[1],
        num_sequences=num_sequences,
        num_heads=q.shape[2],
        num_value_heads=v.shape[2],
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        **rest,
    )


def state_dtype(q: torch.Tensor) -> torch.dtype:
    """States are float32, and float64 only where everything is."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _is_aligned(tensor: torch.Tensor) -> bool:
    """TMA descriptors need multiples of 16 bytes, and a view that repeats its elements (stride 0) has none."""
    if tensor.data_ptr() % TMA_ALIGNMENT != 0:
        return False
    strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(
        size == 1 or (stride > 0 and stride * tensor.element_size() % TMA_ALIGNMENT == 0) for size, stride in strides
    )


def _normalised(arguments: ForwardArguments) -> ForwardArguments:
    """State in its dtype, and the small per-token tensors contiguous: free where they are so already."""
    state = arguments.initial_state
    if state is not None:
        state = state.to(state_dtype(arguments.q)).contiguous()
    g, beta = arguments.g.contiguous(), arguments.beta.contiguous()
    if state is arguments.initial_state and g is arguments.g and beta is arguments.beta:
        return arguments
    return dataclasses.replace(arguments, initial_state=state, g=g, beta=beta)


def _run(arguments: ForwardArguments, schedule: Schedule) -> ForwardResult:
    if schedule.implementation == "chunked":
        from tilecrew.gated_delta_rule import chunked, chunked_alone

        return (chunked_alone if arguments.batch_invariant else chunked).forward(arguments)
    # Kernel modules import Triton, which the package must do without until a kernel is needed.
    kernel = importlib.import_module(f"tilecrew.gated_delta_rule.{KERNELS[schedule.implementation]}")
    if arguments.cu_seqlens_cpu is not None:
        # What a kernel launches must not follow from values of offsets: a plan holds for all of them.
        arguments = dataclasses.replace(arguments, cu_seqlens_cpu=None)
    return kernel.forward(arguments, schedule)


def _outputs(arguments: ForwardArguments) -> ForwardResult:
    """Uninitialised outputs of the right shapes, dtypes and strides."""
    q, v = arguments.q, arguments.v
    batch, num_tokens, num_value_heads, value_dim = v.shape
    key_dim = q.shape[3]
    final_state = h = None
    if arguments.output_final_state:
        layout = (value_dim, key_dim) if arguments.state_v_first else (key_dim, value_dim)
        final_state = q.new_empty((arguments.num_sequences, num_value_heads, *layout), dtype=state_dtype(q))
    if arguments.output_h:
        # Every batch row has the same number of slots; a packed batch has one row.
        slots_per_row = (
            arguments.num_slots if arguments.cu_seqlens is not None else -(-num_tokens // arguments.chunk_size)
        )
        h = q.new_empty((batch, slots_per_row, num_value_heads, key_dim, value_dim))
    return ForwardResult(q.new_empty((batch, num_tokens, num_value_heads, value_dim)), final_state, h)


def _present(result: ForwardResult, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    final_state, h = result.final_state, result.h
    return (
        result.o,
        q.new_empty(0, dtype=state_dtype(q)) if final_state is None else final_state,
        q.new_empty(0) if h is None else h,
    )


def _without_tokens(arguments: ForwardArguments) -> ForwardResult:
    """No token or no sequence: the state stays as it is, everything else is zero."""
    result = _outputs(arguments)
    for tensor in (result.o, result.h):
        if tensor is not None:
            tensor.zero_()
    if result.final_state is not None:
        if arguments.initial_state is None:
            result.final_state.zero_()
        else:
            result.final_state.copy_(arguments.initial_state)
    return result


def _is_empty(arguments: ForwardArguments) -> bool:
    return arguments.q.shape[1] == 0 or arguments.num_sequences == 0


def _checked_forward(arguments: ForwardArguments, requires_gradient: bool, implementation: str | None) -> ForwardResult:
    checks.check_offsets(arguments.cu_seqlens, arguments.cu_seqlens_cpu, arguments.q.shape[1])
    arguments = _normalised(arguments)
    schedule = schedule_of(arguments, requires_gradient, implementation)
    return _without_tokens(arguments) if _is_empty(arguments) else _run(arguments, schedule)


def _forward(*values: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *fields, requires_gradient, implementation = values
    arguments = ForwardArguments(*fields)
    return _present(_checked_forward(arguments, requires_gradient, implementation), arguments.q)


def _forward_fake(*values: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *fields, _, _ = values
    arguments = ForwardArguments(*fields)
    return _present(_outputs(arguments), arguments.q)


def _backward(do: torch.Tensor, dfinal_state: torch.Tensor | None, *fields: Any) -> tuple[torch.Tensor, ...]:
    from tilecrew.gated_delta_rule import chunked

    arguments = ForwardArguments(*fields)
    if _is_empty(arguments):
        gradients = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in fields[:5]]
        dinitial_state = None if dfinal_state is None else dfinal_state.clone()
        return *gradients, _present_state_gradient(dinitial_state, arguments)
    result = chunked.backward(_normalised(arguments), do.contiguous(), dfinal_state)
    gradients = [result.q, result.k, result.v, result.g, result.beta]
    gradients = [gradient.to(tensor.dtype).contiguous() for gradient, tensor in zip(gradients, fields[:5], strict=True)]
    return *gradients, _present_state_gradient(result.initial_state, arguments)


def _present_state_gradient(gradient: torch.Tensor | None, arguments: ForwardArguments) -> torch.Tensor:
    state = arguments.initial_state
    if state is None:
        return arguments.q.new_empty(0, dtype=state_dtype(arguments.q))
    if gradient is None:
        return torch.zeros_like(state, memory_format=torch.contiguous_format)
    return gradient.to(state.dtype).contiguous()


def _backward_fake(do: torch.Tensor, dfinal_state: torch.Tensor | None, *fields: Any) -> tuple[torch.Tensor, ...]:
    arguments = ForwardArguments(*fields)
    gradients = [tensor.new_empty(tensor.shape) for tensor in fields[:5]]
    state = arguments.initial_state
    dstate = arguments.q.new_empty(0, dtype=state_dtype(arguments.q)) if state is None else state.new_empty(state.shape)
    return *gradients, dstate


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    arguments = ForwardArguments(*inputs[: len(FIELDS)])
    if arguments.use_qk_l2norm or arguments.use_beta_sigmoid or arguments.A_log is not None:
        raise ValueError("the operator differentiates applied gates only: use chunk_gated_delta_rule")
    saved = []
    for name, value in zip(FIELDS, inputs, strict=False):
        # Callers reuse their buffer of offsets for the next batch: keep the values of this one.
        is_offsets = name.startswith("cu_seqlens") and value is not None
        saved.append(value.clone() if is_offsets else value)
    ctx.is_tensor = [isinstance(value, torch.Tensor) for value in saved]
    ctx.options = [None if isinstance(value, torch.Tensor) else value for value in saved]
    ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))


def _differentiate(
    ctx: Any, do: torch.Tensor, dfinal_state: torch.Tensor, dh: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    saved = iter(ctx.saved_tensors)
    fields = [
        next(saved) if is_tensor else option for is_tensor, option in zip(ctx.is_tensor, ctx.options, strict=True)
    ]
    arguments = ForwardArguments(*fields)
    dstate = dfinal_state if arguments.output_final_state else None
    *gradients, dinitial_state = torch.ops.tilecrew.chunk_gated_delta_rule_backward(do, dstate, *fields)
    by_name: dict[str, torch.Tensor] = dict(zip(FIELDS, gradients, strict=False))
    if arguments.initial_state is not None:
        by_name["initial_state"] = dinitial_state
    # Two more inputs follow the fields: requires_gradient and implementation.
    return *(by_name.get(name) for name in FIELDS), None, None


def _refuse_second_derivative(ctx: Any, *gradients: Sequence[torch.Tensor]) -> None:
    raise NotImplementedError("chunk_gated_delta_rule has no second derivative")


LIBRARY.define(
    f"chunk_gated_delta_rule_forward({schema_of(ForwardArguments)}, bool requires_gradient, str? implementation)"
    " -> (Tensor o, Tensor final_state, Tensor h)"
)
LIBRARY.define(
    f"chunk_gated_delta_rule_backward(Tensor do, Tensor? dfinal_state, {schema_of(ForwardArguments)})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)"
)
LIBRARY.impl("chunk_gated_delta_rule_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("chunk_gated_delta_rule_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilecrew::chunk_gated_delta_rule_forward", _forward_fake, lib=LIBRARY)
torch.library.register_fake("tilecrew::chunk_gated_delta_rule_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd(
    "tilecrew::chunk_gated_delta_rule_forward", _differentiate, setup_context=_save_for_backward, lib=LIBRARY
)
torch.library.register_autograd("tilecrew::chunk_gated_delta_rule_backward", _refuse_second_derivative, lib=LIBRARY)
