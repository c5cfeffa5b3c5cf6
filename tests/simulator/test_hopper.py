"""The Hopper kernels of the gated delta rule in the simulator, held to what they are held to on a GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from tests.gated_delta_rule.hopper_checks import (
    KERNELS,
    block_of,
    check_result,
    for_kernel,
    is_beside,
    is_scan,
    prepare_launch,
)
from tests.gated_delta_rule.kernel_checks import assert_within, with_nan_tail
from tests.gated_delta_rule.yardsticks import rounded_chunks
from tests.simulator.conftest import SEEDS
from tilecrew.gated_delta_rule import chunk_flags, kernel_forward_roles, kernel_forward_scan, reference
from tilecrew.gated_delta_rule.chunk_blocks import whole_matrices
from tilecrew.gated_delta_rule.gates import apply_gates
from tilecrew.testing import as_float64, random_arguments

BF16, FP16 = torch.bfloat16, torch.float16
STATES = {"with_initial_state": True, "output_final_state": True}
PACKED = {"lengths": [70, 0, 1, 200], "tail": 77}
PROBLEMS = {
    "norms": {"use_qk_l2norm": True, "normalised": False},
    "unit keys, states": STATES,
    "norms, packed, h": {**PACKED, **STATES, "use_qk_l2norm": True, "output_h": True},
    "packed, V first, h": {**PACKED, **STATES, "state_v_first": True, "output_h": True},
    "gates inside": {
        **STATES,
        "use_qk_l2norm": True,
        "use_beta_sigmoid": True,
        "allow_neg_eigval": True,
        "A_log": torch.tensor([0.3, -0.5]),
        "dt_bias": torch.tensor([0.1, 1.0]),
    },
    "strong gates": {**STATES, "gate_strength": 40.0},
}
# The scan and one block of V of the roles see every problem, the other blocks one with everything in it.
SCANS = ("scan 64", "scan 128", "scan 64 beside")
KERNEL_PROBLEMS = [(kernel, name) for kernel in (*SCANS, "roles 64") for name in PROBLEMS]
KERNEL_PROBLEMS += [(kernel, "norms, packed, h") for kernel in ("roles 128", "roles 32")]


def problem(options, num_tokens=330, dtype=BF16):
    """One head, so one program for each block of V; 330 tokens are more chunks than the scan's ring has stages, 200
    more than the roles'."""
    options = {name: value[:1] if torch.is_tensor(value) else value for name, value in options.items()}
    return random_arguments(1, num_tokens, 1, 1, dtype=dtype, **options)


def prepare(arguments, kernel, o, simulate, num_seeds=SEEDS):
    """What the kernel is given, made by the prepare kernel in the simulator."""
    prepared, launch = prepare_launch(arguments, kernel, o, num_sms=4)
    outputs = [x for name, x in vars(prepared).items() if torch.is_tensor(x) and name != "tickets"]
    if is_beside(kernel):
        simulate(launch, outputs, num_seeds, zeros=prepared.tickets)
        num_flags = prepared.tickets[chunk_flags.FIRST_FLAG.value :].numel()
        assert prepared.tickets.tolist() == [1, 3] + num_flags * [1]  # one of four programs has left
    else:
        simulate(launch, outputs, num_seeds)
    return prepared


def run(arguments, kernel, simulate, num_seeds=SEEDS, pieces=None):
    """Both kernels; outputs start as NaN, and o keeps the zeros that the prepare kernel writes behind the end."""
    arguments = for_kernel(arguments, kernel)
    result = kernel_forward_roles.allocate_result(arguments)
    result.o.fill_(float("nan"))
    prepared = prepare(arguments, kernel, result.o, simulate, num_seeds)
    zeros = result.o.clone()
    rows = None if pieces is None else torch.tensor(pieces, dtype=torch.int32)
    module = kernel_forward_scan if is_scan(kernel) else kernel_forward_roles
    launch = module.launch(arguments, prepared, result, block_of(kernel), rows)
    states = [x for x in (result.final_state,) if x is not None]
    simulate(launch, [result.o, *states], num_seeds)
    if arguments.cu_seqlens is not None:
        end = int(arguments.cu_seqlens[-1])
        assert result.o[:, end:].isnan().all()  # those rows are the prepare kernel's
        result.o[:, end:] = zeros[:, end:]
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), KERNEL_PROBLEMS)
def test_results(kernel, name, simulate):
    arguments = for_kernel(problem(PROBLEMS[name], 330 if is_scan(kernel) else 200), kernel)
    if arguments.cu_seqlens is not None:
        arguments = with_nan_tail(arguments)
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    check_result(arguments, run(arguments, kernel, simulate), expected, rounded_chunks(arguments))


@pytest.mark.parametrize("kernel", ["roles 128", "roles 64", "roles 32"])
def test_float16(kernel, simulate):
    arguments = problem({"use_qk_l2norm": True, **STATES}, 130, FP16)
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    check_result(arguments, run(arguments, kernel, simulate), expected, rounded_chunks(arguments))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65])
def test_numbers_of_tokens(kernel, num_tokens, simulate):
    arguments = problem({"use_qk_l2norm": True, **STATES}, num_tokens)
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    check_result(arguments, run(arguments, kernel, simulate, 2), expected, rounded_chunks(arguments))


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if not is_beside(kernel)])
def test_pieces_are_the_whole(kernel, simulate):
    """One sequence cut behind its second chunk: the second piece starts from the state that a shorter call ends in."""
    arguments = problem(STATES, 200)
    whole = run(arguments, kernel, simulate, 2)
    prefix = {name: getattr(arguments, name)[:, :128].contiguous() for name in ("q", "k", "v", "g", "beta")}
    state = run(replace(arguments, **prefix), kernel, simulate, 1).final_state
    states = torch.cat([arguments.initial_state, state])
    pieces = [(0, 0, 2), (0, 2, 4)]
    cut = run(replace(arguments, initial_state=states), kernel, simulate, 2, pieces)
    assert torch.equal(cut.o, whole.o)
    assert torch.equal(cut.final_state, whole.final_state)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["scan 64", "scan 64 beside", "roles 64"])
def test_inverse(kernel, ratio, normalise, simulate):
    """The prepare kernel's inverse, also of keys that are too long for fp16 in one chunk."""
    arguments = random_arguments(1, 130, 1, ratio, dtype=BF16, use_qk_l2norm=normalise, gate_strength=40.0)
    if not normalise:
        arguments.k[:, 64:] *= 3
    prepared = prepare(arguments, kernel, torch.full_like(arguments.v, float("nan")), simulate)
    gated = apply_gates(as_float64(arguments))
    for chunk, start in enumerate(range(0, 130, 64)):
        tokens = slice(start, min(start + 64, 130))
        length = tokens.stop - tokens.start
        g, beta, k = (x[0, tokens].transpose(0, 1) for x in (gated.g, gated.beta, gated.k))
        k = k.repeat_interleave(ratio // k.shape[0], 0)
        g = reference.cumulative_log_decay(g)
        if is_scan(kernel):
            expected = reference.gated_inverse(k, beta, g) * beta[:, None]
        else:
            expected = reference.ungated_inverse(k, beta) if normalise else reference.gated_inverse(k, beta, g)
        inverse = whole_matrices(prepared.inverse[chunk]) if is_scan(kernel) else prepared.inverse[chunk]
        assert_within(inverse[:, :length, :length], expected, expected.to(BF16), 0, BF16, "inverse")
        assert not inverse.triu(1).any()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_fifty_seeds(kernel, simulate):
    """No false alarm, and the same bits, under fifty schedules; two programs of the grid at a time."""
    arguments = problem({**STATES, "use_qk_l2norm": True, "output_h": True}, 200)

    def in_pairs(launch, outputs, num_seeds, zeros=None):
        simulate(launch, outputs, num_seeds, 2, zeros)

    run(arguments, kernel, in_pairs, 50)
