"""Makes the Gated DeltaNet and mixture-of-experts layers of Hugging Face transformers run on tilecrew.

    import tilecrew.integrations.transformers as integration
    integration.enable()        # every model, built before or after
    integration.disable()       # transformers' own functions again

How it works. Since transformers 5.16 a Gated DeltaNet layer calls the functions `torch_chunk_gated_delta_rule`
(prefill, training) and `torch_recurrent_gated_delta_rule` (decode: one token, cached state) as *globals of its modeling
module*, at every forward. (The names say torch; the decorator on them may already serve flash-linear-attention or a Hub
kernel.) `enable` replaces those globals, so there is nothing to rebuild in a model. It also replaces
`causal_conv1d_fn`, the short convolution before the delta rule, for packed batches only: the convolution too must not
look across a sequence boundary.

Mixture-of-experts blocks are the subject of `transformers_experts`; `enable(moe=False)` leaves them alone, and
`spread_experts(model, world, capacity)` spreads their experts over ranks.

`enable` has no effect on layers whose whole `forward` was replaced by a Hub kernel (`use_kernels=True`).
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

import tilecrew
from tilecrew.integrations import transformers_experts
from tilecrew.integrations.transformers_experts import spread_experts as spread_experts

#: The modeling modules of transformers that have Gated DeltaNet layers; those that the installed version lacks are
#: skipped.
MODEL_NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini")

CHUNK = "torch_chunk_gated_delta_rule"
RECURRENT = "torch_recurrent_gated_delta_rule"
CONVOLUTION = "causal_conv1d_fn"

#: Keyword arguments of a transformers forward that reach the operator and do not concern it: they steer attention
#: masks, losses and outputs.
IRRELEVANT = frozenset(
    {
        "attention_mask",
        "cache_position",
        "cu_seq_lens_k",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)

# Further options of the operators, which no layer passes today: as transformers does, names that match go through.
CHUNK_OPTIONS = frozenset(inspect.signature(tilecrew.chunk_gated_delta_rule).parameters) - {"output_h"}
RECURRENT_OPTIONS = frozenset(inspect.signature(tilecrew.fused_recurrent_gated_delta_rule).parameters)

# What enable() found in each modeling module: {module: {global name: the object that was there}}. Empty while disabled.
_replaced: dict[ModuleType, dict[str, Any]] = {}


def enable(moe: bool = True) -> list[str]:
    """Makes transformers' Gated DeltaNet layers call tilecrew; returns the names of the patched modules.

    With `moe` also the mixture-of-experts blocks of Qwen3-Next and Qwen3.5-MoE; without, these are transformers' own.
    Calling it again changes nothing else. Raises ImportError where transformers is missing or older than 5.16.
    """
    modules = _modeling_modules()
    for module in modules:
        if module not in _replaced:
            replacements = {
                CHUNK: chunk_gated_delta_rule,
                RECURRENT: recurrent_gated_delta_rule,
                CONVOLUTION: _packed_convolution(getattr(module, CONVOLUTION)),
            }
            _replaced[module] = {name: getattr(module, name) for name in replacements}
            for name, function in replacements.items():
                setattr(module, name, function)
    if moe:
        transformers_experts.replace()
    else:
        transformers_experts.restore()
    return [module.__name__ for module in modules]


def disable() -> None:
    """Puts back what `enable` replaced. Does nothing where it is not enabled."""
    transformers_experts.restore()
    while _replaced:
        module, originals = _replaced.popitem()
        for name, function in originals.items():
            setattr(module, name, function)


def is_enabled() -> bool:
    """Whether transformers' layers call tilecrew now."""
    return bool(_replaced)


@contextmanager
def enabled(moe: bool = True) -> Iterator[list[str]]:
    """`with enabled():` runs its block with tilecrew and restores the state from before."""
    was_enabled, had_moe = is_enabled(), transformers_experts.is_replaced()
    names = enable(moe)
    try:
        yield names
    finally:
        if was_enabled:
            enable(had_moe)
        else:
            disable()


@contextmanager
def torch_path() -> Iterator[None]:
    """`with torch_path():` runs its block on transformers' pure torch functions, the reference of every comparison.

    Mixture-of-experts blocks are transformers' own then.

    `disable()` alone is not that reference: where flash-linear-attention is installed, transformers calls its kernels.
    """
    was_enabled, had_moe = is_enabled(), transformers_experts.is_replaced()
    disable()
    originals = [(module, name, getattr(module, name)) for module in _modeling_modules() for name in (CHUNK, RECURRENT)]
    try:
        for module, name, function in originals:
            setattr(module, name, _refusing_packed(torch_function(function)))
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)
        if was_enabled:
            enable(had_moe)


def torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The pure torch function below transformers' decorators (the choice of a package, and of a Hub kernel)."""
    if isinstance(function, torch.nn.Module):
        # The `kernels` package turns a decorated function into a module whose forward closes over that function.
        function = inspect.getclosurevars(type(function).forward).nonlocals["func"]
    return inspect.unwrap(function)


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a layer calls on more than one token: transformers' arguments in, `tilecrew.chunk_gated_delta_rule` behind.

    query, key [B, T, H, K], value [B, T, HV, V], g and beta [B, T, HV], initial_state [B, HV, K, V]; cu_seqlens [N +
    1]: the sequences of a packed batch (B is 1), the state starts from zero at each. Returns (o [B, T, HV, V], final
    state or None). Raises ValueError for a packed batch that continues a cache, TypeError for a tensor that it does not
    know.
    """
    options = _options(kwargs, cu_seqlens, CHUNK_OPTIONS)
    if cu_seqlens is not None and cu_seqlens.shape[0] > 2 and initial_state is not None:
        raise ValueError(
            f"a packed batch (cu_seq_lens_q describes {cu_seqlens.shape[0] - 1} sequences) cannot continue a cache, "
            "whose convolution state belongs to one sequence a row: pass them as batch rows, or without a cache"
        )
    o, final_state, *_ = tilecrew.chunk_gated_delta_rule(
        q=_last_dimension_contiguous(query),
        k=_last_dimension_contiguous(key),
        v=_last_dimension_contiguous(value),
        g=g,
        beta=beta,
        initial_state=_float32(initial_state),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        **options,
    )
    return o, final_state


def recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a layer calls to decode one token: `tilecrew.fused_recurrent_gated_delta_rule` behind.

    Shapes and errors as in `chunk_gated_delta_rule`. With gradients disabled the final state replaces initial_state in
    place: that is the cache's buffer, into which the layer would copy the final state next.
    """
    options = _options(kwargs, cu_seqlens, RECURRENT_OPTIONS)
    updates_cache = initial_state is not None and output_final_state and not torch.is_grad_enabled()
    return tilecrew.fused_recurrent_gated_delta_rule(
        q=_last_dimension_contiguous(query),
        k=_last_dimension_contiguous(key),
        v=_last_dimension_contiguous(value),
        g=g,
        beta=beta,
        initial_state=_float32(initial_state),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        inplace_state=updates_cache,
        **options,
    )


def packed_causal_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    sequence_index: torch.Tensor,
) -> torch.Tensor:
    """Depthwise causal convolution that does not look across sequence boundaries.

    hidden_states [1, channels, T], weight [channels, width], bias [channels] or None; activation: a name that
    transformers knows, or None; sequence_index [1, T]: which sequence each token belongs to. Returns [1, channels, T].

        out[t] = bias + sum over j < width of weight[width - 1 - j] * x[t - j], terms of another sequence left out
    """
    # Half precision is rounded once, after the sum, as a convolution kernel does.
    wide = torch.promote_types(weight.dtype, torch.float32)
    x, taps = hidden_states.to(weight.dtype).to(wide), weight.to(wide)
    width = taps.shape[-1]
    out = x * taps[:, -1:]
    for lag in range(1, min(width, x.shape[-1])):
        same_sequence = sequence_index[:, lag:] == sequence_index[:, :-lag]
        term = x[..., :-lag] * taps[:, width - 1 - lag : width - lag] * same_sequence[:, None]
        out = out + torch.nn.functional.pad(term, (lag, 0))
    if bias is not None:
        out = out + bias[:, None]
    out = out.to(weight.dtype)
    if activation is not None:
        out = importlib.import_module("transformers.activations").ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _packed_convolution(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """transformers' convolution, but for packed batches: those go to `packed_causal_convolution`."""

    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        cu_seqlens: torch.Tensor | None = kwargs.get("cu_seq_lens_q")
        sequence_index: torch.Tensor | None = kwargs.get("seq_idx")
        if sequence_index is None and (cu_seqlens is None or cu_seqlens.shape[0] <= 2):
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        num_tokens = hidden_states.shape[-1]
        if sequence_index is None:
            assert cu_seqlens is not None
            positions = torch.arange(num_tokens, device=hidden_states.device, dtype=cu_seqlens.dtype)
            sequence_index = torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)[None]
        if hidden_states.shape[0] != 1 or sequence_index.shape != (1, num_tokens):
            raise ValueError(
                f"a packed batch has one row, and seq_idx one entry for each of its tokens, without a cached past; "
                f"got {hidden_states.shape[0]} rows of {num_tokens} tokens and seq_idx {tuple(sequence_index.shape)}"
            )
        return packed_causal_convolution(hidden_states, weight, bias, activation, sequence_index)

    return causal_conv1d_fn


def _modeling_modules() -> list[ModuleType]:
    """The installed transformers' modules with Gated DeltaNet layers, checked to be of the kind that can be patched."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            "tilecrew.integrations.transformers needs the transformers package: pip install 'tilecrew[transformers]'"
        )
    version = importlib.import_module("transformers").__version__
    modules = []
    for name in MODEL_NAMES:
        path = f"transformers.models.{name}"
        if importlib.util.find_spec(path) is not None:
            modules.append(importlib.import_module(f"{path}.modeling_{name}"))
    # Before 5.16 a layer bound its functions as attributes in __init__: replacing globals would change new models only.
    if not modules or not all(_calls_globals(module) for module in modules):
        raise ImportError(
            f"tilecrew.integrations.transformers needs transformers 5.16 or newer, found {version}: "
            f"its Gated DeltaNet layers do not call {CHUNK} through their module"
        )
    return modules


def _calls_globals(module: ModuleType) -> bool:
    """Whether a layer's forward in this module looks the operators up in the module's globals."""
    if not all(hasattr(module, name) for name in (CHUNK, RECURRENT, CONVOLUTION)):
        return False
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    forwards = [inspect.unwrap(vars(cls)["forward"]) for cls in classes if "forward" in vars(cls)]
    return any({CHUNK, RECURRENT} <= set(forward.__code__.co_names) for forward in forwards)


def _refusing_packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' torch functions would ignore cu_seqlens and carry the state across sequence boundaries."""

    def torch_function_without_packing(*args: Any, cu_seqlens: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if cu_seqlens is not None:
            raise ValueError("transformers' torch path cannot keep packed sequences (cu_seq_lens_q) apart")
        return function(*args, **kwargs)

    return torch_function_without_packing


def _options(extra: dict[str, Any], cu_seqlens: torch.Tensor | None, known: frozenset[str]) -> dict[str, Any]:
    """The part of a layer's further keyword arguments that is for the operator.

    Refuses what must not be dropped: tensors of unknown meaning, and packing that only seq_idx describes.
    """
    if extra.get("seq_idx") is not None and cu_seqlens is None:
        raise ValueError("seq_idx without cu_seq_lens_q: the delta rule resets its state by cu_seq_lens_q, pass both")
    for name, value in extra.items():
        parts = value if isinstance(value, (list, tuple)) else (value,)
        is_known = name in known or name in IRRELEVANT or name == "seq_idx"
        if not is_known and any(isinstance(part, torch.Tensor) for part in parts):
            raise TypeError(
                f"tensor argument {name!r} reached the gated delta rule from a transformers layer, and tilecrew does "
                "not know what it means there; tilecrew.integrations.transformers.disable() restores transformers' own"
            )
    return {name: value for name, value in extra.items() if name in known}


def _last_dimension_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The layers pass views of a channels-first convolution output, whose last dimension has the stride T."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _float32(state: torch.Tensor | None) -> torch.Tensor | None:
    return None if state is None else state.float()
