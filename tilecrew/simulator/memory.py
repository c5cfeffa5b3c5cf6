"""Shared memory of one block: data, barriers, and who is known to have finished with what.

Races are found by vector clocks, not by luck: every role and every asynchronous copy or product is an actor, a barrier
passes on what its arrivals knew, and two accesses of one element, one of them a write, are a race unless the later
actor knew of the earlier access. That holds for every order in which the actors may run, whatever order was simulated.
Ordinary stores need, besides, a fence before the asynchronous proxy (TMA, wgmma) reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tilecrew.simulator.values import ELEMENT_BYTES, FaultError

MAX_ACTORS = 4096


@dataclass
class Actor:
    """A role, or one asynchronous operation. clock[a]: how many events of actor a this one knows to be over."""

    index: int
    name: str
    clock: np.ndarray

    def tick(self) -> None:
        self.clock[self.index] += 1


@dataclass
class Access:
    """One access that later ones are checked against. epoch: the actor's own count at that time.

    has_fences: every thread that stored has fenced since. fenced_epoch: when a barrier made each know of the others'.
    """

    actor: Actor
    epoch: int
    elements: np.ndarray
    is_write: bool
    is_async: bool
    location: str
    has_fences: bool = False
    fenced_epoch: int | None = None


@dataclass
class Barrier:
    """An mbarrier: `count` arrivals and the announced bytes complete a phase. clock: what the phase's arrivals knew."""

    count: int
    location: str
    arrivals: int = 0
    bytes_due: int = 0
    phase: int = 0
    clock: np.ndarray = field(default_factory=lambda: np.zeros(MAX_ACTORS, np.int64))
    completed_clock: np.ndarray = field(default_factory=lambda: np.zeros(MAX_ACTORS, np.int64))

    def has_completed(self, parity: int) -> bool:
        """Whether the last phase of this parity is over, as mbarrier.try_wait.parity tells it."""
        return (self.phase & 1) != (parity & 1)

    def arrive(self, clock: np.ndarray, count: int, where: str) -> None:
        self.arrivals += count
        if self.arrivals > self.count:
            raise FaultError(f"{where}: arrival {self.arrivals} at a barrier of {self.count} ({self.location})")
        np.maximum(self.clock, clock, out=self.clock)
        self.complete()

    def land(self, clock: np.ndarray, num_bytes: int) -> None:
        self.bytes_due -= num_bytes
        np.maximum(self.clock, clock, out=self.clock)
        self.complete()

    def complete(self) -> None:
        if self.arrivals == self.count and self.bytes_due == 0:
            self.completed_clock = self.clock.copy()
            self.arrivals, self.phase = 0, self.phase + 1


@dataclass(eq=False)
class Allocation:
    """Bytes of shared memory, kept as elements of one width. accesses: those that a later one may race with."""

    name: str
    element: str
    data: np.ndarray
    written: np.ndarray
    accesses: list[Access] = field(default_factory=list)
    barriers: dict[int, Barrier] = field(default_factory=dict)


@dataclass(frozen=True)
class Tile:
    """A view: for every logical element its index in the allocation."""

    allocation: Allocation
    elements: np.ndarray


class SharedMemory:
    """All allocations of a block, and the actors that use them."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.num_actors = 0

    def actor(self, name: str, parent: Actor | None = None) -> Actor:
        """A new actor that knows what its parent knows."""
        if self.num_actors == MAX_ACTORS:
            raise ValueError(f"more than {MAX_ACTORS} roles and asynchronous operations in one block")
        clock = np.zeros(MAX_ACTORS, np.int64) if parent is None else parent.clock.copy()
        actor = Actor(self.num_actors, name, clock)
        actor.clock[actor.index] = 1
        self.num_actors += 1
        return actor

    def allocate(self, name: str, element: str, num_elements: int) -> Allocation:
        data = np.zeros(num_elements, np.int64 if element.startswith("i") else np.float32)
        allocation = Allocation(name, element, data, np.zeros(num_elements, bool))
        self.allocations.append(allocation)
        return allocation

    def read(self, actor: Actor, tile: Tile, location: str, is_async: bool) -> np.ndarray:
        allocation, elements = tile.allocation, tile.elements
        if not allocation.written[elements].all():
            raise FaultError(f"{location}: {actor.name} reads shared memory that nobody wrote ({allocation.name})")
        self._check(actor, tile, False, is_async, location)
        return allocation.data[elements]

    def write(self, actor: Actor, tile: Tile, values: np.ndarray, location: str, is_async: bool) -> None:
        self._check(actor, tile, True, is_async, location)
        tile.allocation.data[tile.elements] = values
        tile.allocation.written[tile.elements] = True

    def fence(self, actor: Actor) -> None:
        """fence.proxy.async of every thread: each one's ordinary stores so far can be seen by asynchronous reads.

        A thread that goes on to signal knows of the others' fences only behind the next barrier of the role.
        """
        for access in self._stores_of(actor):
            access.has_fences = True

    def barrier(self, actor: Actor) -> None:
        """A barrier of all threads of a role."""
        for access in self._stores_of(actor):
            if access.has_fences and access.fenced_epoch is None:
                access.fenced_epoch = int(actor.clock[actor.index])

    def _stores_of(self, actor: Actor) -> Iterator[Access]:
        for allocation in self.allocations:
            for access in allocation.accesses:
                if access.actor is actor and access.is_write and not access.is_async:
                    yield access

    def _check(self, actor: Actor, tile: Tile, is_write: bool, is_async: bool, location: str) -> None:
        allocation = tile.allocation
        touched = np.zeros(allocation.data.shape, bool)
        touched[tile.elements] = True
        kept = []
        for earlier in allocation.accesses:
            overlap = earlier.elements & touched
            if (is_write or earlier.is_write) and overlap.any():
                self._compare(earlier, actor, is_write, is_async, location, allocation)
                if is_write:  # from here on this write stands for the earlier access
                    earlier.elements &= ~touched
            if earlier.elements.any():
                kept.append(earlier)
        kept.append(Access(actor, int(actor.clock[actor.index]), touched, is_write, is_async, location))
        allocation.accesses = kept

    def _compare(
        self, earlier: Access, actor: Actor, is_write: bool, is_async: bool, location: str, allocation: Allocation
    ) -> None:
        if earlier.actor is not actor and actor.clock[earlier.actor.index] < earlier.epoch:
            first, second = ("writes" if access else "reads" for access in (earlier.is_write, is_write))
            raise FaultError(
                f"race on {allocation.name}: {earlier.actor.name} {first} at {earlier.location}, "
                f"{actor.name} {second} at {location}, and nothing orders them"
            )
        is_read_of_store = is_async and not is_write and earlier.is_write and not earlier.is_async
        epoch = earlier.fenced_epoch
        if is_read_of_store and (epoch is None or actor.clock[earlier.actor.index] < epoch):
            raise FaultError(
                f"{location}: {actor.name} reads {allocation.name} through the asynchronous proxy, but "
                f"{earlier.actor.name} wrote it at {earlier.location} without a fence and a barrier behind it"
            )


def num_bytes(tile: Tile) -> int:
    """Size of a tile."""
    return tile.elements.size * ELEMENT_BYTES[tile.allocation.element]
