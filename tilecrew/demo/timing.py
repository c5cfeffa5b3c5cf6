"""Prefill time against sequence length, tilecrew beside transformers' torch path: whole model, and operator alone."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import tilecrew.integrations.transformers as integration
from tilecrew.demo.model import HEAD_DIM, ModelSize

PATHS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "tilecrew": integration.enabled,
    "transformers": integration.torch_path,
}

# Limits for slow machines, and for busy ones, where torch's threads wait for each other. Seconds after which no
# further repeat of a point is started, and after which no longer prompt is started.
POINT_SECONDS = 4.0
TOTAL_SECONDS = 45.0


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one path at one sequence length; what: "operator" or "model"."""

    what: str
    path: str
    num_tokens: int
    milliseconds: float


def measure(
    model: Any, size: ModelSize, prompts: list[torch.Tensor], repeats: int, advance: Callable[[], None]
) -> list[Timing]:
    """Times every prompt [1, T] on both paths, in order, and leaves the rest out once TOTAL_SECONDS have passed.

    `advance` is called after each of at most 2 * len(prompts) measured pairs.
    """
    timings: list[Timing] = []
    start = time.perf_counter()
    for prompt in prompts:
        if timings and time.perf_counter() - start > TOTAL_SECONDS:
            break
        inputs = operator_inputs(size, prompt.shape[1], model.dtype, prompt.device)
        calls: dict[str, Callable[[], Any]] = {
            "operator": functools.partial(_call_operator, *inputs),
            "model": functools.partial(model, prompt, use_cache=False, logits_to_keep=1),
        }
        for what, call in calls.items():
            for path, milliseconds in _time_paths(call, repeats, prompt.device):
                timings.append(Timing(what, path, prompt.shape[1], milliseconds))
            advance()
    return timings


def operator_inputs(size: ModelSize, num_tokens: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """query, key, value, g, beta as a layer passes them: views of one channels-first tensor, g in float32."""
    generator = torch.Generator().manual_seed(num_tokens)
    widths = [heads * HEAD_DIM for heads in (size.num_key_heads, size.num_key_heads, size.num_value_heads)]
    mixed = torch.randn(1, sum(widths), num_tokens, generator=generator).to(device, dtype).transpose(1, 2)
    q, k, v = (part.reshape(1, num_tokens, -1, HEAD_DIM) for part in mixed.split(widths, dim=-1))
    gates = torch.randn(2, 1, num_tokens, size.num_value_heads, generator=generator).to(device)
    return [q, k, v, torch.nn.functional.logsigmoid(gates[0] + 3), gates[1].sigmoid().to(dtype)]


def speed_up(timings: list[Timing], what: str) -> list[tuple[int, float]]:
    """(sequence length, time of transformers / time of tilecrew), by length."""
    by_key = {(timing.path, timing.num_tokens): timing.milliseconds for timing in timings if timing.what == what}
    lengths = sorted({num_tokens for _, num_tokens in by_key})
    return [(n, by_key["transformers", n] / by_key["tilecrew", n]) for n in lengths]


def _call_operator(*inputs: torch.Tensor) -> None:
    """The operator that a Qwen3-Next layer finds in its module: that of the path in force."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    q, k, v, g, beta = inputs
    getattr(modeling, integration.CHUNK)(q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)


@torch.inference_mode()
def _time_paths(call: Callable[[], Any], repeats: int, device: torch.device) -> Iterator[tuple[str, float]]:
    """Median of `repeats` runs after one that is not counted; of fewer where they pass POINT_SECONDS.

    The paths take turns, so that a slow moment hits both.
    """
    samples: dict[str, list[float]] = {path: [] for path in PATHS}
    start = time.perf_counter()
    for repeat in range(repeats + 1):
        if repeat > 1 and time.perf_counter() - start > POINT_SECONDS:
            break
        for path, context in PATHS.items():
            with context():
                seconds = _seconds(call, device)
            if repeat > 0:
                samples[path].append(seconds)
    for path, seconds_of_path in samples.items():
        yield path, 1e3 * statistics.median(seconds_of_path)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
