"""Does the model compute the same with tilecrew as on transformers' own torch path? Logits of prefill and of decode.

In float32 both paths do the same arithmetic in another order: every call must agree to FLOAT32_TOLERANCE.

In bfloat16 and float16 each path rounds in its own places, and now and then that sends a token to another expert, which
moves all its logits. How much this is worth depends on the model, so it is measured: transformers' path runs in float32
too, with the same weights, and tilecrew may differ from transformers by at most HALF_FACTOR times what transformers in
half precision differs from that. The decode steps are judged together there, since one step is one token: it changes
experts or it does not.
"""

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

import tilecrew.integrations.transformers as integration

FLOAT32_TOLERANCE = 1e-4
HALF_FACTOR = 2.0


@dataclass(frozen=True)
class Check:
    """One compared call of the model, or all decode steps: the relative error of its logits, and what is allowed."""

    name: str
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """False also where the error is NaN."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Run:
    """One path's results: logits [1, T, vocabulary] of prefill and [1, vocabulary] of each decode step, and the tokens
    that were fed to the steps."""

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


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in float64; NaN where either has one, which no tolerance accepts."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def check_agreement(model: Any, prompt: torch.Tensor, num_new_tokens: int) -> tuple[list[Check], Run]:
    """Runs both paths on the same tokens. Returns the checks and tilecrew's run."""
    with integration.enabled():
        actual = run_path(model, prompt, num_new_tokens)
    with integration.torch_path():
        expected = run_path(model, prompt, num_new_tokens, actual.tokens)
    if model.dtype == torch.float32:
        return _checks_of_calls(actual, expected), actual
    wide = copy.deepcopy(model).float()
    with integration.torch_path():
        truth = run_path(wide, prompt, num_new_tokens, actual.tokens)
    return _checks_together(actual, expected, truth), actual


def _checks_of_calls(actual: Run, expected: Run) -> list[Check]:
    checks = [Check("prefill", relative_error(actual.prefill, expected.prefill), FLOAT32_TOLERANCE)]
    for index, (a, b) in enumerate(zip(actual.decode, expected.decode, strict=True)):
        checks.append(Check(f"decode step {index + 1}", relative_error(a, b), FLOAT32_TOLERANCE))
    return checks


def _checks_together(actual: Run, expected: Run, truth: Run) -> list[Check]:
    names = ["prefill"] + ([f"decode, {len(actual.decode)} steps together"] if actual.decode else [])

    def errors(a: Run, b: Run) -> list[float]:
        pairs = [(a.prefill, b.prefill)] + ([(torch.cat(a.decode), torch.cat(b.decode))] if a.decode else [])
        return [relative_error(x, y) for x, y in pairs]

    allowed = HALF_FACTOR * max(errors(expected, truth))
    return [Check(name, error, allowed) for name, error in zip(names, errors(actual, expected), strict=True)]
