"""The Hopper kernels, roles and scan, on a GPU: against float64, and what it promises about bits, memory and graphs."""

from dataclasses import replace

import pytest
import torch

from tests.gated_delta_rule.hopper_checks import (
    EVERYTHING,
    KERNELS,
    assert_same_bits,
    check_kernels,
    check_result,
    has_h,
    run_kernel,
    run_pieces,
    run_with_nan_in_shared_memory,
)
from tests.gated_delta_rule.kernel_checks import (
    FLOOR,
    LARGE_MEMORY,
    not_finite,
    spread_over_more_than_2_to_31_elements,
    with_nan_tail,
    with_strided_inputs,
)
from tests.gated_delta_rule.yardsticks import rounded_chunks
from tilecrew import chunk_gated_delta_rule, explain_chunk_gated_delta_rule
from tilecrew.gated_delta_rule import reference
from tilecrew.gated_delta_rule.schedule import Schedule
from tilecrew.testing import as_float64, random_arguments, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0 (Hopper)",
    ),
]
HALF = [torch.bfloat16, torch.float16]
PACKED = {"lengths": [1, 64, 0, 65, 129, 300], "tail": 77}


def problem(*sizes, dtype=torch.bfloat16, **options):
    return random_arguments(*sizes, dtype=dtype, device="cuda", **(EVERYTHING | options))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_tokens", [1, 5, 63, 64, 65, 127, 1000])
def test_numbers_of_tokens(num_tokens, dtype):
    check_kernels(problem(2, num_tokens, dtype=dtype))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("num_tokens", [5, 64, 300])
def test_norms_and_gates_inside(num_tokens, normalise, dtype):
    gates = {"A_log": torch.randn(4).cuda(), "dt_bias": torch.randn(4).cuda()}
    flags = {"use_qk_l2norm": normalise, "use_beta_sigmoid": True, "allow_neg_eigval": True}
    check_kernels(problem(2, num_tokens, dtype=dtype, normalised=not normalise, **gates, **flags))


@pytest.mark.parametrize(
    ("dtype", "index_dtype", "state_v_first"),
    [
        (torch.bfloat16, torch.int32, False),
        (torch.bfloat16, torch.int64, True),
        (torch.float16, torch.int32, False),
    ],
)
def test_packed_sequences_with_nan_in_the_tail(dtype, index_dtype, state_v_first):
    arguments = with_nan_tail(problem(**PACKED, dtype=dtype, state_v_first=state_v_first))
    check_kernels(replace(arguments, cu_seqlens=arguments.cu_seqlens.to(index_dtype)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("normalise", [False, True])
def test_what_others_left_in_shared_memory_is_not_read(normalise, kernel):
    arguments = with_nan_tail(problem(**PACKED, use_qk_l2norm=normalise, normalised=not normalise))
    expected = run_kernel(arguments, kernel)
    for _ in range(10):
        assert_same_bits(run_with_nan_in_shared_memory(arguments, kernel), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("normalise", [False, True])
def test_nan_and_infinity_stay_in_their_sequence(normalise, kernel):
    arguments = problem(**PACKED, use_qk_l2norm=normalise)
    clean = run_kernel(arguments, kernel)
    bounds = arguments.cu_seqlens.tolist()
    sick = 4  # 129 tokens; the partial chunk before it reaches into its rows, its own into the next sequence's
    start, end = bounds[sick], bounds[sick + 1]
    first_slot, end_slot = start // 64 + sick, start // 64 + sick + 3
    for names, value in (("v",), float("nan")), (("q", "k", "v", "g", "beta", "initial_state"), float("inf")):
        inputs = {name: getattr(arguments, name).clone() for name in names}
        for name, x in inputs.items():
            (x[sick] if name == "initial_state" else x[:, start:end]).fill_(value)
        actual = run_kernel(replace(arguments, **inputs), kernel)
        # The sequence itself shows it: nothing is replaced in silence.
        assert not actual.o[:, start:end].isfinite().any()
        assert not actual.final_state[sick].isfinite().all()
        for x, y in ((actual.o, clean.o), (actual.h, clean.h))[: 1 + has_h(kernel)]:
            lower, upper = (start, end) if x is actual.o else (first_slot, end_slot)
            assert torch.equal(x[:, :lower], y[:, :lower])
            assert torch.equal(x[:, upper:], y[:, upper:])
        others = [n for n in range(len(bounds) - 1) if n != sick]
        assert torch.equal(actual.final_state[others], clean.final_state[others])


@pytest.mark.parametrize(
    ("ratio", "kernel", "dtype"),
    [
        (1, "roles 128", torch.float16),
        (3, "roles 64", torch.bfloat16),
        (4, "roles 32", torch.bfloat16),
        *((ratio, kernel, torch.bfloat16) for ratio in (1, 3, 4) for kernel in ("scan 64", "scan 128")),
    ],
)
@pytest.mark.parametrize("normalise", [False, True])
def test_grouped_value_heads(normalise, ratio, kernel, dtype):
    check_kernels(problem(2, 200, 3, 3 * ratio, dtype=dtype, use_qk_l2norm=normalise), (kernel,))


@pytest.mark.parametrize("kernel", ["roles 64", "scan 64", "scan 128"])
def test_optional_outputs_and_state(kernel):
    arguments = problem(2, 200)
    whole = run_kernel(arguments, kernel)
    for final_state, h in ((False, False), (True, False), (False, True))[: 2 + has_h(kernel)]:
        part = run_kernel(replace(arguments, output_final_state=final_state, output_h=h), kernel)
        assert torch.equal(part.o, whole.o)
        assert torch.equal(part.final_state, whole.final_state) if final_state else part.final_state is None
        assert torch.equal(part.h, whole.h) if h else part.h is None
    zeros = run_kernel(replace(arguments, initial_state=torch.zeros_like(arguments.initial_state)), kernel)
    assert_same_bits(run_kernel(replace(arguments, initial_state=None), kernel), zeros)


def test_state_layouts_give_the_same_bits():
    arguments = problem(2, 200)
    transposed = replace(arguments, initial_state=arguments.initial_state.mT.contiguous(), state_v_first=True)
    for kernel in KERNELS:
        expected, actual = run_kernel(arguments, kernel), run_kernel(transposed, kernel)
        assert_same_bits(replace(actual, final_state=actual.final_state.mT), expected)


@pytest.mark.parametrize("dtype", HALF)
def test_large_initial_state(dtype):
    arguments = problem(2, 200, dtype=dtype)
    check_kernels(replace(arguments, initial_state=arguments.initial_state * 1e3))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("g", [0.0, -1e-3, -5.0, -20.0, -100.0, float("-inf")])
def test_gates_of_any_strength(g, normalise, dtype):
    arguments = problem(1, 200, dtype=dtype, use_qk_l2norm=normalise)
    arguments.g[:, 10] = g
    arguments.g[:, 100:140] = g
    check_kernels(arguments)


@pytest.mark.parametrize("normalise", [False, True])
def test_no_decay_at_all(normalise):
    arguments = problem(1, 300, use_qk_l2norm=normalise)
    check_kernels(replace(arguments, g=torch.zeros_like(arguments.g)))


def test_a_hard_reset_forgets_everything_before_it():
    """Bit for bit: e^-100 of anything finite is below what float32 adds to the rest."""
    arguments = problem(1, 200)
    arguments.g[:, 70] = float("-inf")
    before = {name: getattr(arguments, name).clone() for name in ("k", "v", "initial_state")}
    before["initial_state"].mul_(3)
    for name in ("k", "v"):
        before[name][:, :64] = before[name][:, :64].flip(1)
    for kernel in KERNELS:
        actual, expected = (run_kernel(x, kernel) for x in (replace(arguments, **before), arguments))
        assert torch.equal(actual.o[:, 70:], expected.o[:, 70:])
        assert torch.equal(actual.final_state, expected.final_state)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_equal_keys(beta, normalise, dtype):
    """At beta = 2 the inverse is 2 (-1)^(i - j) below its diagonal, everywhere: the largest that unit keys allow."""
    arguments = problem(1, 128, dtype=dtype, use_qk_l2norm=normalise)
    arguments.k[:] = arguments.k[:, :1].clone()
    arguments.beta.fill_(beta)
    check_kernels(arguments)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("gate_strength", [1.0, 0.01])
def test_nearly_parallel_keys(gate_strength, beta, normalise, dtype):
    """Angles of about 0.03 between keys. Under weak gates nothing fades, and errors of bfloat16 pass 0.1: of the
    yardstick, too.

    At beta = 2 the entries of the un-gated inverse are near 2 in size and cancel. Its merges, whose operands are
    float16, then count for more than its rounding to the input dtype where that is float16 too: the yardstick merges
    in the same way, and its error is up to four times that of an exact inverse.
    """
    arguments = problem(1, 128, dtype=dtype, use_qk_l2norm=normalise, gate_strength=gate_strength)
    keys = arguments.k[:, :1].float() + 0.03 * 128**-0.5 * torch.randn(arguments.k.shape).cuda()
    arguments.k.copy_(torch.nn.functional.normalize(keys, dim=-1))
    arguments.beta.fill_(beta)
    check_kernels(arguments, merge_dtype=torch.float16)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("gate_strength", [40.0, 100.0])
def test_long_keys_under_strong_gates(gate_strength, dtype):
    """|k| = 3: the un-gated inverse would overflow, the gated one does not."""
    arguments = problem(1, 300, dtype=dtype, gate_strength=gate_strength)
    check_kernels(replace(arguments, k=arguments.k * 3))


@pytest.mark.parametrize("normalise", [False, True])
def test_strided_inputs(normalise):
    arguments = problem(2, 200, use_qk_l2norm=normalise)
    strided = with_strided_inputs(arguments)
    assert strided.q.stride(1) > strided.q.shape[2] * strided.q.shape[3]
    for kernel in KERNELS:
        assert_same_bits(run_kernel(strided, kernel), run_kernel(arguments, kernel))


@pytest.mark.parametrize(
    ("kernel", "lengths", "state_v_first"),
    [
        ("roles 128", None, False),
        ("roles 128", [300, 1, 200], False),
        ("roles 64", [300, 1, 200], True),
        ("roles 32", None, False),
        ("scan 64", None, False),
        ("scan 64", [300, 1, 200], False),
        ("scan 64", [300, 1, 200], True),
        ("scan 128", None, False),
        ("scan 128", [300, 1, 200], False),
        ("scan 128", [300, 1, 200], True),
    ],
)
def test_pieces_are_the_whole_bit_for_bit(kernel, lengths, state_v_first):
    """The first sequence cut behind its second chunk; the second piece starts from the state that the first ends in."""
    arguments = problem(1, 300, lengths=lengths, state_v_first=state_v_first)
    whole = run_kernel(arguments, kernel)
    # The same tokens, ending where the piece ends: its final state is the state there, in float32.
    names = ("q", "k", "v", "g", "beta")
    prefix = {name: getattr(arguments, name)[:, :128] for name in names}
    cu_seqlens = None if lengths is None else torch.tensor([0, 128], dtype=torch.int32, device="cuda")
    initial_state = arguments.initial_state
    prefix = replace(arguments, **prefix, cu_seqlens=cu_seqlens, initial_state=initial_state[:1])
    state = run_kernel(prefix, kernel).final_state
    pieces = [(0, 0, 2), (0, 2, 5), (1, 0, 1), (2, 0, 4)][: 2 if lengths is None else 4]
    states = torch.cat([initial_state[:1], state, initial_state[1:]])
    assert_same_bits(run_pieces(replace(arguments, initial_state=states), kernel, pieces), whole)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("lengths", [None, [300, 1, 200]], ids=["batch", "packed"])
def test_blocks_of_the_scan_give_the_same_bits(lengths, normalise):
    """Rows of the transposed state do not depend on each other."""
    arguments = problem(1, 300, lengths=lengths, use_qk_l2norm=normalise, output_h=False)
    assert_same_bits(run_kernel(arguments, "scan 128"), run_kernel(arguments, "scan 64"))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [None, [300, 1, 200]], ids=["batch", "packed"])
def test_prepare_beside_the_scan_gives_the_same_bits(lengths, ratio, normalise):
    gates = {"A_log": torch.randn(2 * ratio).cuda(), "use_beta_sigmoid": True}
    arguments = problem(3, 300, 2, 2 * ratio, lengths=lengths, use_qk_l2norm=normalise, **gates)
    assert_same_bits(run_kernel(arguments, "scan 64 beside"), run_kernel(arguments, "scan 64"))


@pytest.mark.parametrize("num_programs", [1, 5, 124, 372])
def test_any_number_of_programs_beside_the_scan(num_programs):
    from tilecrew.gated_delta_rule import kernel_forward_scan

    arguments = problem(1, 2000)
    expected = run_kernel(arguments, "scan 64")
    schedule = Schedule("scan", 64, 64, "test", prepare_programs=num_programs)
    for _ in range(20):
        assert_same_bits(kernel_forward_scan.forward(arguments, schedule), expected)


def test_prepare_beside_the_scan_while_others_fill_the_gpu():
    """A large product on another stream: where programs land, and when, changes nothing."""
    arguments = problem(1, 4096, 16, 32, with_initial_state=False, output_h=False)
    expected = run_kernel(arguments, "scan 64")
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    other = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(other):
            x @ x
        assert_same_bits(run_kernel(arguments, "scan 64 beside"), expected)
    other.synchronize()


def test_the_schedule_puts_prepare_beside_the_scan():
    """Through the public function: first call, plan, and graph, with other values."""
    arguments = problem(1, 1000, 16, 32, output_h=False, with_initial_state=False)
    inputs = (arguments.q, arguments.k, arguments.v, arguments.g, arguments.beta)
    options = {"output_final_state": True}
    assert explain_chunk_gated_delta_rule(*inputs, **options).prepare_programs > 0
    expected = run_kernel(arguments, "scan 64")
    for _ in range(4):
        o, final_state = chunk_gated_delta_rule(*inputs, **options)
        assert torch.equal(o, expected.o)
        assert torch.equal(final_state, expected.final_state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final_state = chunk_gated_delta_rule(*inputs, **options)
    for seed in range(1, 12):
        other = problem(1, 1000, 16, 32, seed=seed)
        for name in ("q", "k", "v", "g", "beta"):
            getattr(arguments, name).copy_(getattr(other, name))
        expected = run_kernel(arguments, "scan 64")
        o.fill_(float("nan"))
        graph.replay()
        assert torch.equal(o, expected.o)
        assert torch.equal(final_state, expected.final_state)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("normalise", [False, True])
def test_hundred_runs_give_the_same_bits(normalise, kernel):
    arguments = problem(lengths=[300, 1, 1000, 64, 700] * 8, tail=3, use_qk_l2norm=normalise)
    first = run_kernel(arguments, kernel)
    for _ in range(100):
        assert_same_bits(run_kernel(arguments, kernel), first)


@pytest.mark.parametrize("kernel", KERNELS)
def test_cuda_graph_replays_with_other_values_and_lengths(kernel):
    arguments = problem(lengths=[300, 1, 200], tail=11, use_qk_l2norm=True)
    run_kernel(arguments, kernel)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_kernel(arguments, kernel)
    for seed, bounds in enumerate(([0, 300, 301, 501], [0, 0, 64, 512]), start=1):
        other = problem(lengths=[300, 1, 200], tail=11, seed=seed)
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            getattr(arguments, name).copy_(getattr(other, name))
        arguments.cu_seqlens.copy_(torch.tensor(bounds))
        expected = run_kernel(arguments, kernel)
        for x in filter(torch.is_tensor, vars(captured).values()):
            x.fill_(float("nan"))
        graph.replay()
        assert_same_bits(captured, expected)


@LARGE_MEMORY
@pytest.mark.parametrize("kernel", ["roles 64", "scan 64", "scan 128"])
def test_more_programs_than_a_grid_dimension_of_65535(kernel):
    """2,100 sequences of 32 heads; states are checked for the last sequences, which the highest programs serve."""
    lengths = [1 + n % 3 for n in range(2100)]
    options = {"use_qk_l2norm": True, "output_h": False, "with_initial_state": False}
    arguments = problem(1, 1, 32, 32, lengths=lengths, **options)
    actual = run_kernel(arguments, kernel)
    light = replace(arguments, output_final_state=False)
    expected = reference.recurrent_gated_delta_rule(as_float64(light))
    check_result(light, replace(actual, final_state=None), expected, rounded_chunks(light))
    start = int(arguments.cu_seqlens[-4])
    last = {name: getattr(arguments, name)[:, start:] for name in ("q", "k", "v", "g", "beta")}
    last = replace(arguments, **last, cu_seqlens=arguments.cu_seqlens[-4:] - start)
    actual = replace(actual, o=actual.o[:, start:], final_state=actual.final_state[-3:])
    expected = reference.recurrent_gated_delta_rule(as_float64(last))
    check_result(last, actual, expected, rounded_chunks(last))


@LARGE_MEMORY
@pytest.mark.parametrize("kernel", ["roles 64", "scan 64", "scan 128"])
def test_input_offsets_past_2_to_31(kernel):
    arguments = problem(1, 100, output_h=False)
    expected = run_kernel(arguments, kernel)
    assert_same_bits(run_kernel(spread_over_more_than_2_to_31_elements(arguments), kernel), expected)


@LARGE_MEMORY
@pytest.mark.parametrize("kernel", ["roles 128", "scan 64", "scan 128"])
def test_value_output_and_state_offsets_past_2_to_31(kernel):
    """2**31 elements and more of v, o and h: every value head has the same inputs, and must have the same outputs."""
    num_tokens, num_value_heads = 2**17 + 70, 128
    small = problem(1, num_tokens, 1, 1, with_initial_state=False, use_qk_l2norm=True)
    g, beta = (x.expand(-1, -1, num_value_heads) for x in (small.g, small.beta))
    wide = replace(small, v=small.v.expand(-1, -1, num_value_heads, -1).contiguous(), g=g, beta=beta)
    actual, expected = run_kernel(wide, kernel), run_kernel(small, kernel)
    assert wide.v.numel() > 2**31
    for name, head_dim in (("o", 2), ("final_state", 1), ("h", 2))[: 2 + has_h(kernel)]:
        x = getattr(actual, name)
        assert name == "final_state" or x.numel() > 2**31
        first_head = x.narrow(head_dim, 0, 1)
        error = relative_error(first_head, getattr(expected, name), head_dim)
        assert error < FLOOR[torch.bfloat16], f"{name}: {error:.3g}{not_finite(first_head)}"
        assert torch.equal(x, first_head.expand_as(x)), name


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("lengths", [None, [1, 64, 0, 65, 129]], ids=["batch", "packed"])
def test_public_function(lengths, dtype):
    a_log, dt_bias = torch.randn(2, 4).cuda()
    gates = {"A_log": a_log, "dt_bias": dt_bias, "use_beta_sigmoid": True, "use_qk_l2norm": True}
    tail = 7 if lengths else 0
    arguments = problem(2, 200, dtype=dtype, lengths=lengths, tail=tail, normalised=False, scale=0.3, **gates)
    inputs = {name: getattr(arguments, name) for name in ("q", "k", "v", "g", "beta", "scale", "initial_state")}
    options = {
        "cu_seqlens": arguments.cu_seqlens,
        "output_final_state": True,
        "output_h": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": a_log,
        "dt_bias": dt_bias,
    }
    schedule = explain_chunk_gated_delta_rule(**inputs, **options)
    chosen = schedule.implementation
    assert chosen == ("scan" if dtype == torch.bfloat16 else "roles")
    roles_block = explain_chunk_gated_delta_rule(**inputs, **options, implementation="roles").block_v
    beside = " beside" if schedule.prepare_programs else ""
    kernels = {chosen: f"{chosen} {schedule.block_v}{beside}", "roles": f"roles {roles_block}"}
    for implementation in (None, chosen, "roles"):
        expected = run_kernel(arguments, kernels[implementation or chosen])
        results = chunk_gated_delta_rule(**inputs, **options, implementation=implementation)
        for x, y in zip(results, (expected.o, expected.final_state, expected.h), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("implementation", ["scan", "roles"])
@pytest.mark.parametrize("lengths", [None, [0, 0]], ids=["batch", "packed"])
def test_no_token(lengths, implementation):
    arguments = problem(2, 0, lengths=lengths)
    inputs = (arguments.q, arguments.k, arguments.v, arguments.g, arguments.beta)
    o, final_state = chunk_gated_delta_rule(
        *inputs,
        initial_state=arguments.initial_state,
        output_final_state=True,
        cu_seqlens=arguments.cu_seqlens,
        implementation=implementation,
    )
    assert o.shape == arguments.v.shape
    assert torch.equal(final_state, arguments.initial_state)


def test_no_token_of_the_batch_belongs_to_a_sequence():
    arguments = with_nan_tail(problem(lengths=[0, 0, 0], tail=130, use_qk_l2norm=True))
    for kernel in KERNELS:
        actual = run_kernel(arguments, kernel)
        assert not actual.o.any()
        assert actual.h is None or not actual.h.any()
        assert torch.equal(actual.final_state, arguments.initial_state)


@pytest.mark.parametrize("kernel", KERNELS)
def test_error_is_that_of_the_rounding(kernel):
    """A figure to notice a loss of precision by: the error of bfloat16 outputs is about 2^-8."""
    arguments = problem(2, 1000, use_qk_l2norm=True)
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    assert relative_error(run_kernel(arguments, kernel).o, expected.o) < 2**-7
