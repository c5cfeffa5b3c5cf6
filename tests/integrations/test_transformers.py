"""tilecrew behind transformers' models: logits against transformers' own torch functions, float32, on the CPU."""

import importlib
import importlib.util
import types

import pytest
import torch

import tilecrew
from tests.integrations.models import FAMILIES, build, logits_of_pieces, tokens
from tilecrew.integrations import transformers as integration

pytest.importorskip("transformers")

TOLERANCE = 2e-5


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def modeling(family: str = "qwen3_next") -> types.ModuleType:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


class Counter:
    """Counts the calls of a function that it stands in for."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *arguments, **options):
        self.count += 1
        return self.function(*arguments, **options)


@pytest.fixture
def calls(monkeypatch):
    counters = {}
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        counters[name] = Counter(getattr(tilecrew, name))
        monkeypatch.setattr(tilecrew, name, counters[name])
    return counters


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_agree_with_torch_path(family, calls):
    model = build(family)
    # A batch of two: a prompt over two chunk boundaries, a second piece of the prompt, then single tokens.
    pieces = [tokens(2, 150), tokens(2, 21, seed=2), *(tokens(2, 1, seed=seed) for seed in range(3, 8))]
    with integration.torch_path():
        expected = logits_of_pieces(model, pieces)
    assert calls["chunk_gated_delta_rule"].count == 0
    with integration.enabled():
        actual = logits_of_pieces(model, pieces)
    assert calls["chunk_gated_delta_rule"].count == 3 * 2
    assert calls["fused_recurrent_gated_delta_rule"].count == 3 * 5
    for a, b in zip(actual, expected, strict=True):
        assert error(a, b) < TOLERANCE


def test_the_comparison_notices_a_wrong_operator(monkeypatch):
    model, pieces = build(), [tokens(1, 100)]
    with integration.torch_path():
        expected = logits_of_pieces(model, pieces)
    right = tilecrew.chunk_gated_delta_rule
    monkeypatch.setattr(tilecrew, "chunk_gated_delta_rule", lambda *, g, **rest: right(g=0.99 * g, **rest))
    with integration.enabled():
        actual = logits_of_pieces(model, pieces)
    assert error(actual[0], expected[0]) > 10 * TOLERANCE


def test_models_built_before_and_after(calls):
    before = build(seed=3)
    integration.enable()
    after = build(seed=3)
    results = [logits_of_pieces(model, [tokens(1, 40)])[0] for model in (before, after)]
    assert calls["chunk_gated_delta_rule"].count == 6
    assert torch.equal(*results)


def test_enable_is_idempotent_and_disable_restores():
    names = (integration.CHUNK, integration.RECURRENT, integration.CONVOLUTION)
    modules = integration._modeling_modules()
    originals = [[getattr(module, name) for name in names] for module in modules]
    patched = integration.enable()
    assert integration.enable() == patched == [module.__name__ for module in modules]
    assert {f"transformers.models.{family}.modeling_{family}" for family in FAMILIES} <= set(patched)
    assert integration.is_enabled()
    assert all(getattr(module, integration.CHUNK) is integration.chunk_gated_delta_rule for module in modules)
    integration.disable()
    integration.disable()
    assert not integration.is_enabled()
    assert [[getattr(module, name) for name in names] for module in modules] == originals


def test_context_managers_restore_the_state_before():
    original = getattr(modeling(), integration.CHUNK)
    with integration.enabled():
        with integration.torch_path():
            assert not integration.is_enabled()
            assert getattr(modeling(), integration.CHUNK) is not original
        assert integration.is_enabled()
        with integration.enabled():
            pass
        assert integration.is_enabled()
    assert getattr(modeling(), integration.CHUNK) is original


def test_torch_path_is_transformers_own_function():
    function = integration.torch_function(getattr(modeling(), integration.CHUNK))
    assert function.__module__ == modeling().__name__
    assert not hasattr(function, "__wrapped__")
    assert "solve_triangular" in function.__code__.co_names


def test_torch_function_below_a_kernels_module():
    def original():
        return None

    class Kernelised(torch.nn.Module):
        pass

    def make(func):
        def forward(self, *arguments, **options):
            return func(*arguments, **options)

        return forward

    Kernelised.forward = make(original)
    assert integration.torch_function(Kernelised()) is original


def test_packed_batch_equals_separate_sequences():
    model, lengths = build(), [70, 1, 2, 64, 33]
    sequences = [tokens(1, length, seed=length) for length in lengths]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    with torch.inference_mode(), integration.torch_path():
        expected = torch.cat([model(sequence, use_cache=False).logits for sequence in sequences], 1)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int()
    with torch.inference_mode(), integration.enabled():
        actual = model(torch.cat(sequences, 1), use_cache=False, **packing).logits
        with_seq_idx = model(torch.cat(sequences, 1), use_cache=False, seq_idx=seq_idx, **packing).logits
    assert error(actual, expected) < TOLERANCE
    assert torch.equal(actual, with_seq_idx)


@pytest.mark.parametrize("bias", [False, True])
def test_packed_convolution_equals_separate_sequences(bias):
    lengths, width, channels = [5, 1, 9, 2], 4, 6
    x, weight = torch.randn(1, channels, sum(lengths)), torch.randn(channels, width)
    shift = torch.randn(channels) if bias else None
    convolve = integration.torch_function(getattr(modeling(), integration.CONVOLUTION))
    expected = torch.cat([convolve(part, weight, shift, "silu") for part in x.split(lengths, -1)], -1)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    actual = integration.packed_causal_convolution(x, weight, shift, "silu", index)
    torch.testing.assert_close(actual, expected)


def test_packed_batch_cannot_continue_a_cache():
    model = build()
    integration.enable()
    options = {"cu_seq_lens_q": torch.tensor([0, 10, 20])}
    with pytest.raises(ValueError, match="cannot continue a cache"):
        logits_of_pieces(model, [tokens(1, 30), tokens(1, 20)], **options)


def test_seq_idx_alone_is_refused():
    model = build()
    integration.enable()
    with pytest.raises(ValueError, match="seq_idx without cu_seq_lens_q"):
        model(tokens(1, 20), seq_idx=torch.zeros(1, 20, dtype=torch.int32), use_cache=False)


@pytest.mark.parametrize("value", [torch.ones(3), (None, torch.ones(3))])
def test_unknown_tensor_is_refused(value):
    q = torch.randn(1, 3, 2, 16)
    g = -torch.rand(1, 3, 2)
    with pytest.raises(TypeError, match="'document_mask'"):
        integration.chunk_gated_delta_rule(q, q, q, g=g, beta=-g, document_mask=value)
    with pytest.raises(TypeError, match="'document_mask'"):
        integration.recurrent_gated_delta_rule(q, q, q, g=g, beta=-g, document_mask=value)


def test_arguments_that_do_not_concern_the_operator_are_dropped():
    q, g = torch.randn(1, 3, 2, 16), -torch.rand(1, 3, 2)
    extra = {"use_cache": True, "cu_seq_lens_k": torch.ones(2), "max_length_q": 3, "seq_idx": None, "flag": True}
    actual = integration.chunk_gated_delta_rule(q, q, q, g=g, beta=-g, **extra)
    assert torch.equal(actual[0], integration.chunk_gated_delta_rule(q, q, q, g=g, beta=-g)[0])
    assert actual[1] is None


def test_options_of_the_operator_go_through():
    q, g = torch.randn(1, 3, 2, 16), -torch.rand(1, 3, 2)
    for function in (integration.chunk_gated_delta_rule, integration.recurrent_gated_delta_rule):
        plain, scaled = function(q, q, q, g=g, beta=-g)[0], function(q, q, q, g=g, beta=-g, scale=1.0)[0]
        torch.testing.assert_close(scaled, 4 * plain)


def test_left_padding_does_not_change_a_row():
    model, row = build(), tokens(1, 40)
    padded = torch.cat([torch.zeros(1, 25, dtype=torch.int64), row], 1)
    other = tokens(1, 65, seed=5)
    mask = torch.ones(2, 65, dtype=torch.int64)
    mask[1, :25] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.inference_mode(), integration.enabled():
        alone = model(row, use_cache=False).logits
        batch = torch.cat([other, padded])
        together = model(batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert error(together[1:, 25:], alone) < TOLERANCE


def test_generate_gives_the_same_tokens():
    model, prompt = build(), tokens(2, 30)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    with integration.torch_path():
        expected = model.generate(prompt, **options)
    with integration.enabled():
        actual = model.generate(prompt, **options)
    assert torch.equal(actual, expected)


def test_gradients_agree_with_torch_path():
    model, batch = build().train(), tokens(2, 70)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(batch, labels=batch, use_cache=False).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    with integration.torch_path():
        expected = gradients()
    with integration.enabled():
        actual = gradients()
    for name, gradient in expected.items():
        assert error(actual[name], gradient) < 1e-3, name


def test_decode_writes_the_cache_in_place_without_gradients():
    q, g = torch.randn(2, 1, 2, 16), -torch.rand(2, 1, 2)
    state = torch.randn(2, 2, 16, 16)
    before = state.clone()
    arguments = {"g": g, "beta": -g, "output_final_state": True}
    _, kept = integration.recurrent_gated_delta_rule(q, q, q, initial_state=state, **arguments)
    assert torch.equal(state, before)
    with torch.no_grad():
        _, written = integration.recurrent_gated_delta_rule(q, q, q, initial_state=state, **arguments)
    assert written is state
    torch.testing.assert_close(written, kept)


def test_torch_path_refuses_packed_batches():
    q, g, cu_seqlens = torch.randn(1, 3, 2, 16), -torch.rand(1, 3, 2), torch.tensor([0, 1, 3])
    with integration.torch_path():
        function = getattr(modeling(), integration.CHUNK)
    with pytest.raises(ValueError, match="cannot keep packed sequences"):
        function(q, q, q, g=g, beta=-g, cu_seqlens=cu_seqlens)


def test_missing_transformers(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'tilecrew\[transformers\]'"):
        integration.enable()


def test_old_transformers(monkeypatch):
    class Layer:
        def forward(self):
            return self.chunk_gated_delta_rule()

    old = types.ModuleType("old")
    old.Layer = Layer
    for name in (integration.CHUNK, integration.RECURRENT, integration.CONVOLUTION):
        setattr(old, name, lambda: None)
    assert not integration._calls_globals(old)
    monkeypatch.setattr(integration, "_calls_globals", lambda module: False)
    with pytest.raises(ImportError, match=r"needs transformers 5\.16 or newer"):
        integration.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_bfloat16_logits_agree_with_torch_path(family, head_dim):
    """Prefill and decode in bfloat16 on the kernels: off transformers' path by at most twice its own rounding error."""
    from tilecrew.demo.agreement import check_agreement

    model = build(family, head_dim=head_dim).to("cuda", torch.bfloat16)
    checks, _ = check_agreement(model, tokens(1, 300).cuda(), num_new_tokens=8)
    assert len(checks) == 2
    for check in checks:
        assert check.agrees, check


@pytest.mark.gpu
def test_gpu_float32_logits_agree_with_torch_path():
    """float32 on the portable and the decode kernel, a model without experts; 5e-3 leaves room for TF32 products."""
    model = build("qwen3_5", head_dim=64).cuda()
    pieces = [tokens(2, 150).cuda(), *(tokens(2, 1, seed=seed).cuda() for seed in range(3, 6))]
    with integration.torch_path():
        expected = logits_of_pieces(model, pieces)
    with integration.enabled():
        actual = logits_of_pieces(model, pieces)
    for a, b in zip(actual, expected, strict=True):
        assert error(a, b) < 5e-3


@pytest.mark.gpu
def test_gpu_packed_batch_equals_separate_sequences():
    """bfloat16, a model without experts: at most 2 % apart from one by one; without resets it would be 47 %."""
    model, lengths = build("qwen3_5", head_dim=128).to("cuda", torch.bfloat16), [70, 1, 129]
    sequences = [tokens(1, length, seed=length).cuda() for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    with torch.inference_mode(), integration.enabled():
        expected = torch.cat([model(sequence, use_cache=False).logits for sequence in sequences], 1)
        actual = model(
            torch.cat(sequences, 1), position_ids=positions, cu_seq_lens_q=cu_seqlens, use_cache=False
        ).logits
    assert error(actual, expected) < 2e-2
