"""Small problems by name, for the command line: a launch on tensors of the CPU, and what its result should be."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare, reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments, ForwardResult
from tilecrew.gated_delta_rule.chunk_blocks import whole_matrices
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
    """The prepare kernel as the scan takes it: A_g, with the gates and beta inside, factors and scores."""
    return _prepare(kernel_prepare.allocate_gated)


def forward_roles() -> Case:
    """The roles kernel with V blocks of 128; the prepare kernel is simulated first."""
    arguments = _problem(num_value_heads=1)
    prepared, result = _prepared(arguments, kernel_prepare.allocate), _result(arguments)
    launch = kernel_forward_roles.launch(arguments, prepared, result, block_v=128)
    return Case(launch, lambda: forward_error(arguments, result))


def forward_scan(block_v: int = 64) -> Case:
    """The scan kernel; the prepare kernel is simulated first."""
    arguments = _problem(num_value_heads=1)
    prepared, result = _prepared(arguments, kernel_prepare.allocate_gated), _result(arguments)
    launch = kernel_forward_scan.launch(arguments, prepared, result, block_v)
    return Case(launch, lambda: forward_error(arguments, result))


KERNELS: dict[str, Callable[[], Case]] = {
    "prepare": prepare,
    "prepare-gated": prepare_gated,
    "forward-roles": forward_roles,
    "forward-scan": forward_scan,
    "forward-scan-128": functools.partial(forward_scan, 128),
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


def prepare_error(arguments: ForwardArguments, prepared: Prepared) -> float:
    """The largest of the relative errors of what the prepare kernel wrote; NaN where any has one."""
    errors = []
    for name, expected in expected_of_prepare(arguments, prepared).items():
        actual = getattr(prepared, name)
        if prepared.scores is not None and name != "factors":
            actual, expected = whole_matrices(actual).tril(), expected.tril()
        if name == "factors":  # every row is held to its own size
            actual, expected = actual.flatten(1, 2), expected.flatten(1, 2)
        errors.append(relative_error(actual, expected, head_dim=1))
    return float(torch.tensor(errors).max())


def expected_of_prepare(arguments: ForwardArguments, prepared: Prepared) -> dict[str, torch.Tensor]:
    """What the prepare kernel should write for one batch row: inverse, for the scan also factors and scores, of which
    it has the blocks at and below the diagonal.

    In float64, by the names of Prepared, for a problem with norms inside. The inverse is A, and behind the end the
    identity; for the scan it is A_g, and zeros there, because beta is a factor of its columns.
    """
    wide = apply_gates(as_float64(arguments))
    num_heads, num_value_heads = arguments.q.shape[2], arguments.v.shape[2]
    for_scan = prepared.scores is not None
    inverse = torch.zeros(*prepared.inverse.shape[:2], CHUNK, CHUNK, dtype=torch.float64)
    factors = torch.zeros(*inverse.shape[:2], 4, CHUNK, dtype=torch.float64)
    scores = torch.zeros(inverse.shape[0], num_heads, CHUNK, CHUNK, dtype=torch.float64)
    for slot, first in enumerate(range(0, wide.q.shape[1], CHUNK)):
        q, k, g, beta = (x[0, first : first + CHUNK].transpose(0, 1) for x in (wide.q, wide.k, wide.g, wide.beta))
        length = k.shape[1]
        g = reference.cumulative_log_decay(g)
        scores[slot, :, :length, :length] = arguments.scale * q @ k.mT
        keys = k.repeat_interleave(num_value_heads // num_heads, 0)
        if for_scan:
            A = reference.gated_inverse(keys, beta, g) * beta[:, None]
        else:
            inverse[slot] = torch.eye(CHUNK)
            A = reference.ungated_inverse(keys, beta)
        inverse[slot, :, :length, :length] = A
        factors[slot] = _factors(arguments, g, first)
    return {"inverse": inverse, "factors": factors, "scores": scores} if for_scan else {"inverse": inverse}


def _factors(arguments: ForwardArguments, g: torch.Tensor, first: int) -> torch.Tensor:
    """[HV, 4, 64] of the chunk that begins with token `first`. g: [HV, length], the chunk's cumulative log decay."""
    length = g.shape[1]
    norms = [
        (x[0, first : first + length].double().square().sum(-1) + 1e-6)
        .rsqrt()
        .T.repeat_interleave(g.shape[0] // x.shape[2], 0)
        for x in (arguments.k, arguments.q)
    ]
    to_end = (g[:, -1:] - g).exp()
    factors = torch.zeros(g.shape[0], 4, CHUNK, dtype=torch.float64)
    factors[:, 0] = g[:, -1:] / math.log(2)  # behind the end, the decay stays and the norms are zeros
    rows = (g / math.log(2), g.exp() * norms[0], arguments.scale * g.exp() * norms[1], to_end * norms[0])
    factors[:, :, :length] = torch.stack(rows, 1)
    return factors


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
    return Case(launch, lambda: prepare_error(arguments, prepared))


def _prepared(arguments: ForwardArguments, allocate: Callable[[ForwardArguments], Prepared]) -> Prepared:
    """What the other kernel reads, from the simulated prepare kernel."""
    prepared = _with_nan(allocate(arguments))
    simulate(kernel_prepare.launch(arguments, prepared, torch.full_like(arguments.v, float("nan"))))
    return prepared


def _with_nan(prepared: Prepared) -> Prepared:
    for x in vars(prepared).values():
        if torch.is_tensor(x):
            x.fill_(float("nan"))
    return prepared


def _result(arguments: ForwardArguments) -> ForwardResult:
    """Outputs that are NaN until the kernel writes them."""
    result = kernel_forward_roles.allocate_result(arguments)
    for x in (result.o, result.final_state):
        if x is not None:
            x.fill_(float("nan"))
    return result
