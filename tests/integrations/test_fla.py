"""tilecrew behind flash-linear-attention's functions, on CPU tensors, which FLA's own kernels cannot serve."""

import importlib
import importlib.util
import inspect
from dataclasses import replace

import pytest
import torch

import tilecrew
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.reference import recurrent_gated_delta_rule
from tilecrew.integrations import fla as integration
from tilecrew.testing import random_arguments, relative_error

pytest.importorskip("fla", exc_type=ImportError)

TOLERANCE = 1e-5


def problem(**options) -> ForwardArguments:
    return random_arguments(2, 70, 2, 4, 32, 32, **options)


def inputs(arguments: ForwardArguments) -> dict[str, torch.Tensor]:
    return {name: getattr(arguments, name) for name in ("q", "k", "v", "g", "beta")}


def operation():
    return importlib.import_module("fla.ops.gated_delta_rule")


def backend():
    registry = importlib.import_module("fla.backends")._operation_registries["gated_delta_rule"]
    return registry._backends["tilecrew"]


def test_chunk_runs_on_tilecrew():
    arguments = problem(with_initial_state=True, output_final_state=True)
    integration.enable()
    o, final_state = operation().chunk_gated_delta_rule(
        **inputs(arguments), initial_state=arguments.initial_state, output_final_state=True
    )
    expected = recurrent_gated_delta_rule(arguments)
    assert relative_error(o, expected.o) < TOLERANCE
    assert relative_error(final_state, expected.final_state, head_dim=1) < TOLERANCE


def test_positional_arguments_follow_flas_order():
    arguments = problem(with_initial_state=True, output_final_state=True, state_v_first=True, use_qk_l2norm=True)
    integration.enable()
    o, final_state = operation().chunk_gdn(
        *inputs(arguments).values(), 0.25, arguments.initial_state, True, True, False, False, True
    )
    expected = recurrent_gated_delta_rule(replace(arguments, scale=0.25))
    assert relative_error(o, expected.o) < TOLERANCE
    assert relative_error(final_state, expected.final_state, head_dim=1) < TOLERANCE


def test_everything_inside_the_kernel():
    arguments = problem(
        use_qk_l2norm=True,
        use_beta_sigmoid=True,
        allow_neg_eigval=True,
        A_log=torch.rand(4),
        dt_bias=torch.rand(4),
        chunk_size=32,
    )
    integration.enable()
    call = {
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "use_gate_in_kernel": True,
        "A_log": arguments.A_log,
        "dt_bias": arguments.dt_bias,
    }
    expected = recurrent_gated_delta_rule(arguments).o
    assert (
        relative_error(operation().chunk_gated_delta_rule(**inputs(arguments), **call, chunk_size=32)[0], expected)
        < TOLERANCE
    )
    assert (
        relative_error(operation().fused_recurrent_gated_delta_rule(**inputs(arguments), **call)[0], expected)
        < TOLERANCE
    )


def test_gate_parameters_without_the_flag_are_ignored_as_by_fla():
    arguments = problem()
    integration.enable()
    o, _ = operation().chunk_gated_delta_rule(**inputs(arguments), A_log=torch.rand(4), use_gate_in_kernel=False)
    assert relative_error(o, recurrent_gated_delta_rule(arguments).o) < TOLERANCE


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_old_name_of_the_state_layout(name):
    arguments = problem(with_initial_state=True, output_final_state=True, state_v_first=True)
    integration.enable()
    call = {**inputs(arguments), "initial_state": arguments.initial_state, "output_final_state": True}
    _, final_state = getattr(operation(), name)(**call, transpose_state_layout=True)
    expected = recurrent_gated_delta_rule(arguments).final_state
    assert relative_error(final_state, expected, head_dim=1) < TOLERANCE
    with pytest.raises(ValueError, match="both given"):
        getattr(operation(), name)(**call, transpose_state_layout=True, state_v_first=True)


def test_packed_sequences():
    arguments = random_arguments(1, 0, 2, 4, 32, 32, lengths=[1, 64, 65], output_final_state=True)
    integration.enable()
    expected = recurrent_gated_delta_rule(arguments)
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        o, final_state = getattr(operation(), name)(
            **inputs(arguments), cu_seqlens=arguments.cu_seqlens, output_final_state=True
        )
        assert relative_error(o, expected.o) < TOLERANCE
        assert relative_error(final_state, expected.final_state, head_dim=1) < TOLERANCE


def test_views_are_accepted():
    arguments = problem()
    integration.enable()
    views = {name: x.transpose(1, -1).contiguous().transpose(1, -1) for name, x in inputs(arguments).items()}
    assert views["q"].stride(-1) != 1
    o, _ = operation().chunk_gated_delta_rule(**views)
    assert relative_error(o, recurrent_gated_delta_rule(arguments).o) < TOLERANCE


def test_wrong_input_raises_tilecrews_error():
    arguments = problem()
    integration.enable()
    with pytest.raises(ValueError, match="beta"):
        operation().chunk_gated_delta_rule(**{**inputs(arguments), "beta": arguments.beta[:, :-1]})


def test_gradients_on_the_cpu():
    arguments = problem()
    integration.enable()
    leaves = {name: x.clone().requires_grad_() for name, x in inputs(arguments).items()}
    operation().chunk_gated_delta_rule(**leaves)[0].square().sum().backward()
    expected = {name: x.clone().requires_grad_() for name, x in inputs(arguments).items()}
    recurrent_gated_delta_rule(replace(arguments, **expected)).o.square().sum().backward()
    for name, leaf in leaves.items():
        assert relative_error(leaf.grad, expected[name].grad) < 1e-4, name


def test_what_the_verifier_declines():
    arguments = inputs(problem())
    integration.enable()
    verify = backend().chunk_gated_delta_rule_verifier
    assert verify(**arguments, chunk_size=16) == (True, None)
    assert verify(*arguments.values()) == (True, None)
    assert verify(**arguments, cp_context=object()) == (
        False,
        "tilecrew does not support context parallelism over several devices",
    )
    accepted, reason = verify(**arguments, head_first=True)
    assert not accepted
    assert "head_first" in reason
    on_device = {name: x.to("meta").requires_grad_() for name, x in arguments.items()}
    accepted, reason = verify(**on_device)
    assert not accepted
    assert "gradient" in reason
    with torch.no_grad():
        assert verify(**on_device)[0]


def test_priority_is_before_flash_qla():
    integration.enable()
    registry = importlib.import_module("fla.backends")._operation_registries["gated_delta_rule"]
    assert backend().priority < registry._backends["flash_qla"].priority


def test_decode_is_patched_where_fla_holds_it_and_restored():
    layer = importlib.import_module("fla.layers.gated_deltanet")
    modules = [importlib.import_module("fla.ops"), operation(), layer]
    original = operation().fused_recurrent_gated_delta_rule
    names = integration.enable()
    assert integration.enable() == names
    assert integration.is_enabled()
    assert {module.__name__ for module in modules} <= set(names)
    for module in modules:
        assert module.fused_recurrent_gated_delta_rule is not original
    assert inspect.signature(operation().fused_recurrent_gated_delta_rule) == inspect.signature(original)
    integration.disable()
    integration.disable()
    assert not integration.is_enabled()
    for module in modules:
        assert module.fused_recurrent_gated_delta_rule is original
    assert operation().fused_recurrent_gdn is original


def test_decode_refuses_unknown_arguments_and_widens_states():
    arguments = problem(with_initial_state=True)
    integration.enable()
    decode = operation().fused_recurrent_gated_delta_rule
    with pytest.raises(TypeError, match="head_first"):
        decode(**inputs(arguments), head_first=False)
    state = arguments.initial_state.bfloat16()
    _, final_state = decode(**inputs(arguments), initial_state=state, output_final_state=True)
    assert final_state.dtype == torch.float32


def test_disabled_backend_is_not_asked(monkeypatch):
    calls = []
    monkeypatch.setattr(tilecrew, "chunk_gated_delta_rule", lambda **call: calls.append(call))
    integration.enable()
    operation().chunk_gated_delta_rule(**inputs(problem()))
    assert len(calls) == 1
    monkeypatch.setenv("FLA_TILECREW", "0")
    assert not backend().is_enabled()
    monkeypatch.delenv("FLA_TILECREW")
    integration.disable()
    assert not backend().is_enabled()


def test_layer_prefill_and_decode(monkeypatch):
    """FLA's own layer. Its convolution and norm are GPU kernels: it runs here without the one, with torch's other."""
    from fla.layers.gated_deltanet import GatedDeltaNet

    with pytest.warns(UserWarning, match="ShortConvolution"):
        layer = GatedDeltaNet(
            hidden_size=64, num_heads=2, head_dim=32, expand_v=1, use_short_conv=False, use_gate=False, mode="chunk"
        )
    layer.o_norm = torch.nn.RMSNorm(32)
    layer.eval()
    integration.enable()
    x = torch.randn(2, 100, 64)
    trained = layer(x)[0]
    with torch.no_grad():
        whole = layer(x)[0]
        # Up to 64 tokens the layer takes the recurrent function.
        start = layer(x[:, :40])[0]
    torch.testing.assert_close(whole, trained)
    torch.testing.assert_close(start, whole[:, :40], atol=1e-5, rtol=1e-4)


def test_dispatch_switched_off(monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH"):
        integration.enable()


@pytest.mark.parametrize(("missing", "message"), [("fla", r"tilecrew\[fla\]"), ("fla.backends", r"0\.6 or newer")])
def test_missing_or_old_fla(monkeypatch, missing, message):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ImportError, match=message):
        integration.enable()
