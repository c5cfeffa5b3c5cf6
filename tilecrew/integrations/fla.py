"""Makes flash-linear-attention (0.6 and newer) run its gated delta rule on tilecrew.

    import tilecrew.integrations.fla as integration
    integration.enable()
    integration.disable()

How it works. Prefill and training, `fla.ops.gated_delta_rule.chunk_gated_delta_rule`, is one of FLA's dispatch points:
`enable` registers a backend there with priority 2, which is asked before FLA's own FlashQLA adapter (3). FLA_TILECREW=0
in the environment switches it off. Decode, `fused_recurrent_gated_delta_rule`, is no dispatch point: `enable` replaces
that name in every loaded `fla` module that holds FLA's function (`fla.ops`, `fla.layers.gated_deltanet`, ...), and
`disable` puts it back.

FLA's own kernels keep what the backend declines: context parallelism (`cp_context`), keyword arguments that tilecrew
does not know, and, on a GPU, calls that need a gradient, because tilecrew's backward runs in torch at present. FLA logs
each such reason once.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import tilecrew

PRIORITY = 2
OPERATION = "fla.ops.gated_delta_rule"
DECODE_NAMES = ("fused_recurrent_gated_delta_rule", "fused_recurrent_gdn")

# Keyword arguments beyond the named ones that FLA's chunk_gated_delta_rule reads.
CHUNK_EXTRA = frozenset({"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout"})
RECURRENT_EXTRA = frozenset({"transpose_state_layout"})

_is_enabled = False
# FLA's decode function and what stands in for it, from the first enable() on.
_decode: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def enable() -> list[str]:
    """Registers the backend and patches decode; returns the names of the modules whose decode function was replaced.

    Calling it again also patches modules that were imported in between and took FLA's function from elsewhere. Raises
    ImportError where FLA is missing or older than 0.6, RuntimeError where FLA_DISABLE_BACKEND_DISPATCH=1 turned
    dispatch off.
    """
    global _is_enabled, _decode
    backends = _backends_module()
    operation = importlib.import_module(OPERATION)
    if _decode is None:
        backends.register("gated_delta_rule")(_make_backend(backends.BaseBackend, operation.chunk_gated_delta_rule))
        original = operation.fused_recurrent_gated_delta_rule
        _decode = original, _make_decode(original)
    _is_enabled = True
    original, replacement = _decode
    for module, name in _holders(original):
        setattr(module, name, replacement)
    return sorted({module.__name__ for module, _ in _holders(replacement)})


def disable() -> None:
    """Puts FLA's decode function back and switches the registered backend off. Does nothing where it is not enabled."""
    global _is_enabled
    if _decode is not None:
        original, replacement = _decode
        for module, name in _holders(replacement):
            setattr(module, name, original)
    _is_enabled = False


def is_enabled() -> bool:
    """Whether FLA calls tilecrew now."""
    return _is_enabled


def _backends_module() -> ModuleType:
    if importlib.util.find_spec("fla") is None:
        raise ImportError("tilecrew.integrations.fla needs flash-linear-attention: pip install 'tilecrew[fla]'")
    if importlib.util.find_spec("fla.backends") is None:
        raise ImportError(
            "tilecrew.integrations.fla needs flash-linear-attention 0.6 or newer: the installed one has no fla.backends"
        )
    backends = importlib.import_module("fla.backends")
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise RuntimeError(
            "FLA_DISABLE_BACKEND_DISPATCH=1 is set, so that FLA asks no backend; unset it to use tilecrew"
        )
    return backends


def _make_backend(base: type, chunk_function: Callable[..., Any]) -> type:
    """The backend class for FLA's registry, which calls `f_verifier`, then `f`, with the user's own arguments."""
    signature = inspect.signature(chunk_function)

    class TilecrewBackend(base):
        backend_type = "tilecrew"
        package_name = "tilecrew"
        env_var = "FLA_TILECREW"
        priority = PRIORITY

        def is_enabled(self) -> bool:
            return _is_enabled and super().is_enabled()

        def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            reason = _declined(*_bind(signature, args, kwargs))
            return reason is None, reason

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            # A backend takes the place of FLA's own argument checks too: tilecrew's function makes its own.
            return tilecrew.chunk_gated_delta_rule(**_translated(*_bind(signature, args, kwargs)))

    return TilecrewBackend


def _make_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tilecrew.fused_recurrent_gated_delta_rule` under the signature of FLA's."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fused_recurrent_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        named, extra = _bind(signature, args, kwargs)
        unknown = sorted(set(extra) - RECURRENT_EXTRA)
        if unknown:
            raise TypeError(f"fused_recurrent_gated_delta_rule got unknown keyword arguments: {', '.join(unknown)}")
        call = _translated(named, extra)
        if call.get("initial_state") is not None:
            # FLA returns a float32 state whatever it was given; tilecrew keeps a bfloat16 state in bfloat16.
            call["initial_state"] = call["initial_state"].float()
        return tilecrew.fused_recurrent_gated_delta_rule(**call)

    return fused_recurrent_gated_delta_rule


def _bind(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Positional and keyword arguments by name: those that the signature names, and those that its **kwargs takes."""
    named = dict(signature.bind(*args, **kwargs).arguments)
    return named, named.pop("kwargs", {})


def _declined(named: dict[str, Any], extra: dict[str, Any]) -> str | None:
    """Why FLA's own kernels shall serve this call, or None. Wrong input is not declined: tilecrew raises its error."""
    unknown = sorted(set(extra) - CHUNK_EXTRA)
    if unknown:
        return f"tilecrew does not know the keyword arguments {', '.join(unknown)}"
    if named.get("cp_context") is not None:
        return "tilecrew does not support context parallelism over several devices"
    tensors = [value for value in (*named.values(), *extra.values()) if isinstance(value, torch.Tensor)]
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if needs_gradient and named["q"].device.type != "cpu":
        return "an input requires a gradient, and tilecrew's backward runs in torch at present"
    return None


def _translated(named: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """FLA's arguments as tilecrew's keywords."""
    call = {**named, **extra}
    if "transpose_state_layout" in call:
        if call.get("state_v_first"):
            raise ValueError("state_v_first and its old name transpose_state_layout are both given")
        call["state_v_first"] = call.pop("transpose_state_layout")
    if not call.get("use_gate_in_kernel"):
        # FLA ignores these two without the flag; tilecrew refuses them.
        call.pop("A_log", None)
        call.pop("dt_bias", None)
    for name in ("q", "k", "v", "gk", "gv"):
        if isinstance(call.get(name), torch.Tensor) and call[name].stride(-1) != 1:
            call[name] = call[name].contiguous()
    return call


def _holders(function: Callable[..., Any]) -> list[tuple[ModuleType, str]]:
    """The loaded modules of FLA whose decode function is `function`, with the name that it has there."""
    return [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (module_name == "fla" or module_name.startswith("fla."))
        for name in DECODE_NAMES
        if vars(module).get(name) is function
    ]
