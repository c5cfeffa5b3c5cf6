"""Gates against their formulas, their limits and their gradients."""

import math

import pytest
import torch

from tilecrew.gated_delta_rule.gates import (
    MINIMUM_LOG_DECAY,
    apply_gates,
    l2norm,
    log_decay,
    softplus_decay,
    write_strength,
)
from tilecrew.testing import random_arguments


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_l2norm_keeps_the_dtype_and_computes_in_float32(dtype):
    x = 200 * torch.randn(5, 3, 64).to(dtype)  # the sum of squares is past the range of float16
    expected = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    actual = l2norm(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_l2norm_of_zero_is_zero():
    assert not l2norm(torch.zeros(2, 8)).any()


def test_log_decay_floors_hard_resets_and_gives_them_no_gradient():
    g = torch.tensor([0.0, -1.5, -99.0, -101.0, -math.inf], requires_grad=True)
    floored = log_decay(g)
    floored.sum().backward()
    assert floored.tolist() == [0.0, -1.5, -99.0, MINIMUM_LOG_DECAY, MINIMUM_LOG_DECAY]
    assert g.grad.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_gates_come_out_wide(dtype, wide):
    x = torch.zeros(3, dtype=dtype)
    assert log_decay(x).dtype == softplus_decay(x, x, x).dtype == write_strength(x, True).dtype == wide


@pytest.mark.parametrize("with_bias", [False, True])
def test_softplus_decay(with_bias):
    a, A_log, dt_bias = torch.randn(2, 7, 3).double(), torch.randn(3).double(), torch.randn(3).double()
    shift = dt_bias if with_bias else torch.zeros(3)
    expected = -A_log.exp() * (1 + (a + shift).exp()).log()
    torch.testing.assert_close(softplus_decay(a, A_log, dt_bias if with_bias else None), expected)


def test_write_strength():
    x = torch.tensor([-2.0, 0.0, 3.0])
    sigmoid = 1 / (1 + (-x).exp())
    torch.testing.assert_close(write_strength(x), x)
    torch.testing.assert_close(write_strength(x, True), sigmoid)
    torch.testing.assert_close(write_strength(x, True, True), 2 * sigmoid)


def test_apply_gates_leaves_nothing_to_apply():
    arguments = random_arguments(
        num_tokens=5,
        normalised=False,
        dtype=torch.bfloat16,
        A_log=torch.randn(4),
        dt_bias=torch.randn(4),
        use_qk_l2norm=True,
        use_beta_sigmoid=True,
        allow_neg_eigval=True,
    )
    once = apply_gates(arguments)
    assert once.q.dtype == torch.bfloat16 and once.g.dtype == once.beta.dtype == torch.float32
    torch.testing.assert_close(once.q, l2norm(arguments.q))
    torch.testing.assert_close(once.k, l2norm(arguments.k))
    torch.testing.assert_close(once.g, softplus_decay(arguments.g, arguments.A_log, arguments.dt_bias))
    torch.testing.assert_close(once.beta, 2 * arguments.beta.sigmoid())
    twice = apply_gates(once)
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(getattr(once, name), getattr(twice, name))


def test_apply_gates_is_differentiable():
    a = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    A_log = torch.randn(4, dtype=torch.float64, requires_grad=True)
    dt_bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)

    def gated(k, a, A_log, dt_bias):
        arguments = random_arguments(num_tokens=2, num_heads=4, key_dim=3, dtype=torch.float64)
        fields = {**vars(arguments), "k": k, "g": a, "beta": a, "A_log": A_log, "dt_bias": dt_bias}
        result = apply_gates(type(arguments)(**{**fields, "use_qk_l2norm": True, "use_beta_sigmoid": True}))
        return result.k, result.g, result.beta

    assert torch.autograd.gradcheck(gated, (k, a, A_log, dt_bias))
