"""The portable forward under Triton's interpreter: run by test_portable.py. float16 and float32: the interpreter
computes products of bfloat16 wrongly."""

import pytest
import torch

from tests import interpreter
from tests.gated_delta_rule.kernel_checks import (
    check_portable,
    run_portable,
    with_nan_tail,
    with_strided_inputs,
)
from tilecrew.testing import random_arguments

interpreter.allow_loop_bounds()
EVERYTHING = {"with_initial_state": True, "output_final_state": True, "output_h": True}


@pytest.fixture(autouse=True)
def nan_filled_outputs(monkeypatch):
    interpreter.fill_empty_with_nan(monkeypatch)


@pytest.mark.parametrize("dim", [16, 20, 64, 96, 128, 256])
def test_head_sizes(dim):
    check_portable(random_arguments(1, 65, 1, 1, dim, dim, dtype=torch.float16, **EVERYTHING))


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_chunk_sizes(chunk_size, dtype):
    check_portable(random_arguments(1, 70, 1, 2, 32, 24, dtype=dtype, chunk_size=chunk_size, **EVERYTHING))


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 63, 64, 65, 100])
def test_numbers_of_tokens(num_tokens):
    check_portable(random_arguments(2, num_tokens, 1, 1, 16, 16, **EVERYTHING))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_packed_sequences_with_nan_in_the_tail(index_dtype, chunk_size):
    arguments = random_arguments(
        num_heads=1,
        num_value_heads=1,
        key_dim=16,
        value_dim=20,
        lengths=[1, 64, 0, 65, 129],
        tail=21,
        chunk_size=chunk_size,
        **EVERYTHING,
    )
    arguments = with_nan_tail(arguments)
    object.__setattr__(arguments, "cu_seqlens", arguments.cu_seqlens.to(index_dtype))
    check_portable(arguments)


def test_no_tokens_and_packed():
    check_portable(random_arguments(key_dim=16, value_dim=16, lengths=[0, 0, 0], tail=0, **EVERYTHING))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sequence_spoils_no_other(bad):
    sizes = {"num_heads": 1, "num_value_heads": 1, "key_dim": 16, "value_dim": 16}
    arguments = random_arguments(lengths=[3, 66, 5], tail=4, **sizes, **EVERYTHING)
    expected = run_portable(arguments)
    for x in (arguments.q, arguments.k, arguments.v):
        x[:, 3:69] = bad
    actual = run_portable(arguments)
    assert not actual.o[:, 3:69].isfinite().any()
    for rows in (slice(0, 3), slice(69, None)):
        assert torch.equal(actual.o[:, rows], expected.o[:, rows])
    assert torch.equal(actual.final_state[[0, 2]], expected.final_state[[0, 2]])


@pytest.mark.parametrize("heads", [(1, 1), (1, 2), (2, 6)])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_grouped_heads_and_layouts(heads, state_v_first):
    check_portable(random_arguments(2, 34, *heads, 16, 48, chunk_size=32, state_v_first=state_v_first, **EVERYTHING))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_norms_and_gates_inside(dtype, allow_neg_eigval):
    gates = {"A_log": torch.randn(2), "dt_bias": torch.randn(2)}
    flags = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "allow_neg_eigval": allow_neg_eigval}
    arguments = random_arguments(1, 70, 1, 2, 20, 32, dtype=dtype, normalised=False, **gates, **flags, **EVERYTHING)
    check_portable(arguments)


def test_gate_without_bias():
    check_portable(random_arguments(1, 20, 1, 2, 16, 16, A_log=torch.randn(2), **EVERYTHING))


@pytest.mark.parametrize("g", [0.0, -1e-3, -5.0, -20.0, -100.0, float("-inf")])
def test_gates_of_any_strength(g):
    arguments = random_arguments(1, 70, 1, 1, 16, 16, **EVERYTHING)
    arguments.g[:, 10] = g
    arguments.g[:, 30:40] = g
    check_portable(arguments)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_equal_keys(beta):
    arguments = random_arguments(1, 64, 1, 1, 16, 16, **EVERYTHING)
    arguments.k[:] = arguments.k[:, :1].clone()
    arguments.beta.fill_(beta)
    check_portable(arguments)


def test_keys_of_any_norm_stay_finite_under_strong_gates():
    arguments = random_arguments(1, 64, 1, 1, 16, 16, normalised=False, gate_strength=120.0, **EVERYTHING)
    check_portable(arguments)


def test_strided_inputs():
    check_portable(with_strided_inputs(random_arguments(2, 40, 1, 2, 16, 24, **EVERYTHING)))


def test_only_what_is_asked_for():
    result = run_portable(random_arguments(1, 20, 1, 1, 16, 16))
    assert result.final_state is None
    assert result.h is None
