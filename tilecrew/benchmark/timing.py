"""Times of calls that take turns, the L2 cache flushed before each."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

MAX_ROUNDS, MIN_ROUNDS = 30, 3
FLUSHED_BYTES = 256 * 2**20


def in_turn(calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float]:
    """Median milliseconds of each; round after round, until the time or the rounds are over."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    flush = l2_flush(device)
    deadline = time.monotonic() + seconds
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.monotonic() > deadline:
            break
        for name, call in calls.items():
            flush.zero_()
            times[name].append(milliseconds_of(call, device))
    return {name: statistics.median(values) for name, values in times.items()}


def milliseconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """One call's; on a GPU between events on the current stream."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def l2_flush(device: torch.device) -> torch.Tensor:
    """Memory that takes the whole L2 cache of a GPU when it is written."""
    return torch.empty(FLUSHED_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device)
