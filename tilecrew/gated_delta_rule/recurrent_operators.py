"""Decode as torch operators: one that returns the final state, one that writes it into the caller's states.

Two schemas, because a schema fixes what is mutated. See `operators` for the common rules.
"""

import dataclasses
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew._plans import PlainCall, PlanCache
from tilecrew.gated_delta_rule import checks
from tilecrew.gated_delta_rule.operators import LIBRARY, schema_of, sizes_of, state_dtype
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.gated_delta_rule.schedule import Problem, pick_recurrent

PLANS = PlanCache()
FIELDS = tuple(field.name for field in dataclasses.fields(RecurrentArguments))


def recurrent_forward(
    arguments: RecurrentArguments, implementation: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the operator that fits: (o, final state or None); with inplace_state the final state is initial_state
    itself."""
    values = [getattr(arguments, name) for name in FIELDS]
    if arguments.inplace_state:
        o = torch.ops.tilecrew.recurrent_gated_delta_rule_inplace(*values, implementation)
        return o, arguments.initial_state
    o, final_state = torch.ops.tilecrew.recurrent_gated_delta_rule_forward(*values, implementation)
    return o, final_state if arguments.output_final_state else None


def recurrent_forward_directly(
    arguments: RecurrentArguments, implementation: str | None, call: PlainCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the operators do, for a call that has been checked and that only this package can see."""

    def run() -> tuple[torch.Tensor, torch.Tensor | None]:
        o, final_state = _checked_forward(arguments, implementation)
        return o, arguments.initial_state if arguments.inplace_state else final_state

    return PLANS.run(call, run)


def recurrent_differentiable(arguments: RecurrentArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same through torch's own gradients: no operator."""
    from tilecrew.gated_delta_rule import recurrent

    if not torch.compiler.is_compiling():
        checks.check_offsets(arguments.cu_seqlens, None, arguments.q.shape[1])
    return recurrent.forward(normalised(arguments))


def recurrent_problem_of(arguments: RecurrentArguments, requires_gradient: bool = False) -> Problem:
    """The part of the arguments that schedules depend on."""
    return sizes_of(arguments.q, arguments.v, arguments.num_sequences, requires_gradient=requires_gradient)


def final_state_dtype(arguments: RecurrentArguments) -> torch.dtype:
    """bfloat16 states stay so; every other state is float32 (float64 where q is float64)."""
    state = arguments.initial_state
    if state is not None and state.dtype == torch.bfloat16:
        return torch.bfloat16
    return state_dtype(arguments.q)


def normalised(arguments: RecurrentArguments) -> RecurrentArguments:
    """States and per-channel gates as the implementations take them: free where they are so already, differentiable."""
    state = arguments.initial_state
    if state is not None and not arguments.inplace_state:
        state = state.to(final_state_dtype(arguments))
        if not checks.has_contiguous_rows(state):
            state = state.contiguous()
    changed: dict[str, Any] = {name: _last_contiguous(getattr(arguments, name)) for name in ("gk", "gv", "beta")}
    changed["initial_state"] = state
    if all(value is getattr(arguments, name) for name, value in changed.items()):
        return arguments
    return dataclasses.replace(arguments, **changed)


def _last_contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.dim() < 4 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def _without_tokens(arguments: RecurrentArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """No token or no sequence: the state stays as it is, padding's is zero."""
    o = torch.zeros_like(arguments.v, memory_format=torch.contiguous_format)
    state, indices = arguments.initial_state, arguments.state_indices
    if arguments.inplace_state or not arguments.output_final_state:
        return o, None
    if state is None:
        shape = (arguments.num_sequences, *arguments.state_shape)
        return o, arguments.q.new_zeros(shape, dtype=final_state_dtype(arguments))
    if indices is None:
        return o, state.clone(memory_format=torch.contiguous_format)
    is_padding = (indices < 0).view(-1, 1, 1, 1)
    return o, state[indices.clamp(min=0).long()].masked_fill(is_padding, 0)


def _run(values: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    *fields, implementation = values
    return _checked_forward(RecurrentArguments(*fields), implementation)


def _checked_forward(
    arguments: RecurrentArguments, implementation: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    checks.check_offsets(arguments.cu_seqlens, None, arguments.q.shape[1])
    schedule = pick_recurrent(recurrent_problem_of(arguments), hardware_of(arguments.q.device), implementation)
    arguments = normalised(arguments)
    if arguments.q.shape[1] == 0 or arguments.num_sequences == 0:
        return _without_tokens(arguments)
    if schedule.implementation == "recurrent":
        # Imports Triton, which the package must do without until a kernel is needed.
        from tilecrew.gated_delta_rule import kernel_recurrent

        return kernel_recurrent.forward(arguments)
    from tilecrew.gated_delta_rule import recurrent

    return recurrent.forward(arguments)


def _forward(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    o, final_state = _run(values)
    q = values[0]
    return o, q.new_empty(0, dtype=state_dtype(q)) if final_state is None else final_state


def _inplace(*values: Any) -> torch.Tensor:
    return _run(values)[0]


def _forward_fake(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = RecurrentArguments(*values[:-1])
    o, q = _inplace_fake(*values), arguments.q
    if not arguments.output_final_state:
        return o, q.new_empty(0, dtype=state_dtype(q))
    shape = (arguments.num_sequences, *arguments.state_shape)
    return o, q.new_empty(shape, dtype=final_state_dtype(arguments))


def _inplace_fake(*values: Any) -> torch.Tensor:
    v = RecurrentArguments(*values[:-1]).v
    return v.new_empty(v.shape)


def _register(name: str, schema: str, implementation: Any, fake: Any) -> None:
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilecrew::{name}", fake, lib=LIBRARY)


_SCHEMA = f"{schema_of(RecurrentArguments)}, str? implementation"
_register(
    "recurrent_gated_delta_rule_forward", f"({_SCHEMA}) -> (Tensor o, Tensor final_state)", _forward, _forward_fake
)
_register(
    "recurrent_gated_delta_rule_inplace",
    f"({_SCHEMA.replace('Tensor? initial_state', 'Tensor(a!) initial_state')}) -> Tensor o",
    _inplace,
    _inplace_fake,
)
