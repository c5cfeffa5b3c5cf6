"""Mixture-of-experts blocks of transformers on tilecrew, against transformers' own loop over experts."""

import copy
import importlib
import sys

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


def spread(world, family, new_model=build):
    """Prefill and decode of a rank's own tokens, before and after its model's experts are spread: errors of the logits,
    experts before and behind, what transformers' own path, a second spreading and another model say."""
    model = new_model(family)
    pieces = [tokens(1, 9 + 20 * world.rank, seed=world.rank), *(tokens(1, 1, seed=seed) for seed in range(3, 6))]
    with integration.torch_path():
        expected = logits_of_pieces(model, pieces)
    whole = block_of(model).experts.down_proj.shape[0]
    assert integration.spread_experts(model, world, capacity=30) == 4
    with integration.enabled():
        actual = logits_of_pieces(model, pieces)
    messages = []
    for call in (
        lambda: model(pieces[0]),
        lambda: integration.spread_experts(model, world, capacity=30),
        lambda: integration.spread_experts(torch.nn.Linear(2, 2), world, capacity=30),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised, integration.torch_path():
            call()
        messages.append(str(raised.value))
    errors = [error(a, b) for a, b in zip(actual, expected, strict=True)]
    return errors, [whole, *(block_of(model, n).experts.gate_up_proj.shape[0] for n in range(4))], messages


def spread_all(world):
    """Every family, and errors where the last rank has another model: its experts' outputs are others for all."""
    sys.modules.setdefault("fla", None)  # transformers imports it where it is installed, which takes long
    found = {}
    for family in FAMILIES:
        wrong = spread(world, family, lambda name: build(name, seed=world.rank // (world.size - 1)))[0]
        found[family] = *spread(world, family), wrong
    return found


@pytest.mark.slow
def test_experts_spread_over_processes():
    parallel = pytest.importorskip("tilecrew.parallel")
    for found in parallel.run_processes(spread_all, 2):
        for errors, counts, messages, wrong in found.values():
            assert max(errors) < TOLERANCE
            assert max(wrong) > 1e-3
            assert counts == [4, 2, 2, 2, 2]
            assert "only this rank's experts (spread_experts)" in messages[0]
            assert "have been spread already" in messages[1]
            assert "model must have mixture-of-experts blocks" in messages[2]


def test_gradients_of_spread_experts():
    """Each rank's experts get the gradients of all ranks' tokens."""
    parallel = pytest.importorskip("tilecrew.parallel")
    worlds = parallel.World.emulated(3, device="cpu")
    inputs = [torch.randn(1, num_tokens, 32) for num_tokens in (5, 0, 8)]
    whole = block_of(build().train())
    sum(whole(x).square().sum() for x in inputs if x.numel()).backward()

    blocks = [copy.deepcopy(whole) for _ in worlds]
    for block in blocks:
        block.zero_grad()

    def spread_and_run(world):
        block = blocks[world.rank]
        integration.spread_experts(block, world, capacity=8)
        block(inputs[world.rank]).square().sum().backward()

    with integration.enabled():
        parallel.on_every_rank(worlds, spread_and_run)
    for name in ("gate_up_proj", "down_proj"):
        gradient = torch.cat([getattr(block.experts, name).grad for block in blocks])
        assert error(gradient, getattr(whole.experts, name).grad) < 1e-5
    assert [block.experts.down_proj.shape[0] for block in blocks] == [2, 1, 1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_experts_that_are_spread_under_inference_can_be_trained(mode):
    parallel = pytest.importorskip("tilecrew.parallel")
    (world,) = parallel.World.emulated(1, device="cpu")
    block, x = block_of(build()), torch.randn(1, 9, 32)
    with integration.enabled():
        wanted = block(x)
        with mode():
            integration.spread_experts(block, world, capacity=9)
            assert error(block(x), wanted) < 1e-6
        block(x).square().sum().backward()
    assert block.experts.gate_up_proj.grad.any()
    block.experts.down_proj.detach().zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gpu_experts_are_spread_under_inference(mode):
    parallel = pytest.importorskip("tilecrew.parallel")
    if torch.cuda.get_device_capability()[0] not in (9, 12):
        pytest.skip("needs compute capability 9.0 or 12.x")
    (world,) = parallel.World.emulated(1, device="cuda")
    block = block_of(build()).to("cuda", torch.bfloat16)
    x = torch.randn(1, 40, 32, device="cuda", dtype=torch.bfloat16)
    with integration.enabled(), mode():
        wanted = block(x)
        assert integration.spread_experts(block, world, capacity=40) == 1
        out = block(x)
        world.synchronize()
    assert error(out, wanted) < 1e-2


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
    exact = copy.deepcopy(block).double()
    exact.experts.config._experts_implementation = "eager"  # torch's grouped product knows no float64
    wanted = exact(x.double())
    assert (out.double() - wanted).norm() <= 2 * (plain.double() - wanted).norm()
