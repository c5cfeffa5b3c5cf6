"""Signals: numbered slots through which ranks tell each other how far they are."""

import torch

from tilecrew.parallel import host_signal
from tilecrew.parallel.control import as_int32
from tilecrew.parallel.tensor import ParallelTensor
from tilecrew.parallel.world import World


class Signals:
    """Slots with one writer each: on every rank, slot s has one cell for each rank that may write it.

    Creating them is collective. A cell holds an epoch, a number that only grows, by less than 2^31 between a wait and
    the write that it waits for; it may pass 2^32. Nothing is ever reset, so that a late reader misses nothing, and a
    cell is only polled by the rank whose memory it is in.

    num_slots     slots, at least 1
    cells         ParallelTensor [num_slots, W] int32; element [s, w] of a rank's part is written by rank w only
    first_epoch   what cells hold at the beginning

    On a GPU `put` and `wait` are kernels on the rank's stream: a put is seen behind everything before it on the
    stream, and a wait holds back everything behind it. A wait that fails shows at `World.synchronize`. On the CPU both
    act at once, and the wait raises.
    """

    def __init__(self, world: World, num_slots: int, first_epoch: int = 0) -> None:
        if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 1:
            raise ValueError(f"num_slots must be an integer of at least 1, got {num_slots!r}")
        world.agree(f"first_epoch {first_epoch} of signals")
        self.world, self.num_slots = world, num_slots
        first = as_int32(first_epoch)
        self.cells = ParallelTensor((num_slots, world.size), torch.int32, world, lambda part: part.fill_(first))

    def put(self, slot: int, peer: int, epoch: int) -> None:
        """Writes `epoch` to this rank's cell of `slot` on rank `peer`, behind everything this rank has written."""
        self._check(slot, "peer", peer)
        world, value = self.world, as_int32(epoch)
        if world.device.type == "cuda":
            with world.use():
                host_signal.kernels().put_kernel[(1,)](
                    self.cells.local, self.cells.offsets, slot, peer, world.rank, world.size, value, num_warps=1
                )
            return
        host_signal.fence()
        self.cells.peer(peer)[slot, world.rank] = value

    def wait(self, slot: int, writer: int, epoch: int) -> None:
        """Waits until rank `writer` has written `epoch` or a later one to `slot` of this rank."""
        self._check(slot, "writer", writer)
        world, value = self.world, as_int32(epoch)
        if world.device.type == "cuda":
            control = world.control
            arguments = (control.local, control.offsets, world.rank, world.size, host_signal.nanoseconds(world))
            with world.use():
                host_signal.kernels().wait_kernel[(1,)](self.cells.local, slot, writer, value, *arguments, num_warps=1)
            return
        host_signal.wait_on_host(world, [(slot, writer, self.cells.local[slot, writer])], value)

    def destroy(self) -> None:
        """Collective; see ParallelTensor.destroy."""
        self.cells.destroy()

    def _check(self, slot: int, name: str, rank: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot must be from 0 to {self.num_slots - 1}, got {slot}")
        if not 0 <= rank < self.world.size:
            raise ValueError(f"{name} must be from 0 to {self.world.size - 1}, got {rank}")
