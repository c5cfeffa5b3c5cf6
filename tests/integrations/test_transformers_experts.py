"""Mixture-of-experts blocks of transformers on tilecrew, against transformers' own loop over experts."""

import copy
import importlib

import pytest
import torch

import tilecrew
from tests.integrations.models import build, logits_of_pieces, tokens
from tilecrew.integrations import transformers as integration
from tilecrew.integrations import transformers_experts

pytest.importorskip("transformers")

TOLERANCE = 2e-5
FAMILIES = list(transformers_experts.BLOCKS)


def error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def block_class(family):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, transformers_experts.BLOCKS[family][0])


def block_of(model, number=0):
    return model.model.layers[number].mlp


@pytest.fixture
def calls(monkeypatch):
    seen = []
    original = tilecrew.moe_forward
    monkeypatch.setattr(
        tilecrew, "moe_forward", lambda x, *rest, **options: (seen.append(x.shape[0]), original(x, *rest, **options))[1]
    )
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_same_logits(family, calls):
    model = build(family)
    pieces = [tokens(2, 70), tokens(2, 21, seed=2), *(tokens(2, 1, seed=seed) for seed in range(3, 6))]
    with integration.torch_path():
        expected = logits_of_pieces(model, pieces)
    assert calls == []
    with integration.enabled():
        actual = logits_of_pieces(model, pieces)
    assert calls == [140] * 4 + [42] * 4 + [2] * 12
    for a, b in zip(actual, expected, strict=True):
        assert error(a, b) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_one_block(family, norm_topk_prob):
    block = block_of(build(family))
    block.gate.norm_topk_prob = norm_topk_prob
    x = torch.randn(2, 9, 32)
    wanted = block(x)
    with integration.enabled():
        out = block(x)
    assert out.shape == x.shape
    assert error(out, wanted) < 1e-6
    assert torch.equal(block(x), wanted)


def test_the_comparison_notices_wrong_weights(monkeypatch):
    block, x = block_of(build()), torch.randn(1, 9, 32)
    wanted = block(x)
    original = tilecrew.moe_forward
    monkeypatch.setattr(
        tilecrew,
        "moe_forward",
        lambda x, ids, weights, *rest, **options: original(x, ids, weights.flip(1), *rest, **options),
    )
    with integration.enabled():
        assert error(block(x), wanted) > 1e-3


def test_gradients_of_a_block():
    block, x = block_of(build().train()), torch.randn(2, 9, 32)

    def gradients():
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        block(leaf).square().sum().backward()
        return {"x": leaf.grad, **{name: parameter.grad.clone() for name, parameter in block.named_parameters()}}

    expected = gradients()
    with integration.enabled():
        actual = gradients()
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        assert error(actual[name], gradient) < 1e-5, name


def test_router_logits_are_still_recorded():
    model, batch = build(), tokens(1, 12)
    with integration.torch_path():
        expected = model(batch, output_router_logits=True, use_cache=False).router_logits
    with integration.enabled():
        actual = model(batch, output_router_logits=True, use_cache=False).router_logits
    assert len(actual) == len(expected) == 4
    for a, b in zip(actual, expected, strict=True):
        assert error(a, b) < TOLERANCE


def test_enable_and_disable():
    classes = [block_class(family) for family in FAMILIES]
    originals = [block.forward for block in classes]

    def replaced():
        return [block.forward is not original for block, original in zip(classes, originals, strict=True)]

    integration.enable()
    assert all(replaced())
    forward = classes[0].forward
    integration.enable()
    assert classes[0].forward is forward
    with integration.torch_path():
        assert not any(replaced())
    assert all(replaced())
    with integration.enabled(moe=False):
        assert not any(replaced())
        assert integration.is_enabled()
    assert all(replaced())
    integration.enable(moe=False)
    assert not any(replaced())
    with integration.torch_path():
        pass
    assert not any(replaced())
    with integration.enabled():
        assert all(replaced())
    assert not any(replaced())
    integration.enable()
    integration.disable()
    assert not any(replaced())
    assert [block.forward for block in classes] == originals


def test_experts_that_would_compute_something_else_are_refused():
    x = torch.randn(1, 3, 32)
    with integration.enabled():
        block = block_of(build())
        block.experts.config.hidden_act = "gelu"
        with pytest.raises(ValueError, match=r"have the activation 'gelu'.*enable\(moe=False\)"):
            block(x)
        block = block_of(build())
        handle = block.experts.register_forward_hook(lambda module, inputs, output: output)
        with pytest.raises(ValueError, match="have hooks, as tensor or expert parallelism"):
            block(x)
        handle.remove()
        block(x)
        block.experts = torch.nn.Identity()
        with pytest.raises(ValueError, match="are a Identity, not a Qwen3NextExperts"):
            block(x)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_gpu_block_is_as_near_to_float64_as_transformers_own(family, num_tokens):
    """One block in bfloat16 with fixed routes: off float64 at most twice as far as transformers' loop."""
    block = block_of(build(family)).to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(1, num_tokens, 32, device="cuda", dtype=torch.bfloat16)
    _, weights, ids = block.gate(x[0])
    block.gate.forward = lambda hidden: (None, weights.to(hidden.dtype), ids)
    plain = block(x)
    with integration.enabled():
        out = block(x)
        assert torch.equal(block(x), out)
    wanted = copy.deepcopy(block).double()(x.double())
    assert (out.double() - wanted).norm() <= 2 * (plain.double() - wanted).norm()
