"""The table of pieces and the combination of their ends under Triton's interpreter: run by test_context_parallel.py."""

from dataclasses import replace

import pytest
import torch

from tests import interpreter
from tests.gated_delta_rule.pieces_checks import assert_is_table, expected_table
from tilecrew.gated_delta_rule import context_parallel, kernel_combine
from tilecrew.testing import random_arguments, relative_error

interpreter.allow_loop_bounds()
PACKED = [
    ([300, 0, 100], 0),
    ([0, 0, 1], 63),
    ([63, 64, 65, 0, 1, 640], 5),
    ([1] * 300, 1000),
    ([], 200),
    ([0], 0),
]


@pytest.mark.parametrize("chunks_per_piece", [1, 2, 3, 7])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 640, 1000])
def test_table_of_a_batch(num_tokens, chunks_per_piece):
    arguments = random_arguments(3, num_tokens, 1, 1, 16, 16)
    plan = context_parallel.plan(arguments, chunks_per_piece)
    assert plan.num_rows == len(expected_table(arguments, chunks_per_piece))
    assert_is_table(context_parallel.table(arguments, plan), arguments, chunks_per_piece)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("chunks_per_piece", [1, 2, 3, 7])
@pytest.mark.parametrize(("lengths", "tail"), PACKED)
def test_table_of_a_packed_batch(lengths, tail, chunks_per_piece, index_dtype):
    arguments = random_arguments(1, 0, 1, 1, 16, 16, lengths=lengths, tail=tail)
    arguments = replace(arguments, cu_seqlens=arguments.cu_seqlens.to(index_dtype))
    plan = context_parallel.plan(arguments, chunks_per_piece)
    assert_is_table(context_parallel.table(arguments, plan), arguments, chunks_per_piece)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("with_initial_state", [False, True])
@pytest.mark.parametrize("lengths", [None, [130, 0, 64, 450]])
def test_combination(lengths, with_initial_state, state_v_first):
    """Random ends in float64; NaN where kernel_states computes nothing."""
    options = {"with_initial_state": with_initial_state, "state_v_first": state_v_first}
    arguments = random_arguments(2, 450, 1, 2, lengths=lengths, tail=100, **options)
    plan = context_parallel.plan(arguments, 2)
    ends = torch.full((plan.num_rows, 2, 2, 128, 128), float("nan"))
    states = torch.full((plan.num_rows, 2, 128, 128), float("nan"))
    expected = states.double()
    table = expected_table(arguments, 2)
    for row, (sequence, first, _) in table.items():
        if first == 0:
            state = torch.zeros(2, 128, 128).double()
            if with_initial_state:
                state = arguments.initial_state[sequence].double()
                state = state if state_v_first else state.mT
        expected[row] = state if state_v_first else state.mT
        if table.get(row + 1, (None,))[0] == sequence:
            ends[row, :, 0] = torch.randn(2, 128, 128)
            state_in, state = state, ends[row, :, 0].double()
            if first > 0 or with_initial_state:
                ends[row, :, 1] = torch.randn(2, 128, 128) * 128**-0.5
                state = state + state_in @ ends[row, :, 1].double()
    kernel_combine.launch(arguments, plan, ends, states).run()
    rows = sorted(table)
    for row in rows:
        assert relative_error(states[row], expected[row], 0) <= 1e-6
    unused = [row for row in range(plan.num_rows) if row not in table]
    assert states[unused].isnan().all()


def test_no_sequences():
    arguments = random_arguments(1, 0, 1, 1, lengths=[], tail=200)
    plan = context_parallel.plan(arguments, 2)
    assert plan.num_rows == 0
    assert kernel_combine.launch(arguments, plan, torch.empty(0), torch.empty(0)).num_programs == 0
