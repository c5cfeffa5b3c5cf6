"""The sparse mixture-of-experts blocks of transformers on `tilecrew.moe_forward`; part of `integrations.transformers`.

A block's router and its shared expert stay transformers' own modules, so that what hooks or adapts them keeps working.
Replaced is the loop over experts, and the sum behind it: every token's experts and the shared expert are added in
float32 and rounded once.

The forward is replaced in the block's class. A model whose modules were given forwards of their own before (accelerate
does so where a model is spread over several devices, or offloaded) keeps those: enable before such a model is loaded.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

import tilecrew

#: Modeling module -> classes of its block and of the experts inside. What the installed version lacks is skipped.
BLOCKS = {
    "qwen3_next": ("Qwen3NextSparseMoeBlock", "Qwen3NextExperts"),
    "qwen3_5_moe": ("Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeExperts"),
}

# What `replace` found: {class of the block: its forward}. Empty while nothing is replaced.
_originals: dict[type, Callable[..., torch.Tensor]] = {}


def replace() -> None:
    """Makes the blocks' classes call tilecrew; again changes nothing."""
    for name, (block_name, experts_name) in BLOCKS.items():
        path = f"transformers.models.{name}"
        if importlib.util.find_spec(path) is None:
            continue
        module = importlib.import_module(f"{path}.modeling_{name}")
        block, experts = (getattr(module, attribute, None) for attribute in (block_name, experts_name))
        if block is None or experts is None or block in _originals:
            continue
        _originals[block] = block.forward
        block.forward = _forward_with(experts)


def restore() -> None:
    """Puts the blocks' own forwards back."""
    while _originals:
        block, forward = _originals.popitem()
        block.forward = forward  # type: ignore[attr-defined]


def is_replaced() -> bool:
    """Whether blocks call tilecrew now."""
    return bool(_originals)


def _forward_with(experts_class: type) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        _check(self.experts, experts_class)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, topk_weights, topk_ids = self.gate(x)
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        out = tilecrew.moe_forward(
            x,
            topk_ids,
            topk_weights,
            self.experts.gate_up_proj.transpose(1, 2),
            self.experts.down_proj.transpose(1, 2),
            shared=shared,
            gate_up_layout="halves",
        )
        return out.reshape(hidden_states.shape)

    return forward


def _check(experts: Any, experts_class: type) -> None:
    """Refuses experts whose parameters alone do not say what they compute."""
    reason = None
    kind: type = type(experts)
    if kind is not experts_class:
        reason = f"are a {kind.__name__}, not a {experts_class.__name__}: quantised, or with adapters"
    elif experts._forward_hooks or experts._forward_pre_hooks or getattr(experts, "_is_expert_parallel", False):
        reason = "have hooks, as tensor or expert parallelism sets them, which tilecrew would pass by"
    elif experts.config.hidden_act not in ("silu", "swish"):
        reason = f"have the activation {experts.config.hidden_act!r}, and tilecrew has silu"
    if reason is not None:
        raise ValueError(
            f"the experts of this model {reason}; call tilecrew.integrations.transformers.enable(moe=False) "
            "to leave mixture-of-experts blocks to transformers"
        )
