"""Does the model compute the same with tilecrew as on transformers' own torch path? Logits of prefill and of every decode step."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

import tilecrew.integrations.transformers as integration

# Largest relative error ||tilecrew - transformers|| / ||transformers|| of logits. Both paths compute in float32 where the model is float32,
# in another order: about 1e-6 per operation. With a bfloat16 model each path rounds intermediate values to 8 bits in its own way, 0.4 %
# each, and now and then that sends a token to another expert.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Step:
    """One compared call of the model: what it is, and the relative error of its logits."""

    name: str
    error: float


@dataclass(frozen=True)
class Run:
    """One path's results: logits [1, T, vocabulary] of prefill, [1, vocabulary] of each decode step, and the tokens fed to the steps."""

    prefill: torch.Tensor
    decode: list[torch.Tensor]
    tokens: list[int]


@torch.inference_mode()
def run_path(model: Any, prompt: torch.Tensor, num_new_tokens: int, tokens: list[int] | None = None) -> Run:
    """Prefills `prompt` [1, T], then decodes with the cache: greedily, or feeding the given `tokens`.

    Feeding one path's tokens to the other keeps both on the same text even where two tokens are all but equally likely.
    """
    cache = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
    prefill = model(prompt, **cache).logits.float()
    decode: list[torch.Tensor] = []
    fed: list[int] = []
    last = prefill[:, -1]
    for step in range(num_new_tokens):
        token = int(last.argmax()) if tokens is None else tokens[step]
        fed.append(token)
        last = model(torch.tensor([[token]], device=prompt.device), **cache).logits[:, -1].float()
        decode.append(last)
    return Run(prefill, decode, fed)


def cache_argument(model: Any) -> str:
    """What a model's forward calls its cache: `cache` in newer releases of transformers, `past_key_values` before."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


def compare(actual: Run, expected: Run) -> list[Step]:
    """The errors of prefill and of each decode step."""
    steps = [Step("prefill", relative_error(actual.prefill, expected.prefill))]
    for index, (a, b) in enumerate(zip(actual.decode, expected.decode, strict=True)):
        steps.append(Step(f"decode step {index + 1}", relative_error(a, b)))
    return steps


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||, computed in float64; NaN where either has one, which no tolerance accepts."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def check_agreement(model: Any, prompt: torch.Tensor, num_new_tokens: int) -> tuple[list[Step], Run]:
    """Runs both paths on the same tokens. Returns the errors and tilecrew's run."""
    with integration.enabled():
        actual = run_path(model, prompt, num_new_tokens)
    with integration.torch_path():
        expected = run_path(model, prompt, num_new_tokens, actual.tokens)
    return compare(actual, expected), actual
