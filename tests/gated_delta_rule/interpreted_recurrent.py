"""The decode kernel under Triton's interpreter: run by test_recurrent.py. float16 and float32: the interpreter rounds
to bfloat16 towards zero."""

from dataclasses import replace

import pytest
import torch

from tests import interpreter
from tests.gated_delta_rule.kernel_checks import EVERY_GATE, check_recurrent, random_recurrent_arguments
from tilecrew.gated_delta_rule import kernel_recurrent

interpreter.allow_loop_bounds()


@pytest.fixture(autouse=True)
def nan_filled_outputs(monkeypatch):
    interpreter.fill_empty_with_nan(monkeypatch)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dim", [16, 20, 64, 96, 128, 256])
def test_head_sizes(dim, state_v_first):
    sizes = {"num_sequences": 2, "num_tokens": 1, "heads": (1, 1), "dims": (dim, dim)}
    check_recurrent(random_recurrent_arguments(**sizes, state_v_first=state_v_first, output_final_state=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_dtypes_and_numbers_of_tokens(dtype, num_tokens):
    options = {"dtype": dtype, "output_final_state": True, "use_qk_l2norm": True}
    check_recurrent(random_recurrent_arguments(2, num_tokens, (1, 2), (16, 24), **options))


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (1, 3)])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_every_gate(heads, state_v_first, num_tokens):
    flags = {
        "gates": EVERY_GATE,
        "use_beta_sigmoid": True,
        "allow_neg_eigval": True,
        "use_qk_l2norm": True,
        "state_v_first": state_v_first,
    }
    check_recurrent(random_recurrent_arguments(2, num_tokens, heads, (20, 16), output_final_state=True, **flags))


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_no_gate_no_beta_no_state(num_tokens):
    arguments = random_recurrent_arguments(2, num_tokens, dims=(16, 16), gates=())
    arguments = replace(arguments, beta=None, initial_state=None)
    check_recurrent(arguments)
    check_recurrent(replace(arguments, output_final_state=True))


def test_hard_reset():
    arguments = random_recurrent_arguments(2, 3, dims=(16, 16), output_final_state=True)
    arguments.g[:, 1] = float("-inf")
    check_recurrent(arguments)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_pool_in_place_and_out_of_place(num_tokens, state_v_first):
    options = {"pool": [3, -1, 0], "state_v_first": state_v_first}
    arguments = random_recurrent_arguments(3, num_tokens, (1, 2), (16, 20), output_final_state=True, **options)
    check_recurrent(arguments)
    o, final_state = kernel_recurrent.forward(arguments)
    assert not o[1].any()
    assert not final_state[1].any()

    in_place = replace(arguments, initial_state=arguments.initial_state.clone(), inplace_state=True)
    o_in_place, pool = kernel_recurrent.forward(in_place)
    assert torch.equal(o_in_place, o)
    assert torch.equal(pool[[3, 0]], final_state[[0, 2]])
    check_recurrent(replace(arguments, inplace_state=True))


def test_a_padded_sequence_reads_nothing():
    arguments = random_recurrent_arguments(3, 1, dims=(16, 16), pool=[2, -7, 1], output_final_state=True)
    for x in (arguments.q, arguments.k, arguments.v, arguments.g, arguments.beta):
        x[1] = float("nan")
    arguments.initial_state[[0, 3]] = float("nan")
    o, final_state = kernel_recurrent.forward(arguments)
    assert not o[1].any()
    assert not final_state[1].any()
    assert o.isfinite().all()
    assert final_state.isfinite().all()


@pytest.mark.parametrize("pool", [None, [4, -1, 2, 0, -1]])
def test_packed_sequences_with_a_tail(pool):
    options = {"lengths": [2, 1, 0, 3, 1], "tail": 4, "pool": pool, "output_final_state": True}
    arguments = random_recurrent_arguments(heads=(1, 2), dims=(16, 40), **options)
    for x in (arguments.q, arguments.k, arguments.v, arguments.g, arguments.beta):
        x[:, 7:] = float("nan")
    check_recurrent(arguments)
    o, _ = kernel_recurrent.forward(arguments)
    assert not o[:, 7:].any()


def test_strided_inputs():
    arguments = random_recurrent_arguments(2, 2, (1, 2), (16, 24), output_final_state=True)
    packed = torch.cat([x.flatten(2) for x in (arguments.q, arguments.k, arguments.v)], -1)
    q, k, v = packed.split([16, 16, 48], -1)
    g = torch.stack([arguments.g, torch.full_like(arguments.g, float("nan"))], -1)[..., 0]
    state = torch.stack([arguments.initial_state, torch.full_like(arguments.initial_state, float("nan"))], 1)[:, 0]
    check_recurrent(
        replace(
            arguments,
            q=q.unflatten(-1, (1, 16)),
            k=k.unflatten(-1, (1, 16)),
            v=v.unflatten(-1, (2, 24)),
            g=g,
            initial_state=state,
        )
    )


def test_in_place_needs_a_state():
    arguments = replace(random_recurrent_arguments(1, 1, dims=(16, 16), inplace_state=True), initial_state=None)
    with pytest.raises(ValueError, match="inplace_state needs an initial_state"):
        kernel_recurrent.forward(arguments)
