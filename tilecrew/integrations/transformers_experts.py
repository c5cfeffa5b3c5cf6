"""The sparse mixture-of-experts blocks of transformers on `tilecrew.moe_forward`; part of `integrations.transformers`.

A block's router and its shared expert stay transformers' own modules, so that what hooks or adapts them keeps working.
Replaced is the loop over experts, and the sum behind it: every token's experts and the shared expert are added in
float32 and rounded once.

The forward is replaced in the block's class. A model whose modules were given forwards of their own before (accelerate
does so where a model is spread over several devices, or offloaded) keeps those: enable before such a model is loaded.

`spread_experts` gives each rank of a World its part of a model's experts. The rest of the model stays whole everywhere:
each rank runs it on tokens of its own, and only at its mixture-of-experts blocks do ranks meet.
"""

import importlib
import importlib.util
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import tilecrew
from tilecrew.moe.routing import expert_range

if TYPE_CHECKING:
    from tilecrew.parallel.world import World

#: Modeling module -> classes of its block and of the experts inside. What the installed version lacks is skipped.
BLOCKS = {
    "qwen3_next": ("Qwen3NextSparseMoeBlock", "Qwen3NextExperts"),
    "qwen3_5_moe": ("Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeExperts"),
}

# What `replace` found: {class of the block: its forward}. Empty while nothing is replaced.
_originals: dict[type, Callable[..., torch.Tensor]] = {}


class _Spread(NamedTuple):
    world: "World"
    capacity: int
    num_experts: int  # of all ranks


# The modules of experts of which this rank has a part.
_spread: weakref.WeakKeyDictionary[torch.nn.Module, _Spread] = weakref.WeakKeyDictionary()


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


@torch.no_grad()
def spread_experts(model: torch.nn.Module, world: "World", capacity: int) -> int:
    """Leaves this rank of a World its part of the experts of every mixture-of-experts block of `model`, and returns the
    number of blocks. Collective: every rank does so with the same model.

    Rank r keeps the experts `tilecrew.moe.expert_range(r, E, world.size)` of each block, in new parameters; the memory
    of the others is free when nothing else holds it. Routers, shared experts and all other layers stay whole on every
    rank. With `enable()` each rank then calls the model on tokens of its own, and gets their outputs; the ranks must
    make the same number of forwards. transformers' own path cannot run such a model any more and raises.

    Args:
        model: a model, or a part of one, on the device of the world and in its final dtype (on a GPU bfloat16 or
            float16). Its `state_dict` has this rank's experts afterwards: load checkpoints before.
        world: this rank's tilecrew.parallel.World. Emulated ranks have a model each.
        capacity: the most tokens, B * T, of any rank's forward; memory is allocated for it once.

    Raises ValueError where the model has no such blocks, where its experts are spread already, are not of a kind that
    tilecrew runs or on another device, and on every rank where ranks differ in sizes.
    """
    from tilecrew.moe.workspace import MoESizes, MoEWorkspace
    from tilecrew.parallel.memory import ordinary_tensors

    blocks = _blocks_of(model)
    if not blocks:
        known = ", ".join(block for block, _ in BLOCKS.values())
        raise ValueError(f"model must have mixture-of-experts blocks ({known}), got a {type(model).__name__}")
    for block, experts_class in blocks:
        _check(block.experts, experts_class)
        if block.experts in _spread:
            raise ValueError("model must have all its experts, those of this one have been spread already")
        if block.experts.down_proj.device != world.device:
            raise ValueError(
                f"model must be on the device of the world, {world.device}, got experts on "
                f"{block.experts.down_proj.device}"
            )
    for block, _ in blocks:
        experts = block.experts
        num_experts, hidden_size, intermediate_size = experts.down_proj.shape
        dtype = experts.down_proj.dtype
        sizes = MoESizes(capacity, block.gate.top_k, num_experts, hidden_size, intermediate_size, dtype)
        if sizes not in world.workspaces:
            MoEWorkspace(world, sizes)
        own = expert_range(world.rank, num_experts, world.size)
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name)
            with ordinary_tensors():
                part = whole[own.start : own.stop].clone()
                setattr(experts, name, torch.nn.Parameter(part, requires_grad=whole.requires_grad))
        experts.forward = _refuse_a_part
        _spread[experts] = _Spread(world, capacity, num_experts)
    return len(blocks)


def _blocks_of(model: torch.nn.Module) -> list[tuple[Any, type]]:
    """The blocks in a model, each with the class that its experts should have."""
    classes = {}
    for name, (block_name, experts_name) in BLOCKS.items():
        path = f"transformers.models.{name}"
        if importlib.util.find_spec(path) is not None:
            module = importlib.import_module(f"{path}.modeling_{name}")
            if hasattr(module, block_name) and hasattr(module, experts_name):
                classes[getattr(module, block_name)] = getattr(module, experts_name)
    return [(module, classes[type(module)]) for module in model.modules() if type(module) in classes]


def _refuse_a_part(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError(
        "this model has only this rank's experts (spread_experts), which transformers' own path cannot run; call "
        "tilecrew.integrations.transformers.enable()"
    )


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
            **(_spread[self.experts]._asdict() if self.experts in _spread else {}),
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
