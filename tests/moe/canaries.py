"""Known bytes in front of every part of a parallel tensor and behind it: who writes beside his buffer changes them."""

import contextlib
from typing import NamedTuple

import torch

from tilecrew.parallel import World
from tilecrew.parallel.memory import ALIGNMENT

GUARD_BYTES = 16 * ALIGNMENT
VALUE = 0xA5  # no zero, no NaN, and no -1, in whatever dtype somebody writes


class Canary(NamedTuple):
    """signature: of the tensor that it guards; guards: uint8 vectors of rank `rank`'s part."""

    signature: str
    rank: int
    guards: tuple[torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def around_parallel_tensors(monkeypatch):
    """Every parallel tensor that is made inside gets guards; gives the list of its Canaries."""
    allocate, canaries = World.allocate, []

    def allocate_between(world, signature, num_bytes, initialize):
        inside = slice(GUARD_BYTES, GUARD_BYTES + num_bytes)

        def fill(part):
            part[: inside.start], part[inside.stop :] = VALUE, VALUE
            initialize(part[inside])

        parts = allocate(world, signature, num_bytes + 2 * GUARD_BYTES, fill)
        own = parts[world.rank]
        canaries.append(Canary(signature, world.rank, (own[: inside.start], own[inside.stop :])))
        return [part[inside] for part in parts]

    with monkeypatch.context() as patch:
        patch.setattr(World, "allocate", allocate_between)
        yield canaries


def check(canaries):
    """Raises AssertionError where a guard is not what it was. Waits for the device."""
    assert canaries
    for signature, rank, guards in canaries:
        for name, guard in zip(("in front of", "behind"), guards, strict=True):
            places = (guard != VALUE).nonzero().flatten()
            assert guard.numel() == GUARD_BYTES and places.numel() == 0, (
                f"{places.numel()} bytes {name} {signature} of rank {rank} were written, the first at {int(places[0])}"
            )
