"""batch_invariant=True: a sequence gives the same bits alone, in a batch and packed, beside anything, at any place."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.gated_delta_rule.test_api import assert_matches, public
from tilecrew import chunk_gated_delta_rule, explain_chunk_gated_delta_rule
from tilecrew.gated_delta_rule import reference
from tilecrew.testing import as_float64, random_arguments

EVERYTHING = {"with_initial_state": True, "output_final_state": True, "output_h": True}
NORMS = {"use_qk_l2norm": True, "normalised": False, "use_beta_sigmoid": True}
LENGTHS = [65, 1, 0, 200, 64, 333]
SMALL = {"num_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 24}
HEADS = {"num_heads": 2, "num_value_heads": 8}
ON_A_GPU = [
    ({"dtype": torch.bfloat16, **HEADS}, None),
    ({"dtype": torch.bfloat16, **HEADS}, "roles"),
    ({"dtype": torch.float16, **HEADS}, None),
    ({"dtype": torch.bfloat16, **HEADS}, "portable"),
    ({"dtype": torch.float32, **HEADS}, None),
    ({"dtype": torch.float64, **SMALL}, None),
]


def with_gates(arguments):
    wide = {"dtype": arguments.g.dtype, "device": arguments.g.device}
    num_value_heads = arguments.v.shape[2]
    return replace(
        arguments,
        A_log=torch.linspace(-1, 1, num_value_heads, **wide),
        dt_bias=torch.linspace(1, -1, num_value_heads, **wide),
    )


def run(arguments, implementation=None):
    return chunk_gated_delta_rule(**public(arguments, batch_invariant=True, implementation=implementation))


def first_slots(arguments):
    """Of every sequence, in h with its rows joined."""
    if arguments.cu_seqlens is None:
        return [n * -(-arguments.q.shape[1] // 64) for n in range(arguments.q.shape[0])]
    return [start // 64 + n for n, start in enumerate(arguments.cu_seqlens.tolist()[:-1])]


def bounds_of(arguments):
    """Tokens of every sequence, in o with its rows joined."""
    if arguments.cu_seqlens is not None:
        return list(itertools.pairwise(arguments.cu_seqlens.tolist()))
    num_tokens = arguments.q.shape[1]
    return [(n * num_tokens, (n + 1) * num_tokens) for n in range(arguments.q.shape[0])]


def part(arguments, results, n):
    """What the results hold of sequence n: (o, final state, h)."""
    o, final_state, h = results
    start, end = bounds_of(arguments)[n]
    slot = first_slots(arguments)[n]
    return o.flatten(0, 1)[start:end], final_state[n], h.flatten(0, 1)[slot : slot - (start - end) // 64]


def select(arguments, order, is_packed):
    """Those sequences as a batch of their own, in new memory."""
    bounds = [bounds_of(arguments)[n] for n in order]
    inputs = {}
    for name in ("q", "k", "v", "g", "beta"):
        parts = [getattr(arguments, name).flatten(0, 1)[start:end] for start, end in bounds]
        inputs[name] = torch.cat(parts)[None].clone() if is_packed else torch.stack(parts).clone()
    cu_seqlens = None
    if is_packed:
        lengths = [end - start for start, end in bounds]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=arguments.q.device)
    return replace(arguments, **inputs, cu_seqlens=cu_seqlens, initial_state=arguments.initial_state[order].clone())


def check(arguments, implementation=None):
    """Packed in two orders, and every sequence alone, packed and as a row."""
    whole = run(arguments, implementation)
    expected = [part(arguments, whole, n) for n in range(arguments.num_sequences)]
    num_sequences = len(expected)
    orders = [(list(range(num_sequences))[::-1], True), (list(range(1, num_sequences, 2)), True)]
    orders += [([n], is_packed) for n in range(num_sequences) for is_packed in (True, False)]
    orders += [([n, n, n], False) for n in (0, num_sequences - 1)]
    for order, is_packed in orders:
        batch = select(arguments, order, is_packed)
        results = run(batch, implementation)
        for place, n in enumerate(order):
            for x, y in zip(part(batch, results, place), expected[n], strict=True):
                assert torch.equal(x, y), (order, is_packed, n)
    return whole


@pytest.mark.parametrize("inside", [False, True], ids=["gates outside", "gates inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_on_the_cpu(dtype, inside):
    options = NORMS if inside else {}
    arguments = random_arguments(1, 0, **SMALL, dtype=dtype, lengths=LENGTHS, tail=5, **EVERYTHING, **options)
    arguments = with_gates(arguments) if inside else arguments
    results = check(arguments)
    assert not results[0][:, -5:].any()
    assert_matches(arguments, results, reference.recurrent_gated_delta_rule(as_float64(arguments)))


@pytest.mark.parametrize("state_v_first", [False, True])
def test_options_on_the_cpu(state_v_first):
    options = {"with_initial_state": True, "output_final_state": True, "state_v_first": state_v_first}
    arguments = random_arguments(3, 130, **SMALL, **options)
    strided = replace(arguments, q=torch.cat([arguments.q, arguments.k], 2)[:, :, : SMALL["num_heads"]])
    for chunk_size in (16, 64):
        o, final_state = run(replace(arguments, chunk_size=chunk_size))
        assert torch.equal(o, run(replace(strided, chunk_size=chunk_size))[0])
        usual = chunk_gated_delta_rule(**public(replace(arguments, chunk_size=chunk_size)))
        torch.testing.assert_close((o, final_state), usual)
        assert final_state.is_contiguous()
    assert run(replace(arguments, output_final_state=False))[1] is None
    assert run(replace(arguments, initial_state=None))[1].shape == final_state.shape


def test_a_gradient_is_refused():
    arguments = random_arguments(1, 70, **SMALL)
    call = public(arguments, batch_invariant=True)
    call["g"].requires_grad_()
    for function in (chunk_gated_delta_rule, explain_chunk_gated_delta_rule):
        with pytest.raises(ValueError, match="batch_invariant=True cannot be kept where an input requires a gradient"):
            function(**call)
    with torch.no_grad():
        assert torch.equal(chunk_gated_delta_rule(**call)[0], run(arguments)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["gates outside", "gates inside"])
@pytest.mark.parametrize(
    ("options", "implementation"), ON_A_GPU, ids=lambda x: x or "chosen" if not isinstance(x, dict) else str(x["dtype"])
)
def test_on_a_gpu(options, implementation, inside):
    options = options | (NORMS if inside else {})
    arguments = random_arguments(1, 0, device="cuda", lengths=[*LENGTHS, 1500], tail=5, **EVERYTHING, **options)
    arguments = with_gates(arguments) if inside else arguments
    try:
        explain_chunk_gated_delta_rule(**public(arguments, implementation=implementation))
    except ValueError as limit:
        pytest.skip(str(limit))
    check(arguments, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("normalise", [False, True])
def test_many_sequences_and_long_ones_on_a_gpu(normalise):
    """Sizes at which other calls would take other blocks, and context parallelism."""
    options = {"dtype": torch.bfloat16, "device": "cuda", "use_qk_l2norm": normalise, **EVERYTHING, **HEADS}
    arguments = random_arguments(1, 0, lengths=[8192, *range(1, 200)], **options)
    whole = run(arguments)
    for n in (0, 1, 77, 199):
        alone = select(arguments, [n], is_packed=False)
        assert explain_chunk_gated_delta_rule(**public(alone, batch_invariant=True)).chunks_per_piece == 0
        for x, y in zip(part(alone, run(alone), 0), part(arguments, whole, n), strict=True):
            assert torch.equal(x, y)
