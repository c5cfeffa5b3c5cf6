"""What `tilecrew doctor` checks before ranks rely on it: memory that ranks share, links between GPUs, counting.

Every check is a Check, whatever it finds; nothing raises where hardware is wrong, and nothing waits without a limit.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilecrew._hardware import hardware_of
from tilecrew.parallel.launch import ProcessesError, run_processes
from tilecrew.parallel.signal import Signals
from tilecrew.parallel.tensor import ParallelTensor
from tilecrew.parallel.world import World, on_every_rank

LIMIT_SECONDS = 120.0
COMM_BLOCKS = (2, 4, 8, 16, 32)
ENOUGH = 0.9  # of the best bandwidth
BYTES = 64 * 2**20
PIECE = 4096  # int32 elements
NUM_BLOCKS, NUM_ADDS = 32, 2000


@dataclass(frozen=True)
class Check:
    """name: what was checked; is_right: None where it is a fact, not a check; detail: what was found."""

    name: str
    is_right: bool | None
    detail: str


def run_preflight() -> Iterator[Check]:
    """All checks that fit this machine, one after the other."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Check("GPUs", None, str(num_devices) if num_devices else "none that torch sees")
    yield from _guarded("shared memory between 2 processes", lambda: [_processes("cpu", 2)])
    for device in range(num_devices):
        yield from _guarded(f"GPU {device}", lambda device=device: _device_checks(device))  # type: ignore[misc]
    for reader in range(num_devices):
        for owner in range(num_devices):
            if reader != owner:
                name = f"GPU {reader} reads GPU {owner}"
                yield from _guarded(name, lambda a=reader, b=owner: _pair_checks(a, b))  # type: ignore[misc]
    if num_devices > 1:
        yield from _guarded(f"symmetric memory of {num_devices} processes", lambda: [_processes("cuda", num_devices)])


def _guarded(name: str, checks: Callable[[], Any]) -> Iterator[Check]:
    """The checks; one that raises is one that fails."""
    try:
        yield from checks()
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        yield Check(name, False, lines[-1] if lines else type(error).__name__)


def exchange(world: World) -> list[int]:
    """Every rank writes to every rank's memory, tells it, and reads what the others wrote; what it read."""
    rows = ParallelTensor((world.size, 1024), torch.int32, world)
    signals = Signals(world, 1)
    element = torch.arange(1024, dtype=torch.int32, device=world.device)
    with world.use():
        for peer in range(world.size):
            rows.peer(peer)[world.rank].copy_(element + 1000 * (world.rank + 1))
            signals.put(0, peer, 1)
        for writer in range(world.size):
            signals.wait(0, writer, 1)
        found = rows.local - element
    world.synchronize()
    world.barrier()
    world.synchronize()
    return found.amin(1).tolist() + found.amax(1).tolist()


def _processes(device: str, number: int) -> Check:
    kind = "shared memory between" if device == "cpu" else "symmetric memory of"
    name = f"{kind} {number} processes"
    wanted = [1000 * (rank + 1) for rank in range(number)] * 2
    try:
        found = run_processes(exchange, number, device=device, timeout_seconds=30, limit_seconds=LIMIT_SECONDS)
    except ProcessesError as error:
        rank, text = next(iter(sorted(error.errors.items())))
        return Check(name, False, f"rank {rank}: {text.strip().splitlines()[-1]}")
    is_right = all(values == wanted for values in found)
    return Check(name, is_right, "content, signals and barrier" if is_right else f"wrong content: {found}")


def _device_checks(device: int) -> Iterator[Check]:
    hardware = hardware_of(f"cuda:{device}")
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    facts = f"{hardware.name}, compute capability {hardware.capability[0]}.{hardware.capability[1]}, "
    yield Check(f"GPU {device}", None, f"{facts}{hardware.num_sms} multiprocessors, {total:.0f} GiB")
    if limit := hardware.triton_limit():
        yield Check(f"GPU {device} runs kernels", False, limit)
        return
    yield _count(device, device)
    yield _emulated_ranks(device)
    if torch.cuda.device_count() == 1:
        yield _comm_blocks(f"GPU {device}", device, device)


def _pair_checks(reader: int, owner: int) -> Iterator[Check]:
    name = f"GPU {reader} reads GPU {owner}"
    if not torch.cuda.can_device_access_peer(reader, owner):
        yield Check(name, False, "no peer access (topology, IOMMU, or the driver)")
        return
    source = torch.arange(2**20, dtype=torch.int32, device=f"cuda:{owner}") * 7
    target = torch.full((2**20,), -1, dtype=torch.int32, device=f"cuda:{reader}")
    # With its first copy in each direction torch opens the memory of either for the other.
    target[:1].copy_(source[:1])
    source[:1].copy_(target[:1])
    target.fill_(-1)
    _synchronize(reader, owner)
    _copy(source, target, 8)
    _synchronize(reader, owner)
    wrong = int((target.cpu() != source.cpu()).sum())
    detail = "content by loads over the link" if not wrong else f"{wrong} of {len(source)} elements are wrong"
    yield Check(name, wrong == 0, detail)
    yield _count(reader, owner)
    yield Check(f"{name}, copy engine", None, f"{_bandwidth(reader, owner, None):.0f} GB/s")
    yield _comm_blocks(name, reader, owner)


def _count(device: int, owner: int) -> Check:
    """Blocks of `device` add to a counter of `owner` while they copy from it."""
    kernels = importlib.import_module("tilecrew.parallel.kernel_preflight")
    counter = torch.zeros(1, dtype=torch.int32, device=f"cuda:{owner}")
    source = torch.zeros(NUM_BLOCKS * PIECE, dtype=torch.int32, device=f"cuda:{owner}")
    target = torch.zeros_like(source, device=f"cuda:{device}")
    _synchronize(device, owner)
    scope = "gpu" if device == owner else "sys"
    with torch.cuda.device(device):
        arguments = (counter, NUM_ADDS, source, target, source.numel(), scope, PIECE)
        kernels.count_kernel[(NUM_BLOCKS,)](*arguments, num_warps=4)
    _synchronize(device, owner)
    found, expected = int(counter), NUM_BLOCKS * NUM_ADDS
    if device == owner:
        return Check(f"GPU {device} counts under load", found == expected, f"{found} of {expected} additions")
    # Links without atomics are no fault: the library never adds to a peer's memory.
    detail = f"{found} of {expected} additions arrived (none are needed)"
    return Check(f"GPU {device} adds to GPU {owner}", None, detail)


def _emulated_ranks(device: int) -> Check:
    name = f"GPU {device}, two emulated ranks"
    worlds = World.emulated(2, device=f"cuda:{device}", timeout_seconds=10)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    repeats = 20
    for repeat in range(repeats + 1):
        if repeat == 1:
            for world in worlds:
                world.synchronize()
            with worlds[0].use():
                start.record()
        on_every_rank(worlds, World.barrier)
    with worlds[0].use():
        end.record()
    for world in worlds:
        world.synchronize()
    on_every_rank(worlds, World.close)
    return Check(name, True, f"a barrier takes {1e3 * start.elapsed_time(end) / repeats:.1f} us")


def _comm_blocks(name: str, reader: int, owner: int) -> Check:
    """How many blocks the link needs: the fewest that reach most of what the most reach."""
    speeds = {blocks: _bandwidth(reader, owner, blocks) for blocks in COMM_BLOCKS}
    chosen = next(blocks for blocks in COMM_BLOCKS if speeds[blocks] >= ENOUGH * max(speeds.values()))
    text = ", ".join(f"{blocks}: {speed:.0f}" for blocks, speed in speeds.items())
    return Check(f"{name}, communication blocks", None, f"{chosen} (GB/s by number of blocks: {text})")


def _bandwidth(reader: int, owner: int, num_blocks: int | None) -> float:
    """GB/s of a copy by that many blocks; by the copy engine where None."""
    source = torch.zeros(BYTES // 4, dtype=torch.int32, device=f"cuda:{owner}")
    target = torch.zeros_like(source, device=f"cuda:{reader}")
    _synchronize(reader, owner)
    with torch.cuda.device(reader):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(4):
            start.record()
            if num_blocks is None:
                target.copy_(source)
            else:
                _copy(source, target, num_blocks)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return BYTES / min(times[1:]) / 1e6


def _copy(source: torch.Tensor, target: torch.Tensor, num_blocks: int) -> None:
    kernels = importlib.import_module("tilecrew.parallel.kernel_preflight")
    with torch.cuda.device(target.device):
        kernels.copy_kernel[(num_blocks,)](source, target, source.numel(), PIECE, num_warps=8)


def _synchronize(*devices: int) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
