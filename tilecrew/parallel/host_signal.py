"""The host's side of signals between ranks: on a GPU it launches kernel_signal, on the CPU it does the same itself."""

import importlib
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from tilecrew._launches import launch
from tilecrew.parallel.control import (
    ABORT,
    BARRIER_SLOT,
    EPOCH,
    Record,
    as_int32,
    barrier_offset,
    control_length,
    is_reached,
    record_offset,
)

if TYPE_CHECKING:
    from tilecrew.parallel.world import World

PAUSE_SECONDS = 20e-6
_FIRST, _SECOND = threading.Lock(), threading.Lock()


def kernels() -> Any:
    """The module of device code, loaded by who launches it."""
    return importlib.import_module("tilecrew.parallel.kernel_signal")


def load(world: "World") -> None:
    """Launches the kernels once, so that CUDA has loaded them before one waits: nobody is told, nothing waited for."""
    with world.use():
        control = torch.zeros(control_length(world.size), dtype=torch.int32, device=world.device)
        offsets, timeout = world.control.offsets, nanoseconds(world)
        kernels().barrier_kernel[(1,)](control, offsets, world.rank, 0, timeout, num_warps=1)
        # This rank tells itself, and waits for what is there.
        kernels().put_kernel[(1,)](control, offsets, 0, world.rank, world.rank, world.size, 0, num_warps=1)
        arguments = (control, offsets, world.rank, world.size, timeout)
        kernels().wait_kernel[(1,)](control, 0, 0, 0, *arguments, num_warps=1)


def fence() -> None:
    """Orders the memory accesses of this thread: nothing passes an unlock and the lock behind it."""
    with _FIRST:
        pass
    with _SECOND:
        pass


def nanoseconds(world: "World") -> int:
    """The longest wait, as kernels take it."""
    return int(world.timeout_seconds * 1e9)


def barrier(world: "World") -> None:
    """World.barrier."""
    control = world.control
    if world.device.type == "cuda":
        with world.use():
            tensors = (control.local, control.offsets)
            arguments = (*tensors, world.rank, world.size, nanoseconds(world))
            world.launches.run(
                "barrier", tensors, lambda: launch(kernels().barrier_kernel, 1, arguments, {"num_warps": 1})
            )
        return
    epoch = as_int32(int(control.local[EPOCH]) + 1)
    fence()
    for peer in range(world.size):
        control.peer(peer)[barrier_offset(world.size, world.rank)] = epoch
    slots = [(BARRIER_SLOT, w, control.local[barrier_offset(world.size, w)]) for w in range(world.size)]
    wait_on_host(world, slots, epoch)
    control.local[EPOCH] = epoch


def wait_on_host(world: "World", slots: Iterable[tuple[int, int, Any]], expected: int) -> None:
    """Waits for flags in host memory, each given as (slot, writer, element). One deadline holds for all of them.

    A wait past it tells every rank and raises WaitError; so does a wait that another rank's failure ends.
    """
    deadline = time.monotonic() + world.timeout_seconds
    for slot, writer, element in slots:
        seen = int(element)
        while not is_reached(seen, expected):
            if int(world.control.local[ABORT]):
                fence()
                world.check()
            if time.monotonic() > deadline:
                publish(world, Record(slot, writer, expected, seen))
                world.check()
            time.sleep(PAUSE_SECONDS)
            seen = int(element)
    fence()


def publish(world: "World", record: Record) -> None:
    """Tells every rank that a wait of this one has failed."""
    first = record_offset(world.rank)
    for peer in range(world.size):
        control = world.control.peer(peer)
        for index, value in enumerate(record):
            control[first + 1 + index] = value
        fence()
        control[first] = 1
        fence()
        control[ABORT] = 1
