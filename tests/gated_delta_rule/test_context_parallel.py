"""Context parallelism: plans in Python, the kernels in plain Triton under the interpreter, kernel_states in the
simulator, and everything together on a GPU. Truth is the token recurrence in float64."""

import types
from dataclasses import replace

import pytest
import torch

from tests.gated_delta_rule.kernel_checks import assert_within, with_nan_tail
from tests.gated_delta_rule.pieces_checks import (
    assert_is_table,
    expected_table,
    piece_arguments,
    states_before,
    transition_arguments,
)
from tests.gated_delta_rule.yardsticks import rounded_chunks
from tests.interpreter import run_interpreted
from tilecrew import chunk_gated_delta_rule, explain_chunk_gated_delta_rule
from tilecrew.gated_delta_rule import reference
from tilecrew.gated_delta_rule.arguments import ForwardResult
from tilecrew.gated_delta_rule.pieces import plan_pieces
from tilecrew.gated_delta_rule.schedule import Schedule
from tilecrew.testing import as_float64, random_arguments

BF16 = torch.bfloat16
PACKED = {"lengths": [70, 0, 200, 64], "tail": 70}
GATES = {
    "use_beta_sigmoid": True,
    "A_log": torch.tensor([0.3, -0.5, 0.0, 0.1]),
    "dt_bias": torch.tensor([0.1, 1.0, 0.5, 0.0]),
}
needs_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0 (Hopper)",
    ),
]


@pytest.mark.parametrize(
    ("num_tokens", "chunks_per_piece", "num_rows"), [(0, 4, 2), (1, 4, 2), (256, 4, 2), (257, 4, 4), (32768, 32, 32)]
)
def test_pieces_of_a_batch(num_tokens, chunks_per_piece, num_rows):
    assert plan_pieces(2, num_tokens, chunks_per_piece, is_packed=False).num_rows == num_rows


def test_ctas():
    plan = plan_pieces(1, 32768, 32, is_packed=False)
    assert plan.num_states_ctas(8, has_initial_state=False) == 8 * (15 + 14)
    assert plan.num_states_ctas(8, has_initial_state=True) == 8 * 30
    assert plan.num_scan_ctas(8, block_v=128) == 128
    assert plan_pieces(3, 64, 1, is_packed=False).num_states_ctas(8, has_initial_state=False) == 0
    assert plan_pieces(0, 640, 1, is_packed=True).num_rows == 0
    assert plan_pieces(2, 640, 2, is_packed=True).num_rows == 7


def test_a_piece_has_a_chunk():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        plan_pieces(1, 100, 0, is_packed=False)


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("gated_delta_rule/interpreted_context_parallel.py")


def python_table(arguments, chunks_per_piece, num_rows):
    """What kernel_pieces writes."""
    pieces = torch.tensor([[0, -1, -1]], dtype=torch.int32).repeat(num_rows, 1)
    for row, piece in expected_table(arguments, chunks_per_piece).items():
        pieces[row] = torch.tensor(piece)
    return pieces


def simulated_prepare(arguments, o):
    """A_g, factors and scores of short keys; NaN where the prepare kernel wrote nothing."""
    from tilecrew.gated_delta_rule import kernel_prepare
    from tilecrew.simulator.run import simulate

    prepared = kernel_prepare.allocate_gated(arguments)
    for x in (prepared.inverse, prepared.factors, prepared.scores):
        x.fill_(float("nan"))
    simulate(kernel_prepare.launch(arguments, prepared, o))
    return prepared


def simulated_ends(arguments, chunks_per_piece, history_tolerance=0.0, num_seeds=2):
    """Ends of every piece, of the simulated kernels; NaN where they wrote nothing."""
    pytest.importorskip("triton")
    from tests.simulator.conftest import run_under_seeds
    from tilecrew.gated_delta_rule import context_parallel, kernel_states

    plan = context_parallel.plan(arguments, chunks_per_piece)
    pieces = python_table(arguments, chunks_per_piece, plan.num_rows)
    prepared = simulated_prepare(arguments, torch.empty_like(arguments.v))
    ends = kernel_states.allocate(arguments, plan.num_rows)
    launch = kernel_states.launch(arguments, prepared, pieces, ends, history_tolerance)
    run_under_seeds(launch, [ends], num_seeds)
    return ends


def check_ends(arguments, chunks_per_piece, ends):
    """h and M of every piece that needs them, and NaN in all others."""
    table = expected_table(arguments, chunks_per_piece)
    for row in range(ends.shape[0]):
        is_inner = row in table and table.get(row + 1, (None,))[0] == table[row][0]
        is_start = row in table and table[row][1] == 0 and arguments.initial_state is None
        for index, is_written in ((0, is_inner), (1, is_inner and not is_start)):
            if not is_written:
                assert ends[row, :, index].isnan().all(), (row, index)
                continue
            piece = piece_arguments(arguments, table[row])
            piece = transition_arguments(piece) if index == 1 else piece
            exact = reference.recurrent_gated_delta_rule(as_float64(piece)).final_state
            yardstick = rounded_chunks(piece).final_state
            assert_within(ends[row, :, index].mT, exact[0], yardstick[0], 0, BF16, f"row {row}, {index}")


def check_states(arguments, chunks_per_piece, states):
    """The state before every piece; its error may be twice that of the chunk form's state there, plus the floor."""
    exact = states_before(as_float64(arguments), chunks_per_piece, reference.recurrent_gated_delta_rule)
    yardsticks = states_before(arguments, chunks_per_piece, rounded_chunks)
    for row, yardstick in yardsticks.items():
        actual = states[row].mT if arguments.state_v_first else states[row]
        assert_within(actual, exact[row][0], yardstick[0], 0, BF16, f"state before row {row}")


@pytest.mark.parametrize(
    ("num_tokens", "chunks_per_piece", "options"),
    [
        (321, 2, {"use_qk_l2norm": True, "normalised": False}),
        (128, 1, {"with_initial_state": True}),
        (0, 1, {**PACKED, "with_initial_state": True}),
        (450, 6, {"with_initial_state": True, "use_qk_l2norm": True}),  # more chunks than the ring has stages
    ],
)
def test_ends_in_the_simulator(num_tokens, chunks_per_piece, options):
    arguments = random_arguments(1, num_tokens, 1, 1, dtype=BF16, **options)
    if arguments.cu_seqlens is not None:
        arguments = with_nan_tail(arguments)
    check_ends(arguments, chunks_per_piece, simulated_ends(arguments, chunks_per_piece))


def test_heads_and_combination_in_the_simulator():
    """Two value heads of one key head in two batch rows, and the recurrence over pieces in float64."""
    arguments = random_arguments(2, 129, 1, 2, dtype=BF16, with_initial_state=True)
    ends = simulated_ends(arguments, 1, num_seeds=1)
    check_ends(arguments, 1, ends)
    states = torch.zeros(6, 2, 128, 128, dtype=torch.float64)
    combine(arguments, 1, ends, states)
    check_states(arguments, 1, states)


def combine(arguments, chunks_per_piece, ends, states):
    """What kernel_combine writes, in the precision of the states."""
    table = expected_table(arguments, chunks_per_piece)
    for row, (sequence, first, _) in table.items():
        if first == 0 and arguments.initial_state is None:
            states[row] = 0
        elif first == 0:
            state = arguments.initial_state[sequence]
            states[row] = state.mT if arguments.state_v_first else state
        else:
            h, M = ends[row - 1].to(states.dtype).mT.unbind(1)
            # M of a first piece from zeros is not computed
            is_from_zeros = table[row - 1][1] == 0 and arguments.initial_state is None
            states[row] = h if is_from_zeros else h + M @ states[row - 1]
    if arguments.state_v_first:
        states.copy_(states.mT.clone())


@pytest.mark.parametrize("state_v_first", [False, True])
def test_a_whole_forward_in_pieces_in_the_simulator(state_v_first, monkeypatch):
    """Gluon launches run in the simulator; the kernels in plain Triton, which it does not know, in Python."""
    pytest.importorskip("triton")
    from tests.gated_delta_rule.hopper_checks import check_result
    from tilecrew.device.launch import Launch
    from tilecrew.gated_delta_rule import context_parallel, kernel_combine, kernel_forward_scan
    from tilecrew.simulator.run import simulate

    options = {"lengths": [200, 0, 130], "tail": 5, "output_final_state": True, "output_h": True}
    arguments = random_arguments(
        1, 0, 1, 1, dtype=BF16, use_qk_l2norm=True, normalised=False, state_v_first=state_v_first, **options
    )
    monkeypatch.setattr(Launch, "run", lambda launch: simulate(launch))
    monkeypatch.setattr(context_parallel, "table", lambda x, plan: python_table(x, 2, plan.num_rows))
    monkeypatch.setattr(
        kernel_combine,
        "launch",
        lambda x, plan, ends, states: types.SimpleNamespace(run=lambda: combine(x, 2, ends, states)),
    )
    result = kernel_forward_scan.forward(arguments, Schedule("scan", 64, 64, "test", chunks_per_piece=2))
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    check_result(arguments, result, expected, rounded_chunks(arguments))


def test_history_below_the_tolerance_is_dropped():
    """Pieces of two chunks; the gates of the second piece alone multiply to less than the tolerance."""
    arguments = random_arguments(1, 385, 1, 1, dtype=BF16, with_initial_state=True)
    arguments.g[:] = -1e-3
    arguments.g[:, 130] = -7.0
    exact = simulated_ends(arguments, 2, num_seeds=1)
    check_ends(arguments, 2, exact)
    dropped = simulated_ends(arguments, 2, history_tolerance=1e-3, num_seeds=2)
    assert not dropped[1, :, 1].any()
    assert exact[1, 0, 1].norm(2) < 1e-3 * 128**0.5
    dropped[1, :, 1] = exact[1, :, 1]
    assert torch.equal(dropped.nan_to_num(nan=-7e33), exact.nan_to_num(nan=-7e33))


def test_the_scan_takes_unused_rows_and_sequences_without_tokens():
    """Simulated scan over a packed table, from the states that the recurrence has before each piece."""
    pytest.importorskip("triton")
    from tests.gated_delta_rule.hopper_checks import check_result
    from tilecrew.gated_delta_rule import context_parallel, kernel_forward_roles, kernel_forward_scan
    from tilecrew.simulator.run import simulate

    arguments = random_arguments(
        1, 0, 1, 1, dtype=BF16, lengths=[0, 70, 0, 200], tail=70, with_initial_state=True, output_final_state=True
    )
    plan = context_parallel.plan(arguments, 2)
    states = torch.full((plan.num_rows, 1, 128, 128), float("nan"))
    for row, state in states_before(as_float64(arguments), 2, reference.recurrent_gated_delta_rule).items():
        states[row] = state[0]
    assert states.isnan().any()
    result = kernel_forward_roles.allocate_result(arguments)
    result.final_state.fill_(float("nan"))
    prepared = simulated_prepare(arguments, result.o.fill_(float("nan")))
    cut = replace(arguments, initial_state=states)
    simulate(kernel_forward_scan.launch(cut, prepared, result, 64, python_table(arguments, 2, plan.num_rows)))
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    check_result(arguments, result, expected, rounded_chunks(arguments))
    assert torch.equal(result.final_state[[0, 2]], arguments.initial_state[[0, 2]])


# ---- on a GPU ----


def run_in_pieces(arguments, chunks_per_piece, history_tolerance=0.0, block_v=64):
    """Prepare, ends, combination and the scan of all pieces: (result, states before the pieces, table)."""
    from tilecrew.gated_delta_rule import context_parallel, kernel_forward_roles, kernel_forward_scan, kernel_prepare

    result = kernel_forward_roles.allocate_result(arguments)
    prepared = kernel_prepare.run_gated(arguments, result.o)
    plan = context_parallel.plan(arguments, chunks_per_piece)
    pieces = context_parallel.table(arguments, plan)
    states = context_parallel.input_states(arguments, prepared, plan, pieces, history_tolerance)
    pieces_arguments = replace(arguments, initial_state=states)
    kernel_forward_scan.launch(pieces_arguments, prepared, result, block_v, pieces).run()
    return result, states, pieces


def check_in_pieces(arguments, chunks_per_piece, block_v=64):
    from tests.gated_delta_rule.hopper_checks import check_result

    result, states, pieces = run_in_pieces(arguments, chunks_per_piece, block_v=block_v)
    assert_is_table(pieces, arguments, chunks_per_piece)
    check_states(arguments, chunks_per_piece, states)
    expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
    check_result(arguments, result, expected, rounded_chunks(arguments))


PUBLIC = {
    "plain": {},
    "initial state": {"with_initial_state": True},
    "h": {"with_initial_state": True, "output_h": True},
    "V first": {"with_initial_state": True, "state_v_first": True, "use_qk_l2norm": True, "normalised": False},
    "packed": {"lengths": [9000, 0, 8001], "tail": 70, "output_h": True, "use_qk_l2norm": True},
    "packed, V first": {"lengths": [0, 12000], "with_initial_state": True, "state_v_first": True},
}


def call_of(arguments, **changes):
    names = ("q", "k", "v", "g", "beta", "scale", "initial_state", "cu_seqlens", "state_v_first", "output_h")
    call = {name: getattr(arguments, name) for name in names}
    return call | {"output_final_state": True, "use_qk_l2norm_in_kernel": arguments.use_qk_l2norm, **changes}


def gpu_problem(*sizes, **options):
    options = {name: value.cuda() if torch.is_tensor(value) else value for name, value in options.items()}
    return random_arguments(*sizes, dtype=BF16, device="cuda", output_final_state=True, **options)


class TestOnAGpu:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("chunks_per_piece", [1, 3, 100])
    @pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1000])
    @pytest.mark.parametrize("with_initial_state", [False, True])
    def test_numbers_of_tokens(self, with_initial_state, num_tokens, chunks_per_piece):
        check_in_pieces(gpu_problem(2, num_tokens, with_initial_state=with_initial_state), chunks_per_piece)

    @pytest.mark.parametrize("chunks_per_piece", [1, 2, 5])
    @pytest.mark.parametrize("state_v_first", [False, True])
    @pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
    def test_packed(self, index_dtype, state_v_first, chunks_per_piece):
        options = {"with_initial_state": True, "state_v_first": state_v_first, "output_h": True}
        lengths = [1, 64, 0, 65, 700, 129]
        arguments = with_nan_tail(gpu_problem(1, 0, 2, 4, lengths=lengths, tail=300, **options))
        check_in_pieces(replace(arguments, cu_seqlens=arguments.cu_seqlens.to(index_dtype)), chunks_per_piece)

    def test_packed_without_an_initial_state(self):
        check_in_pieces(gpu_problem(1, 0, 1, 2, lengths=[0, 300, 64, 1000], tail=3), 2)

    @pytest.mark.parametrize("block_v", [64, 128])
    @pytest.mark.parametrize("state_v_first", [False, True])
    def test_norms_and_gates_inside(self, state_v_first, block_v):
        options = {"use_qk_l2norm": True, "normalised": False, "with_initial_state": True, **GATES}
        check_in_pieces(gpu_problem(1, 1500, 2, 4, state_v_first=state_v_first, **options), 4, block_v)

    @pytest.mark.parametrize("g", [0.0, -1e-3, -5.0, -100.0, float("-inf")])
    def test_gates_of_any_strength(self, g):
        arguments = gpu_problem(1, 700, with_initial_state=True)
        arguments.g[:, 10] = g
        arguments.g[:, 200:340] = g
        check_in_pieces(arguments, 2)

    def test_long_and_without_decay(self):
        arguments = gpu_problem(1, 4096, 1, 2, with_initial_state=True)
        check_in_pieces(replace(arguments, g=torch.zeros_like(arguments.g)), 4)

    def test_hundred_runs_give_the_same_bits(self):
        arguments = gpu_problem(1, 2000, 2, 8, use_qk_l2norm=True)
        first, states, _ = run_in_pieces(arguments, 4)
        for _ in range(100):
            again, again_states, _ = run_in_pieces(arguments, 4)
            assert torch.equal(again.o, first.o)
            assert torch.equal(again.final_state, first.final_state)
            assert torch.equal(again_states, states)

    def test_dropped_history_stays_within_the_tolerance(self):
        arguments = gpu_problem(1, 2000, 2, 4, with_initial_state=True, gate_strength=2.0)
        _, exact, _ = run_in_pieces(arguments, 2)
        for tolerance in (1e-6, 1e-3, 0.5):
            _, states, _ = run_in_pieces(arguments, 2, tolerance)
            # Of the state before each piece: what is lost passes through later pieces, which shrink it.
            assert (states - exact).norm(dim=(-2, -1)).max() <= 2 * tolerance * exact.norm(dim=(-2, -1)).max()
        assert not torch.equal(states, exact)

    def test_cuda_graph_replays_with_other_lengths(self):
        arguments = gpu_problem(1, 0, 1, 2, lengths=[300, 1, 700], tail=11, with_initial_state=True)
        run_in_pieces(arguments, 2)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _, _ = run_in_pieces(arguments, 2)
        for bounds in ([0, 300, 301, 1001], [0, 0, 640, 1012]):
            arguments.cu_seqlens.copy_(torch.tensor(bounds))
            expected, _, _ = run_in_pieces(arguments, 2)
            for x in (captured.o, captured.final_state):
                x.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured.o, expected.o)
            assert torch.equal(captured.final_state, expected.final_state)

    @pytest.mark.parametrize("name", PUBLIC)
    def test_public_function(self, name):
        """Against float64, and the same bits from calls that are repeated by a plan, and from a graph."""
        from tests.gated_delta_rule.hopper_checks import check_result

        num_tokens = 0 if "lengths" in PUBLIC[name] else 8000
        arguments = gpu_problem(1, num_tokens, 2, 4, **PUBLIC[name])
        if arguments.cu_seqlens is not None:
            arguments = with_nan_tail(arguments)
        call = call_of(arguments)
        schedule = explain_chunk_gated_delta_rule(**call)
        assert schedule.implementation == "scan"
        assert schedule.chunks_per_piece > 0
        first = chunk_gated_delta_rule(**call)
        expected = reference.recurrent_gated_delta_rule(as_float64(arguments))
        result = ForwardResult(*first) if arguments.output_h else ForwardResult(*first, None)
        check_result(arguments, result, expected, rounded_chunks(arguments))
        for _ in range(4):
            assert all(torch.equal(x, y) for x, y in zip(chunk_gated_delta_rule(**call), first, strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chunk_gated_delta_rule(**call)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, first, strict=True))

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_repeated_calls_in_pieces_are_a_plan(self, mode):
        from tilecrew.gated_delta_rule import operators

        operators.PLANS.clear()
        for seed in range(3):
            call = call_of(gpu_problem(1, 8000, 2, 4, seed=seed))
            with mode():
                results = chunk_gated_delta_rule(**call)
        assert operators.PLANS.num_plans == 1
        operators.PLANS.clear()
        for x, y in zip(chunk_gated_delta_rule(**call), results, strict=True):
            assert torch.equal(x, y)

    def test_public_history_tolerance(self):
        """Nothing is lost at 0, and below the tolerance else; o follows the states that it is read from."""
        call = call_of(gpu_problem(1, 8000, 2, 4, with_initial_state=True, gate_strength=0.3))
        exact, _ = chunk_gated_delta_rule(**call)
        assert torch.equal(chunk_gated_delta_rule(**call, history_tolerance=0.0)[0], exact)
        for tolerance in (1e-6, 1e-3):
            o, _ = chunk_gated_delta_rule(**call, history_tolerance=tolerance)
            assert (o - exact).norm() <= max(4 * tolerance, 1e-3) * exact.norm()
