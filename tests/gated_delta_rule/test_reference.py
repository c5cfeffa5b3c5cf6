"""The token recurrence against the definition head by head, and the chunk stages against the recurrence."""

from dataclasses import replace

import pytest
import torch

from tilecrew.gated_delta_rule import reference
from tilecrew.testing import random_arguments, relative_error

SMALL = {"num_heads": 2, "num_value_heads": 6, "key_dim": 8, "value_dim": 5, "dtype": torch.float64}


def by_definition(arguments, row, value_head, tokens, state):
    """One value head of one sequence, straight from the definition, without gates to apply. state [K, V]."""
    head = value_head // (arguments.v.shape[2] // arguments.q.shape[2])
    outputs = []
    for t in tokens:
        q, k, v = arguments.q[row, t, head], arguments.k[row, t, head], arguments.v[row, t, value_head]
        state = arguments.g[row, t, value_head].exp() * state
        state = state + torch.outer(k, arguments.beta[row, t, value_head] * (v - state.T @ k))
        outputs.append(arguments.scale * state.T @ q)
    return torch.stack(outputs), state


@pytest.mark.parametrize("state_v_first", [False, True])
def test_recurrence_is_the_definition(state_v_first):
    arguments = random_arguments(
        2, 7, **SMALL, with_initial_state=True, state_v_first=state_v_first, output_final_state=True
    )
    result = reference.recurrent_gated_delta_rule(arguments)
    assert result.final_state.dtype == torch.float64 and result.final_state.shape == arguments.initial_state.shape
    for row in range(2):
        for head in range(6):
            state = arguments.initial_state[row, head]
            o, state = by_definition(arguments, row, head, range(7), state.T if state_v_first else state)
            torch.testing.assert_close(result.o[row, :, head], o)
            final_state = result.final_state[row, head]
            torch.testing.assert_close(final_state.T if state_v_first else final_state, state)


@pytest.mark.parametrize("function", [reference.recurrent_gated_delta_rule, reference.chunk_gated_delta_rule])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_sequences_are_the_single_ones(function, index_dtype):
    lengths, tail = [3, 0, 40, 16, 0], 4
    packed = random_arguments(
        lengths=lengths,
        tail=tail,
        **SMALL,
        with_initial_state=True,
        output_final_state=True,
        output_h=True,
        chunk_size=16,
    )
    for x in (packed.q, packed.k, packed.v, packed.g, packed.beta):
        x[:, sum(lengths) :] = float("nan")
    packed = replace(packed, cu_seqlens=packed.cu_seqlens.to(index_dtype))
    result = function(packed)
    assert not result.o[:, sum(lengths) :].any()
    start, used_slots = 0, []
    for n, length in enumerate(lengths):
        rows = slice(start, start + length)
        alone = replace(
            packed,
            **{name: getattr(packed, name)[:, rows] for name in ("q", "k", "v", "g", "beta")},
            initial_state=packed.initial_state[n : n + 1],
            cu_seqlens=None,
        )
        expected = function(alone)
        torch.testing.assert_close(result.o[:, rows], expected.o)
        torch.testing.assert_close(result.final_state[n : n + 1], expected.final_state)
        slots = [start // 16 + n + c for c in range(-(-length // 16))]
        torch.testing.assert_close(result.h[:, slots], expected.h)
        used_slots += slots
        start += length
    assert len(set(used_slots)) == len(used_slots)
    unused = [slot for slot in range(packed.num_slots) if slot not in used_slots]
    assert result.h.shape[1] == packed.num_slots and not result.h[:, unused].any()


def test_gates_are_applied_inside():
    raw = random_arguments(
        1,
        9,
        **SMALL,
        normalised=False,
        A_log=torch.randn(6).double(),
        dt_bias=torch.randn(6).double(),
        use_qk_l2norm=True,
        use_beta_sigmoid=True,
        allow_neg_eigval=True,
    )
    result = reference.recurrent_gated_delta_rule(raw)
    g = -raw.A_log.exp() * torch.nn.functional.softplus(raw.g + raw.dt_bias)
    applied = random_arguments(1, 9, **SMALL)
    norms = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (raw.q, raw.k)]
    applied = replace(applied, q=norms[0], k=norms[1], v=raw.v, g=g, beta=2 * raw.beta.sigmoid())
    torch.testing.assert_close(result.o, reference.recurrent_gated_delta_rule(applied).o)


@pytest.mark.parametrize("function", [reference.recurrent_gated_delta_rule, reference.chunk_gated_delta_rule])
def test_minus_infinity_is_a_hard_reset(function):
    arguments = random_arguments(1, 70, **SMALL, with_initial_state=True, output_final_state=True)
    arguments.g[:, 40] = float("-inf")
    result = function(arguments)
    after = {name: getattr(arguments, name)[:, 40:].clone() for name in ("q", "k", "v", "g", "beta")}
    after["g"][:, 0] = 0
    alone = function(replace(arguments, **after, initial_state=None))
    torch.testing.assert_close(result.o[:, 40:], alone.o)
    torch.testing.assert_close(result.final_state, alone.final_state)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 63, 64, 65, 127, 200])
@pytest.mark.parametrize("use_gated_inverse", [False, True])
def test_chunk_stages_are_the_recurrence(num_tokens, use_gated_inverse):
    arguments = random_arguments(
        2, num_tokens, **SMALL, with_initial_state=True, output_final_state=True, output_h=True
    )
    expected = reference.recurrent_gated_delta_rule(arguments)
    result = reference.chunk_gated_delta_rule(arguments, use_gated_inverse)
    assert result.h.shape == (2, -(-num_tokens // 64), 6, 8, 5)
    assert relative_error(result.o, expected.o) < 1e-12
    assert relative_error(result.final_state, expected.final_state, head_dim=1) < 1e-12
    assert relative_error(result.h, expected.h) < 1e-12


def test_gated_inverse_is_the_masked_ungated_one():
    arguments = random_arguments(1, 64, **SMALL, gate_strength=5.0)
    k, beta = arguments.k.transpose(1, 2).repeat_interleave(3, 1), arguments.beta.transpose(1, 2)
    g = reference.cumulative_log_decay(arguments.g.transpose(1, 2))
    gated = reference.gated_inverse(k, beta, g)
    torch.testing.assert_close(gated, reference.pair_decay(g) * reference.ungated_inverse(k, beta))


def test_gated_inverse_stays_finite_for_long_keys_under_strong_gates():
    arguments = random_arguments(1, 64, **SMALL, normalised=False, gate_strength=200.0)
    narrow = replace(
        arguments,
        **{name: getattr(arguments, name).float() for name in ("q", "v", "g", "beta")},
        k=3 * arguments.k.float(),
    )
    expected = reference.recurrent_gated_delta_rule(replace(arguments, k=3 * arguments.k))
    assert relative_error(reference.chunk_gated_delta_rule(narrow).o, expected.o) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_dtypes(dtype):
    arguments = random_arguments(1, 3, **{**SMALL, "dtype": dtype}, output_final_state=True, output_h=True)
    result = reference.recurrent_gated_delta_rule(arguments)
    assert (result.o.dtype, result.final_state.dtype, result.h.dtype) == (dtype, torch.float32, dtype)
    assert reference.recurrent_gated_delta_rule(replace(arguments, output_final_state=False, output_h=False)).h is None
