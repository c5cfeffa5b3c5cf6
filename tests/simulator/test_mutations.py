"""Plants faults into the compiled kernels, one at a time, and demands that the simulator finds each.

A fault is found where a run raises FaultError or its results differ from those of the kernel as it is. What is not
found stands in one of two tables, which are checked too: HARMLESS, faults that are none, and MISSED, faults that the
simulator does not see.
"""

import dataclasses
import functools

import pytest
import torch

from tests.gated_delta_rule import hopper_checks
from tests.simulator.mutations import KINDS, mutate, names_of_places, places
from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare
from tilecrew.simulator import FaultError, simulate
from tilecrew.simulator.reader import Program
from tilecrew.simulator.run import compile_program, role_names
from tilecrew.testing import random_arguments

BF16 = torch.bfloat16
STATES = {"with_initial_state": True, "output_final_state": True}
SEEDS = range(3)

PREPARE_KINDS = (
    *("drop fence", "late fence", "drop barrier", "flip parity", "drop wait", "expect more", "expect less"),
    *("count more", "drop store wait", "drop product wait"),
)
KINDS_OF = {
    "scan": tuple(KINDS),
    "scan 128": tuple(KINDS),
    "scan beside": tuple(KINDS),
    "roles": tuple(KINDS),
    "prepare": PREPARE_KINDS,
    "prepare gated": PREPARE_KINDS,
}
CASES = [(kernel, kind) for kernel, kinds in KINDS_OF.items() for kind in kinds]

# (kernel, kind, role, number among the role's places): why nothing is wrong then.
HARMLESS = {
    **{
        (kernel, "drop product wait", "attention_role", 0): "it waits for no product, and stands there for ptxas"
        for kernel in ("scan", "scan 128")
    },
    **{
        (kernel, kind, "", 0): (
            "the tiles' top right blocks are cleared before S is published for h, which brings a fence and a barrier"
        )
        for kernel in ("scan", "scan beside")
        for kind in ("drop fence", "late fence", "drop barrier")
    },
    ("roles", "drop barrier", "value_role", 2): (
        "inputs.release follows state_delta.publish, whose barrier came after the last access"
    ),
    ("roles", "drop barrier", "output_role", 2): (
        "inputs.release follows state.release, whose barrier came after the last access"
    ),
    **{
        (kernel, "drop barrier", "store_role", 0): (
            "state.release follows the wait for the copy of h: nothing but that copy touched the tile"
        )
        for kernel in ("scan", "scan beside", "roles")
    },
    **{
        (kernel, "drop barrier", "store_role", number): "release_output follows the wait for the copy of O, likewise"
        for kernel, number in (("scan", 1), ("scan beside", 1), ("scan 128", 0))
    },
    ("roles", "free early", "value_role", 1): (
        "inputs.release before the wait for V_d: the stage is free when the state role, too, has arrived, which comes "
        "after its wait for state_delta, which the value role publishes after the wait for V_d"
    ),
    ("roles", "publish early", "value_role", 1): (
        "inputs.release before the store of V': every read of the stage was finished before"
    ),
}

# The same, where a GPU may go wrong and the simulator does not see it, or cannot.
MEMBAR = (
    "the simulator takes a role's warps for one thread between arrivals, as Triton's lowering puts a barrier between "
    "accesses of one tile where the kernel has none; it does not see where only the kernel's own barrier would do"
)
MISSED = {
    **{("prepare", "drop barrier", "", number): MEMBAR for number in (0, 1, 2)},
    **{("prepare gated", "drop barrier", "", number): MEMBAR for number in (0, 1, 2, 4)},
}
UNFOUND = HARMLESS | MISSED


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its launches: with each, the tensors that it writes."""

    program: Program
    role_names: list[str]
    launches: list[tuple[Launch, list[torch.Tensor]]]

    def results(self, number: int, seed: int, program: Program | None = None) -> list[torch.Tensor]:
        """What a launch writes; 7 where it writes nothing."""
        launch, outputs = self.launches[number]
        for output in outputs:
            output.fill_(7)
        simulate([launch], seed, [program or self.program])
        return [output.clone() for output in outputs]

    @functools.cached_property
    def expected(self) -> list[list[torch.Tensor]]:
        return [self.results(number, SEEDS[0]) for number in range(len(self.launches))]

    def finds(self, program: Program, num_seeds: int, num_launches: int) -> bool:
        """Whether a run of one of the first launches with one of the first seeds fails or gives other results."""
        for seed in SEEDS[:num_seeds]:
            for number in range(num_launches):
                try:
                    results = self.results(number, seed, program)
                except FaultError:
                    return True
                if not are_equal(results, self.expected[number]):
                    return True
        return False


def are_equal(results, expected):
    return all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(results, expected, strict=True))


def scan_launch(num_tokens, output_h, block_v=64, kernel="scan 64"):
    options = {"lengths": [num_tokens], "use_qk_l2norm": True, "output_h": output_h, **STATES}
    arguments = random_arguments(num_heads=1, num_value_heads=1, dtype=BF16, **options)
    result = kernel_forward_roles.allocate_result(arguments)
    prepared, prepare = hopper_checks.prepare_launch(arguments, kernel, result.o, num_sms=4)
    simulate(prepare)
    launch = kernel_forward_scan.launch(arguments, prepared, result, block_v)
    return launch, [result.o, result.final_state, *([result.h] if output_h else [])]


def roles_launch(num_tokens):
    arguments = random_arguments(1, num_tokens, 1, 1, dtype=BF16, output_h=True, **STATES)
    result = kernel_forward_roles.allocate_result(arguments)
    prepared = kernel_prepare.allocate(arguments)
    simulate(kernel_prepare.launch(arguments, prepared, result.o))
    launch = kernel_forward_roles.launch(arguments, prepared, result, 64)
    return launch, [result.o, result.final_state, result.h]


def prepare_launch(is_gated):
    # two value heads: the second one's inverse overwrites the first one's
    arguments = random_arguments(1, 60, 1, 2, dtype=BF16, use_qk_l2norm=is_gated)
    allocate = kernel_prepare.allocate_gated if is_gated else kernel_prepare.allocate
    prepared = allocate(arguments)
    outputs = [x for x in vars(prepared).values() if torch.is_tensor(x)]
    return kernel_prepare.launch(arguments, prepared, torch.empty_like(arguments.v)), outputs


@functools.cache
def case_of(kernel):
    """First a launch that wraps a ring of three stages and ends with a partial chunk; then, for what that does not
    touch, one that wraps every stage (or all four), and one whose last chunk is full."""
    make = {
        "scan": lambda: [scan_launch(num_tokens, True) for num_tokens in (200, 330, 128)],
        "scan 128": lambda: [scan_launch(num_tokens, False, 128) for num_tokens in (400, 128)],
        "scan beside": lambda: [
            scan_launch(num_tokens, True, kernel="scan 64 beside") for num_tokens in (200, 330, 128)
        ],
        "roles": lambda: [roles_launch(num_tokens) for num_tokens in (200, 330, 128)],
        "prepare": lambda: [prepare_launch(False)],
        "prepare gated": lambda: [prepare_launch(True)],
    }[kernel]
    # the first program has all roles and stages: half of the values of the only head
    launches = [(launch._replace(num_programs=1), outputs) for launch, outputs in make()]
    return Case(compile_program(launches[0][0]), role_names(launches[0][0]), launches)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KINDS_OF)
def test_without_a_fault_every_seed_passes(kernel):
    case = case_of(kernel)
    for seed in SEEDS:
        for number, expected in enumerate(case.expected):
            assert not any((output == 7).all() for output in expected)
            assert are_equal(case.results(number, seed), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "kind"), CASES)
def test_every_planted_fault_is_found_but_those_in_the_tables(kernel, kind):
    case = case_of(kernel)
    named = names_of_places(case.program, kind, case.role_names)
    assert named
    unfound = []
    for (role, number), place in named.items():
        key = (kernel, kind, role, number)
        # What is not found takes full runs: of every launch for what is harmless, of one for what cannot be seen.
        num_seeds = 1 if key in UNFOUND else len(SEEDS)
        num_launches = 1 if key in MISSED else len(case.launches)
        if not case.finds(mutate(case.program, kind, place), num_seeds, num_launches):
            unfound.append(key)
    assert unfound == [
        (kernel, kind, role, number) for role, number in named if (kernel, kind, role, number) in UNFOUND
    ]
    in_tables = {key[2:] for key in UNFOUND if key[:2] == (kernel, kind)}
    assert in_tables <= set(named), "a table names a place that is not there"


def test_tables_name_faults_that_are_planted():
    assert {key[:2] for key in UNFOUND} <= set(CASES)
    assert not HARMLESS.keys() & MISSED.keys()


@pytest.mark.parametrize("kernel", ["prepare", "prepare gated"])
def test_kinds_that_are_not_planted_in_prepare_have_no_places(kernel):
    program = case_of(kernel).program
    assert {kind for kind in KINDS if places(program, kind)} == set(KINDS_OF[kernel])
