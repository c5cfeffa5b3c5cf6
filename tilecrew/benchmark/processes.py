"""Times of calls: CUDA graphs, and several processes that measure together, with a GPU each."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from tilecrew.benchmark.timing import MAX_ROUNDS, MIN_ROUNDS, l2_flush, milliseconds_of
from tilecrew.parallel.world import World

WARM_UPS = 3  # calls of each, between processes
HELD_CYCLES = 400_000  # of a GPU's clock, some 0.2 ms: the host has put a graph on the stream by then


class Processes:
    """What the hosts of several processes say to each other while one GPU of each is measured: a gloo group of the
    default group's ranks, whose calls put nothing on any GPU. Making one is collective."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        """Collective: every rank's value, by rank."""
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def attempt(self, call: Callable[[], Any]) -> str:
        """Collective: calls; why it failed, on any rank, or ""."""
        reason = ""
        try:
            call()
        except Exception as error:
            reason = reason_of(error)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.gather(reason)) if text)


def graph_of(call: Callable[[], Any], device: torch.device, worlds: Iterable[World] = ()) -> Callable[[], Any]:
    """A captured CUDA graph of the call, with the streams of emulated worlds; the call itself on the CPU."""
    if device.type != "cuda":
        return call
    torch.cuda.synchronize()
    streams: list[Any] = [world.stream for world in worlds]
    graph = torch.cuda.CUDAGraph()
    # Threads of torch.distributed may ask about events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        call()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def slowest_in_turn(calls: dict[str, Callable[[], Any]], processes: Processes, seconds: float) -> dict[str, float]:
    """Collective: median over rounds of the slowest rank's milliseconds, of each, after warm-ups. All ranks start a
    call together, behind a barrier of their GPUs. Graphs are on the stream before it opens, so that what they take is
    the GPU's time; of a call that the host launches step by step it is the host's, too, where that is longer."""
    world = processes.world
    times: dict[str, list[float]] = {name: [] for name in calls}
    flush = l2_flush(world.device)
    for call in calls.values():
        for _ in range(WARM_UPS):
            call()
            world.synchronize()
            processes.gather(None)
    deadline = time.monotonic() + seconds
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and any(processes.gather(time.monotonic() > deadline)):
            break
        for name, call in calls.items():
            flush.zero_()
            processes.gather(None)
            if isinstance(getattr(call, "__self__", None), torch.cuda.CUDAGraph):
                torch.cuda._sleep(HELD_CYCLES)
            world.barrier()
            value = milliseconds_of(call, world.device)
            world.synchronize()
            times[name].append(max(processes.gather(value)))
    return {name: statistics.median(values) for name, values in times.items()}


def reason_of(error: Exception) -> str:
    """A failure in a row of a record."""
    return f"{type(error).__name__}: {error}"[:500]
