"""ParallelTensor: one tensor on every rank, each of which every rank can address."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tilecrew.parallel.memory import ordinary_tensors

if TYPE_CHECKING:
    from tilecrew.parallel.world import World


class ParallelTensor:
    """A contiguous tensor of one shape on every rank of a world, each part readable and writable by all.

    Creating one is collective: every rank does so, in the same order and with the same arguments.

    shape       sizes of each rank's part
    dtype       of its elements
    world       the World of this rank
    initialize  what is done to the zeros of every part before any rank gets to see it; None: nothing
    local       this rank's part
    offsets     [W] int64 on the device of the world: bytes from the address of `local` to that of each rank's part.
                Kernels take `local` and `offsets`; the number of ranks need not be known when they are compiled.

    A view of a part keeps its memory alive, also behind `destroy`; between GPUs its owner may then put something else
    there. Parts may be updated in place whether they were made under torch.inference_mode or outside of it.

    Raises TypeError or ValueError for a bad argument, and ValueError on every rank where ranks differ.
    """

    @ordinary_tensors()
    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        world: "World",
        initialize: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        sizes = tuple(shape)
        if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
            raise TypeError(f"shape must be integers, got {sizes}")
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape must have no negative sizes, got {sizes}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
        self.shape, self.dtype, self.world = sizes, dtype, world
        num_bytes = math.prod(sizes) * dtype.itemsize

        def fill(part: torch.Tensor) -> None:
            if initialize is not None:
                initialize(part.view(dtype).view(sizes))

        parts = world.allocate(f"a tensor of shape {sizes}, {dtype}", num_bytes, fill)
        self._parts: list[torch.Tensor] | None = [part.view(dtype).view(sizes) for part in parts]
        own = parts[world.rank].data_ptr()
        self._offsets = torch.tensor([part.data_ptr() - own for part in parts], dtype=torch.int64).to(world.device)

    @property
    def local(self) -> torch.Tensor:
        return self.peer(self.world.rank)

    @property
    def offsets(self) -> torch.Tensor:
        self._alive()
        return self._offsets

    def peer(self, rank: int) -> torch.Tensor:
        """The part of `rank`, on this rank's device. Raises ValueError where there is no such rank."""
        parts = self._alive()
        if not 0 <= rank < len(parts):
            raise ValueError(f"rank must be from 0 to {len(parts) - 1}, got {rank}")
        return parts[rank]

    def destroy(self) -> None:
        """Collective: when all ranks have called it and their work on the device is done, this rank lets its part go.
        Later use raises RuntimeError; a second call does nothing."""
        if self._parts is not None:
            self.world.quiesce()
            self._parts = None

    def _alive(self) -> list[torch.Tensor]:
        self.world.require_open()
        if self._parts is None:
            raise RuntimeError("this ParallelTensor has been destroyed")
        return self._parts
