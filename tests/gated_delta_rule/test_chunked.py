"""The chunked torch path, forward and backward, against the token recurrence in float64."""

from dataclasses import replace

import pytest
import torch

from tilecrew.gated_delta_rule import chunked, reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.chunk_groups import PAIRS_PER_GROUP
from tilecrew.gated_delta_rule.gates import apply_gates
from tilecrew.testing import as_float64, random_arguments, relative_error

EXACT = 1e-10
TOKEN_FIELDS = ("q", "k", "v", "g", "beta")
SMALL = {"num_heads": 2, "num_value_heads": 6, "key_dim": 8, "value_dim": 5, "dtype": torch.float64}
ALL_OUTPUTS = {"with_initial_state": True, "output_final_state": True, "output_h": True}


def assert_forward_is_exact(arguments: ForwardArguments) -> None:
    result, expected = chunked.forward(arguments), reference.recurrent_gated_delta_rule(arguments)
    assert relative_error(result.o, expected.o) < EXACT
    for name, head_dim in (("final_state", 1), ("h", 2)):
        actual, truth = getattr(result, name), getattr(expected, name)
        assert (actual is None) == (truth is None)
        assert truth is None or relative_error(actual, truth, head_dim) < EXACT


def autograd_gradients(
    arguments: ForwardArguments, do, dfinal_state, function=reference.recurrent_gated_delta_rule
) -> dict[str, torch.Tensor]:
    """Autograd through the token recurrence, or another differentiable function."""
    names = [*TOKEN_FIELDS, *(["initial_state"] if arguments.initial_state is not None else [])]
    leaves = {name: getattr(arguments, name).clone().requires_grad_() for name in names}
    result = function(replace(arguments, **leaves, output_h=False))
    loss = (result.o * do).sum() + (result.final_state * dfinal_state).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(names, gradients, strict=True))


def random_cotangents(arguments: ForwardArguments) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    result = chunked.forward(arguments)
    return tuple(
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        for x in (result.o, result.final_state)
    )


def assert_backward_is_exact(arguments: ForwardArguments) -> None:
    do, dfinal_state = random_cotangents(arguments)
    actual = chunked.backward(arguments, do, dfinal_state)
    for name, expected in autograd_gradients(arguments, do, dfinal_state).items():
        error = relative_error(getattr(actual, name), expected, 1 if name == "initial_state" else 2)
        assert error < EXACT, (name, error)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 63, 64, 65, 127, 200])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_lengths_forward_and_backward(num_tokens, state_v_first):
    arguments = random_arguments(2, num_tokens, **SMALL, **ALL_OUTPUTS, state_v_first=state_v_first)
    assert_forward_is_exact(arguments)
    assert_backward_is_exact(arguments)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("lengths", [[1, 64, 65, 129], [0, 3, 0, 0, 200, 64, 0], [0], [5] * 70])
def test_packed_sequences(lengths, chunk_size):
    arguments = random_arguments(lengths=lengths, tail=7, **SMALL, **ALL_OUTPUTS, chunk_size=chunk_size)
    assert_forward_is_exact(arguments)
    assert_backward_is_exact(arguments)


def test_packed_sequences_of_several_blocks_are_the_single_ones():
    lengths = [(37 * n) % 150 for n in range(12)]
    arguments = random_arguments(
        lengths=lengths, num_heads=16, num_value_heads=32, key_dim=8, value_dim=4, dtype=torch.float64, **ALL_OUTPUTS
    )
    assert len(lengths) * 32 > 2 * PAIRS_PER_GROUP  # else this tests one block only
    assert_forward_is_exact(arguments)
    assert_backward_is_exact(arguments)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("where", ["device", "host"])
def test_kinds_of_cu_seqlens(index_dtype, where):
    arguments = random_arguments(lengths=[3, 70], **SMALL, **ALL_OUTPUTS)
    cu_seqlens = arguments.cu_seqlens.to(index_dtype)
    if where == "host":
        # Values on the host are taken: those "on the device" are not looked at.
        given = replace(arguments, cu_seqlens=torch.zeros_like(cu_seqlens), cu_seqlens_cpu=cu_seqlens)
    else:
        given = replace(arguments, cu_seqlens=cu_seqlens)
    expected = reference.recurrent_gated_delta_rule(arguments)
    assert relative_error(chunked.forward(given).o, expected.o) < EXACT


@pytest.mark.parametrize(("num_heads", "num_value_heads"), [(1, 1), (3, 3), (1, 5), (4, 8)])
def test_grouped_value_heads(num_heads, num_value_heads):
    sizes = {**SMALL, "num_heads": num_heads, "num_value_heads": num_value_heads}
    arguments = random_arguments(2, 70, **sizes, **ALL_OUTPUTS)
    assert_forward_is_exact(arguments)
    assert_backward_is_exact(arguments)


def test_gates_are_applied_inside_the_forward():
    assert_forward_is_exact(
        random_arguments(
            2,
            70,
            **SMALL,
            **ALL_OUTPUTS,
            normalised=False,
            A_log=torch.randn(6).double(),
            dt_bias=torch.randn(6).double(),
            use_qk_l2norm=True,
            use_beta_sigmoid=True,
            allow_neg_eigval=True,
        )
    )


def test_nothing_behind_the_last_sequence_leaks():
    lengths, tail = [70, 5], 30
    clean = random_arguments(lengths=lengths, tail=tail, **SMALL, **ALL_OUTPUTS)
    do, dfinal_state = random_cotangents(clean)
    dirty = replace(clean, **{name: getattr(clean, name).clone() for name in TOKEN_FIELDS})
    for x in (*(getattr(dirty, name) for name in TOKEN_FIELDS), do):
        x[:, sum(lengths) :] = float("nan")
    result, expected = chunked.forward(dirty), chunked.forward(clean)
    assert torch.equal(result.o, expected.o) and torch.equal(result.final_state, expected.final_state)
    assert torch.equal(result.h, expected.h)
    assert not result.o[:, sum(lengths) :].any()
    gradients = chunked.backward(dirty, do, dfinal_state)
    for name in TOKEN_FIELDS:
        gradient = getattr(gradients, name)
        assert not gradient[:, sum(lengths) :].any() and gradient[:, : sum(lengths)].isfinite().all()


def test_sequences_do_not_leak_into_each_other():
    arguments = random_arguments(lengths=[70, 64, 9], **SMALL, **ALL_OUTPUTS)
    expected = chunked.forward(arguments)
    for x in (getattr(arguments, name) for name in TOKEN_FIELDS):
        x[:, 70:134] = float("nan")
    result = chunked.forward(arguments)
    for rows in (slice(0, 70), slice(134, 143)):
        assert torch.equal(result.o[:, rows], expected.o[:, rows])
    assert result.o[:, 70:134].isnan().any()


def test_inputs_are_left_alone_and_results_are_new():
    arguments = random_arguments(2, 70, **SMALL, **ALL_OUTPUTS, use_qk_l2norm=True)
    before = {name: getattr(arguments, name).clone() for name in (*TOKEN_FIELDS, "initial_state")}
    result = chunked.forward(arguments)
    chunked.backward(apply_gates(arguments), result.o, result.final_state)
    for name, x in before.items():
        assert torch.equal(getattr(arguments, name), x), name
    empty = replace(arguments, **{name: getattr(arguments, name)[:, :0] for name in TOKEN_FIELDS})
    final_state = chunked.forward(empty).final_state
    assert torch.equal(final_state, arguments.initial_state)
    assert final_state.data_ptr() != arguments.initial_state.data_ptr()


def test_autocast_changes_nothing():
    arguments = random_arguments(2, 70, **{**SMALL, "dtype": torch.float32}, **ALL_OUTPUTS)
    expected = chunked.forward(arguments)
    gradients = chunked.backward(arguments, expected.o, expected.final_state)
    with torch.autocast("cpu", torch.bfloat16):
        result = chunked.forward(arguments)
        again = chunked.backward(arguments, expected.o, expected.final_state)
        recurrence = reference.recurrent_gated_delta_rule(arguments)
    for name, x in [*vars(expected).items(), *vars(gradients).items()]:
        assert torch.equal(getattr(result if hasattr(result, name) else again, name), x), name
    assert relative_error(recurrence.o, expected.o) < 1e-5


def test_strided_views():
    arguments = random_arguments(2, 70, **SMALL, **ALL_OUTPUTS)
    packed = torch.cat([arguments.q.flatten(2), arguments.k.flatten(2), arguments.v.flatten(2)], -1)
    padded = torch.cat([packed, packed], 1)[:, :70]  # batch and token strides that no single stride can express
    q, k, v = padded.split([16, 16, 30], -1)
    views = {"q": q.unflatten(-1, (2, 8)), "k": k.unflatten(-1, (2, 8)), "v": v.unflatten(-1, (6, 5))}
    assert not views["q"].is_contiguous()
    strided = replace(arguments, **views)
    assert_forward_is_exact(strided)
    assert_backward_is_exact(strided)


class ChunkedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arguments, q, k, v, g, beta, initial_state):
        ctx.arguments = replace(arguments, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
        result = chunked.forward(ctx.arguments)
        return result.o, result.final_state

    @staticmethod
    def backward(ctx, do, dfinal_state):
        gradients = chunked.backward(ctx.arguments, do, dfinal_state)
        return None, *vars(gradients).values()


@pytest.mark.parametrize("gate_strength", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("packed", [False, True])
def test_finite_differences(gate_strength, packed):
    shape = {"lengths": [3, 0, 18], "tail": 1} if packed else {"batch": 1, "num_tokens": 19}
    arguments = random_arguments(
        **shape,
        num_heads=1,
        num_value_heads=2,
        key_dim=3,
        value_dim=2,
        dtype=torch.float64,
        with_initial_state=True,
        output_final_state=True,
        gate_strength=gate_strength,
        chunk_size=16,
    )
    inputs = [getattr(arguments, name).requires_grad_() for name in (*TOKEN_FIELDS, "initial_state")]
    assert torch.autograd.gradcheck(lambda *x: ChunkedFunction.apply(arguments, *x), inputs)


def adversarial(case: str, dtype: torch.dtype, num_tokens: int = 200) -> ForwardArguments:
    """Inputs that break careless implementations."""
    arguments = random_arguments(
        1, num_tokens, **{**SMALL, "dtype": dtype}, with_initial_state=True, output_final_state=True
    )
    g, beta, k = arguments.g, arguments.beta, arguments.k
    if case.startswith("g="):
        g = torch.full_like(g, float(case[2:]))
    elif case == "hard resets":
        g = g.clone()
        g[:, [0, 40, 41, 100, 127, 128]] = float("-inf")
    elif case == "reset of one head, no decay in the others":
        g = torch.zeros_like(g)
        g[:, 70, 1] = float("-inf")
    elif case.startswith("beta="):
        beta = torch.full_like(beta, float(case[5:]))
    elif case == "identical keys":
        k = k[:, :1].expand_as(k).contiguous()
        beta = torch.ones_like(beta)
    elif case == "identical keys, reflected":
        k = k[:, :1].expand_as(k).contiguous()
        beta = torch.full_like(beta, 2.0)
    elif case == "long keys, strong gates":
        k, g = 3 * k, g - 3
    elif case == "long keys, gates that overflow the un-gated inverse":
        k, g, beta = 30 * k[:, :1].expand_as(k), torch.full_like(g, -8.0), torch.ones_like(beta)
    elif case == "large state":
        return replace(arguments, initial_state=1000 * arguments.initial_state)
    return replace(arguments, g=g, beta=beta, k=k.contiguous())


CASES = [
    *("g=0", "g=-1e-3", "g=-5", "g=-20", "g=-100", "g=-1000"),
    *("hard resets", "reset of one head, no decay in the others"),
    *("beta=0", "beta=1", "beta=2", "identical keys", "identical keys, reflected"),
    *("long keys, strong gates", "long keys, gates that overflow the un-gated inverse", "large state"),
]


@pytest.mark.parametrize("case", CASES)
def test_adversarial_inputs_in_float64(case):
    arguments = adversarial(case, torch.float64)
    assert_forward_is_exact(arguments)
    assert_backward_is_exact(arguments)


@pytest.mark.parametrize("case", CASES)
def test_adversarial_inputs_in_float32(case):
    """At most twice the error of the same mathematics in float32, written plainly, with a floor of a few roundings."""

    def error(actual, expected, head_dim):
        # Below 1e-30 nothing is left of float32's relative precision.
        return relative_error(*(x.double().masked_fill(x.abs() < 1e-30, 0) for x in (actual, expected)), head_dim)

    arguments = adversarial(case, torch.float32)
    wide = as_float64(arguments)
    truth = reference.recurrent_gated_delta_rule(wide)
    plain, result = reference.chunk_gated_delta_rule(arguments), chunked.forward(arguments)
    for name, head_dim in (("o", 2), ("final_state", 1)):
        expected = getattr(truth, name)
        allowed = max(2 * error(getattr(plain, name), expected, head_dim), 1e-6)
        assert error(getattr(result, name), expected, head_dim) <= allowed, name
    do, dfinal_state = random_cotangents(arguments)
    gradients = chunked.backward(arguments, do, dfinal_state)
    plain_gradients = autograd_gradients(arguments, do, dfinal_state, reference.chunk_gated_delta_rule)
    for name, expected in autograd_gradients(wide, do.double(), dfinal_state.double()).items():
        head_dim = 1 if name == "initial_state" else 2
        allowed = max(2 * error(plain_gradients[name], expected, head_dim), 2e-6)
        assert error(getattr(gradients, name), expected, head_dim) <= allowed, name


def test_the_case_that_overflows_the_ungated_inverse_does_overflow_it():
    arguments = adversarial("long keys, gates that overflow the un-gated inverse", torch.float32, num_tokens=64)
    k, beta = arguments.k.transpose(1, 2)[:, :1], arguments.beta.transpose(1, 2)[:, :1]
    assert not reference.ungated_inverse(k, beta).isfinite().all()
    assert chunked.forward(arguments).o.isfinite().all()


def test_hard_reset_has_no_gradient():
    arguments = adversarial("hard resets", torch.float64)
    dg = chunked.backward(arguments, *random_cotangents(arguments)).g
    at_reset = arguments.g.isinf()
    assert not dg[at_reset].any() and dg[~at_reset].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate_strength", [0.0, 1.0, 30.0])
def test_half_precision(dtype, gate_strength):
    """Computed in float32, an output carries little but the rounding to its dtype: at most twice that."""
    arguments = random_arguments(
        1,
        130,
        **{**SMALL, "dtype": dtype},
        with_initial_state=True,
        output_final_state=True,
        gate_strength=gate_strength,
    )
    wide = as_float64(arguments)
    truth, result = reference.recurrent_gated_delta_rule(wide), chunked.forward(arguments)
    assert result.o.dtype == dtype and result.final_state.dtype == torch.float32
    assert relative_error(result.o, truth.o) <= 2 * relative_error(truth.o.to(dtype), truth.o)
    assert relative_error(result.final_state, truth.final_state, 1) < 2e-6
    do, dfinal_state = random_cotangents(arguments)
    gradients = chunked.backward(arguments, do, dfinal_state)
    for name, expected in autograd_gradients(wide, do.double(), dfinal_state.double()).items():
        actual, given = getattr(gradients, name), getattr(arguments, name)
        assert actual.dtype == given.dtype and actual.shape == given.shape
        head_dim = 1 if name == "initial_state" else 2
        allowed = 2 * relative_error(expected.to(given.dtype), expected, head_dim)
        assert relative_error(actual, expected, head_dim) <= max(allowed, 1e-5), name


def test_half_precision_l2norm_is_not_rounded():
    arguments = random_arguments(
        1, 70, **{**SMALL, "dtype": torch.bfloat16}, normalised=False, use_qk_l2norm=True, output_final_state=True
    )
    truth = reference.recurrent_gated_delta_rule(as_float64(arguments))
    assert relative_error(chunked.forward(arguments).final_state, truth.final_state, 1) < 2e-6


def test_gradients_without_states():
    arguments = random_arguments(1, 70, **SMALL, output_final_state=True)
    do, _ = random_cotangents(arguments)
    gradients = chunked.backward(arguments, do)
    assert gradients.initial_state is None
    expected = autograd_gradients(arguments, do, torch.zeros(1, 6, 8, 5))
    for name in TOKEN_FIELDS:
        assert relative_error(getattr(gradients, name), expected[name]) < EXACT


@pytest.mark.parametrize("flag", ["use_qk_l2norm", "use_beta_sigmoid", "A_log"])
def test_backward_refuses_gates_that_it_would_not_differentiate(flag):
    value = torch.zeros(6, dtype=torch.float64) if flag == "A_log" else True
    arguments = random_arguments(1, 3, **SMALL, **{flag: value})
    with pytest.raises(ValueError, match="apply_gates"):
        chunked.backward(arguments, arguments.v)


@pytest.mark.parametrize("size", [1, 5, 16, 24, 37, 48, 64])
def test_unit_lower_inverse(size):
    x = torch.randn(3, size, size, dtype=torch.float64) / size**0.5
    expected = torch.linalg.inv(x.tril(-1) + torch.eye(size))
    torch.testing.assert_close(chunked.unit_lower_inverse(x), expected)


def test_repeats_are_bit_identical():
    arguments = random_arguments(lengths=[70, 5, 200], tail=3, **{**SMALL, "dtype": torch.float32}, **ALL_OUTPUTS)
    first = chunked.forward(arguments)
    gradients = chunked.backward(arguments, first.o, first.final_state)
    for _ in range(3):
        again = chunked.forward(arguments)
        assert all(torch.equal(x, y) for x, y in zip(vars(first).values(), vars(again).values(), strict=True))
        repeated = chunked.backward(arguments, first.o, first.final_state)
        assert all(torch.equal(x, y) for x, y in zip(vars(gradients).values(), vars(repeated).values(), strict=True))
