"""Small problems by name, for the command line: a launch on tensors of the CPU, and what its result should be."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare, reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.gates import apply_gates
from tilecrew.gated_delta_rule.kernel_prepare import Prepared
from tilecrew.simulator.run import simulate
from tilecrew.testing import as_float64, random_arguments, relative_error

CHUNK = 64
NUM_TOKENS = 330  # five chunks and a partial one: every ring wraps around, and the last chunk has rows behind the end
LARGEST_ERROR = 0.01  # of a right result in bfloat16; the tests of the kernels demand less


@dataclass(frozen=True)
class Case:
    """launch: what to simulate. error: afterwards, the relative error of its results against float64."""

    launch: Launch
    error: Callable[[], float]


def prepare() -> Case:
    """The prepare kernel as the roles kernel takes it: norms inside, A without gates."""
    return _prepare(kernel_prepare.allocate)


def prepare_gated() -> Case:
    """The prepare kernel as the scan takes it: A_g, with the gates and beta inside."""
    return _prepare(kernel_prepare.allocate_gated)


def forward_roles() -> Case:
    """The roles kernel with V blocks of 128; the prepare kernel is simulated first."""
    arguments = _problem(num_value_heads=1)
    prepared, result = _prepared(arguments, kernel_prepare.allocate), _result(arguments)
    launch = kernel_forward_roles.launch(arguments, prepared, result, block_v=128)
    return Case(launch, lambda: forward_error(arguments, result))


def forward_scan() -> Case:
    """The scan kernel; the prepare kernel is simulated first."""
    arguments = _problem(num_value_heads=1)
    prepared, result = _prepared(arguments, kernel_prepare.allocate_gated), _result(arguments)
    launch = kernel_forward_scan.launch(arguments, prepared, result)
    return Case(launch, lambda: forward_error(arguments, result))


KERNELS: dict[str, Callable[[], Case]] = {
    "prepare": prepare,
    "prepare-gated": prepare_gated,
    "forward-roles": forward_roles,
    "forward-scan": forward_scan,
}


def forward_error(arguments: ForwardArguments, result: ForwardResult) -> float:
    """The larger of the relative errors of o and of the final state, which there must be; NaN where either has one."""
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    assert result.final_state is not None and expected.final_state is not None
    errors = torch.tensor(
        [
            relative_error(result.o, expected.o),
            relative_error(result.final_state, expected.final_state, head_dim=1),
        ]
    )
    return float(errors.max())


def inverse_error(arguments: ForwardArguments, prepared: Prepared) -> float:
    """The relative error of A, or of A_g where that was asked for, of one batch row whose keys have norms inside."""
    wide = apply_gates(as_float64(arguments))
    num_value_heads = arguments.v.shape[2]
    expected = torch.zeros(prepared.inverse.shape, dtype=torch.float64)
    for slot, first in enumerate(range(0, wide.q.shape[1], CHUNK)):
        k, g, beta = (x[0, first : first + CHUNK].transpose(0, 1) for x in (wide.k, wide.g, wide.beta))
        k = k.repeat_interleave(num_value_heads // k.shape[0], 0)
        length = k.shape[1]
        if prepared.multiply_beta:  # beta is 0 behind the end
            A = reference.gated_inverse(k, beta, reference.cumulative_log_decay(g)) * beta[:, None]
        else:
            expected[slot] = torch.eye(CHUNK)
            A = reference.ungated_inverse(k, beta)
        expected[slot, :, :length, :length] = A
    return relative_error(prepared.inverse, expected, head_dim=1)


def _problem(num_value_heads: int) -> ForwardArguments:
    return random_arguments(
        1,
        NUM_TOKENS,
        1,
        num_value_heads,
        dtype=torch.bfloat16,
        with_initial_state=True,
        use_qk_l2norm=True,
        output_final_state=True,
    )


def _prepare(allocate: Callable[[ForwardArguments], Prepared]) -> Case:
    arguments = _problem(num_value_heads=2)
    prepared = _with_nan(allocate(arguments))
    launch = kernel_prepare.launch(arguments, prepared, torch.full_like(arguments.v, float("nan")))
    return Case(launch, lambda: inverse_error(arguments, prepared))


def _prepared(arguments: ForwardArguments, allocate: Callable[[ForwardArguments], Prepared]) -> Prepared:
    """The inverse and the gates, from the simulated prepare kernel."""
    prepared = _with_nan(allocate(arguments))
    simulate(kernel_prepare.launch(arguments, prepared, torch.full_like(arguments.v, float("nan"))))
    return prepared


def _with_nan(prepared: Prepared) -> Prepared:
    for x in (prepared.inverse, prepared.gates):
        x.fill_(float("nan"))
    return prepared


def _result(arguments: ForwardArguments) -> ForwardResult:
    """Outputs that are NaN until the kernel writes them."""
    result = kernel_forward_roles.allocate_result(arguments)
    for x in (result.o, result.final_state):
        if x is not None:
            x.fill_(float("nan"))
    return result
