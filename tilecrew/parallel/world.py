"""World: the ranks that work together, and this rank's place among them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from tilecrew._hardware import hardware_of
from tilecrew._launches import LaunchMemory
from tilecrew.parallel import host_signal
from tilecrew.parallel.control import (
    EPOCH,
    Record,
    WaitError,
    as_int32,
    barrier_offset,
    control_length,
    record_offset,
)
from tilecrew.parallel.memory import Emulated, SharedMemory, SymmetricMemory, ordinary_tensors
from tilecrew.parallel.tensor import ParallelTensor

LONGEST_TIMEOUT = 3600.0
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
STREAMS_OF_A_RANK = 2
# torch has so many streams of a device, and hands them out in turn, again and again.
STREAMS_OF_TORCH = 32


class World:
    """One rank's view of a number of ranks. Made by `from_group` or `emulated`, not by calling the class.

    rank, size        this rank and the number of ranks
    device            where the parts of this rank's tensors are
    stream            the rank's own CUDA stream in an emulated world, else None: the current stream
    num_sms           multiprocessors this rank may fill: those of its GPU, shared by emulated ranks; 0 on the CPU
    timeout_seconds   longest wait for another rank; what takes longer ends in WaitError on every rank. Read-only
    side_stream       on a GPU, the stream of communication blocks beside the current one

    Methods that are called collective are called by every rank, in one order. A World is a context manager that closes
    itself; after an exception it does not wait for the others.
    """

    def __init__(
        self,
        provider: Any,
        rank: int,
        device: torch.device,
        timeout_seconds: float,
        first_epoch: int,
        streams: tuple[Any, Any] | None = None,
    ) -> None:
        self.provider, self.rank, self.size, self.device = provider, rank, provider.size, device
        self._timeout_seconds, self.first_epoch = timeout_seconds, first_epoch
        self.stream, self._sides = None, []
        if streams is not None:
            self.stream, self._sides = streams[0], [streams[1]]
        elif device.type == "cuda":
            self._sides = distinct_streams(device, 2)
        num_sharing = self.size if isinstance(provider, Emulated) else 1
        self.num_sms = hardware_of(device).num_sms // num_sharing
        #: What operators keep with this world, by their sizes.
        self.workspaces: dict[Any, Any] = {}
        self.launches = LaunchMemory()
        self._closed = False
        provider.agree(rank, f"timeout_seconds {timeout_seconds}, first_epoch {first_epoch}, device {device.type}")
        self.control = ParallelTensor((control_length(self.size),), torch.int32, self, self._begin)
        if device.type == "cuda":
            host_signal.load(self)
        self._wait_for_device()
        provider.meet()

    def _begin(self, control: torch.Tensor) -> None:
        for place in (EPOCH, *(barrier_offset(self.size, writer) for writer in range(self.size))):
            control[place] = as_int32(self.first_epoch)

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_seconds: float = 30.0,
        first_epoch: int = 0,
    ) -> "World":
        """One rank for each process of a torch.distributed group; collective.

        Args:
            group: None is the default group. It may be of any backend; the hosts talk over a gloo group of their own.
            device: "cuda" (the current device, or one by its number): the memory of ranks is torch's symmetric memory,
                all GPUs are in one host and reach each other. "cpu": memory that the processes of one host share. None:
                "cuda" where there is one.
            timeout_seconds: longest wait for another rank, above 0 and at most 3600. On GPUs hosts that make something
                together have 15 minutes, because one may compile what the others need not.
            first_epoch: where epochs begin; tests begin near 2^32.

        Raises ValueError for a bad argument, and on every rank where ranks differ in them or share a GPU.
        """
        _check_timeout(timeout_seconds)
        if not dist.is_initialized():
            raise ValueError("group must be one of an initialised torch.distributed; call init_process_group first")
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a CPU or a CUDA device, got {place}")
        provider: SharedMemory | SymmetricMemory
        if place.type == "cpu":
            provider = SharedMemory(group, timeout_seconds)
        else:
            place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
            provider = SymmetricMemory(group, timeout_seconds, place)
        _check_devices(provider, place)
        return cls(provider, provider.rank, place, timeout_seconds, first_epoch)

    @classmethod
    def emulated(
        cls,
        size: int,
        *,
        device: torch.device | str | None = None,
        timeout_seconds: float = 30.0,
        first_epoch: int = 0,
    ) -> tuple["World", ...]:
        """A World for each of `size` ranks that live in this process on one device: the same flags, scopes and kernels,
        only the link is missing. On a GPU each rank has its own stream and its share of multiprocessors.

        `on_every_rank` runs a function for each. Raises ValueError for a bad argument, and on a GPU where CUDA has
        already started with fewer hardware queues than the ranks' streams need (CUDA_DEVICE_MAX_CONNECTIONS): a
        stream that waits would block another one.
        """
        _check_timeout(timeout_seconds)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be an integer of at least 1, got {size!r}")
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.type == "cuda":
            _check_connections(size)
            place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
            if hardware_of(place).num_sms < size:
                raise ValueError(f"size must be at most the multiprocessors of {place}, got {size}")
        pairs: list[tuple[Any, Any] | None] = [None] * size
        if place.type == "cuda":
            streams = distinct_streams(place, STREAMS_OF_A_RANK * size)
            pairs = list(zip(streams[:size], streams[size:], strict=True))
        provider = Emulated(size, place)
        return tuple(cls(provider, rank, place, timeout_seconds, first_epoch, pairs[rank]) for rank in range(size))

    def allocate(
        self, signature: str, num_bytes: int, initialize: Callable[[torch.Tensor], None]
    ) -> list[torch.Tensor]:
        """Collective: one uint8 vector for each rank, of zeros that went through `initialize`.

        Raises ValueError on every rank where they differ in `signature`.
        """
        self.require_open()
        with ordinary_tensors():
            return self.provider.allocate(self.rank, signature, num_bytes, initialize)

    def agree(self, what: str) -> None:
        """Collective: raises ValueError on every rank where ranks differ in `what`, a text."""
        self.require_open()
        self.provider.agree(self.rank, what)

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the rank's device and stream current."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        if self.stream is None:
            return torch.cuda.device(self.device.index)  # by its number: a device is looked up first
        return self._use_stream()

    @contextlib.contextmanager
    def _use_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.device.index), torch.cuda.stream(self.stream):
            yield

    @property
    def timeout_seconds(self) -> float:
        """Fixed when the world is made: ranks have agreed on it, and launches that are remembered contain it."""
        return self._timeout_seconds

    @property
    def side_stream(self) -> Any:
        """A stream that is not the current one, and in an emulated world no stream of any other rank.

        What waits on it may be waited for by what is launched on the current stream later: on one stream with it, or
        with another rank, it would wait for what is behind itself.
        """
        current = torch.cuda.current_stream(self.device)
        return next(stream for stream in self._sides if stream != current)

    def barrier(self) -> None:
        """Collective: what every rank wrote before is visible to all behind it. On a GPU it is a kernel on the rank's
        stream, which the host does not wait for; on the CPU it raises WaitError where a rank does not come."""
        self.require_open()
        host_signal.barrier(self)

    def synchronize(self) -> None:
        """Waits for the rank's stream. Raises WaitError where a wait of any rank has failed."""
        self._wait_for_device()
        self.check()

    def check(self) -> None:
        """Raises WaitError where a wait of any rank has failed. On a GPU this waits for the rank's stream."""
        self.require_open()
        with self.use():
            control = self.control.local.tolist()
        for rank in range(self.size):
            first = record_offset(rank)
            if control[first]:
                raise WaitError(rank, Record(*control[first + 1 : first + 5]))

    def quiesce(self) -> None:
        """Collective: waits for the device's work and for all ranks, unless a wait has failed: then nobody may come."""
        self._wait_for_device()
        with self.use():
            failed = bool(self.control.local[0].item())
        if not failed:
            self.provider.meet()

    def close(self) -> None:
        """Collective: waits for all ranks, then lets go of the world's memory. Later use raises RuntimeError."""
        if not self._closed:
            self.quiesce()
            self._end()

    def require_open(self) -> None:
        """Raises RuntimeError where the world has been closed, and ValueError where its ranks have disagreed."""
        if self._closed:
            raise RuntimeError("this World has been closed")
        self.provider.check()

    def _end(self) -> None:
        self._closed = True
        self.workspaces.clear()
        self.provider.close()

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            with self.use():
                torch.cuda.current_stream().synchronize()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if error_type is None:
            self.close()
        elif not self._closed:
            self._end()


def on_every_rank(worlds: tuple[World, ...], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(world, *arguments) for each rank of an emulated world -> its results in the order of ranks.

    On the CPU ranks are threads, because they wait for each other; on a GPU kernels wait, and one thread launches for
    one rank after the other. There the function must not wait for the device, nor make worlds, tensors or operators,
    behind a barrier, a wait or an operator's call: what these wait for is launched for the next rank.
    Ranks' streams go on behind what the caller's stream has been given. The first error is raised when all have ended.
    """

    def call(world: World) -> Any:
        with world.use():
            return function(world, *arguments)

    if worlds[0].device.type == "cuda":
        caller = torch.cuda.current_stream(worlds[0].device)
        for world in worlds:
            if world.stream is not None and world.stream != caller:
                world.stream.wait_stream(caller)
        return [call(world) for world in worlds]
    with ThreadPoolExecutor(len(worlds)) as threads:
        futures = [threads.submit(call, world) for world in worlds]
    return [future.result() for future in futures]


def distinct_streams(device: torch.device, number: int) -> list[Any]:
    """That many different streams of torch. Raises ValueError where it has less."""
    if number > STREAMS_OF_TORCH:
        raise ValueError(
            f"size must be at most {STREAMS_OF_TORCH // STREAMS_OF_A_RANK} emulated ranks on a GPU: torch has "
            f"{STREAMS_OF_TORCH} streams of a device, a rank has {STREAMS_OF_A_RANK}"
        )
    found: list[Any] = []
    for _ in range(2 * STREAMS_OF_TORCH):  # others may draw between
        stream = torch.cuda.Stream(device)
        if stream not in found:
            found.append(stream)
        if len(found) == number:
            return found
    raise RuntimeError(f"torch gives only {len(found)} different streams of {device}, {number} are needed")


def check_num_comm_blocks(num_comm_blocks: int, num_resident: int) -> None:
    """The rule against deadlock: blocks that wait for others must leave room for those that they wait for.

    Raises ValueError unless 1 <= num_comm_blocks < num_resident.
    """
    if isinstance(num_comm_blocks, bool) or not isinstance(num_comm_blocks, int):
        raise TypeError(f"num_comm_blocks must be an integer, got {type(num_comm_blocks).__name__}")
    if not 1 <= num_comm_blocks < num_resident:
        raise ValueError(
            f"num_comm_blocks must be at least 1 and less than the {num_resident} blocks that are resident at once, "
            f"got {num_comm_blocks}"
        )


def _check_timeout(timeout_seconds: float) -> None:
    if not 0 < timeout_seconds <= LONGEST_TIMEOUT:
        raise ValueError(f"timeout_seconds must be above 0 and at most {LONGEST_TIMEOUT:.0f}, got {timeout_seconds}")


def _check_devices(provider: SharedMemory | SymmetricMemory, device: torch.device) -> None:
    """Every rank tells what it has, so that all raise."""
    identity = ""
    if device.type == "cuda":
        identity = str(torch.cuda.get_device_properties(device).uuid)
    found = provider.gather((device.type, os.uname().nodename, identity))
    if len({entry[:2] for entry in found}) > 1:
        kinds = "; ".join(f"rank {rank} has {kind} on {host}" for rank, (kind, host, _) in enumerate(found))
        raise ValueError(f"device must be of one kind, on one host, for all ranks: {kinds}")
    owners: dict[str, int] = {}
    for rank, (_, _, name) in enumerate(found):
        if name and name in owners:
            raise ValueError(f"device must be another GPU on every rank: ranks {owners[name]} and {rank} share {name}")
        owners[name] = rank


def _check_connections(size: int) -> None:
    needed = min(STREAMS_OF_A_RANK * size + 2, 32)
    if not torch.cuda.is_initialized():
        os.environ.setdefault(CONNECTIONS, str(max(needed, 8)))
    if int(os.environ.get(CONNECTIONS, "8")) < needed:
        raise ValueError(f"size {size} needs {CONNECTIONS}={needed} or more in the environment before CUDA starts")
