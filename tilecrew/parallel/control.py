"""The control block that every rank of a world has, and epochs: what the host and the kernels must agree on.

Elements are int32, and each entry has a line of 128 bytes of its own. See kernel_signal for who writes what.
"""

from typing import NamedTuple

LINE = 32  # elements
ABORT = 0
EPOCH = LINE
RECORDS = 2 * LINE
BARRIER_SLOT = -1  # the number by which records name the barrier


class Record(NamedTuple):
    """What a wait has failed on. slot: its number, -1 for the barrier; writer: the rank it waited for; expected and
    seen: epochs."""

    slot: int
    writer: int
    expected: int
    seen: int


class WaitError(RuntimeError):
    """A wait between ranks took too long; every rank of the world raises it.

    rank      whose wait it was
    record    what it waited for
    """

    def __init__(self, rank: int, record: Record) -> None:
        self.rank, self.record = rank, record
        what = "at the barrier" if record.slot == BARRIER_SLOT else f"for slot {record.slot}"
        super().__init__(
            f"rank {rank} waited too long {what}: rank {record.writer} should have written epoch "
            f"{record.expected} or later, seen {record.seen}"
        )

    def __reduce__(self) -> tuple:
        return WaitError, (self.rank, self.record)


def control_length(num_ranks: int) -> int:
    """Elements of a control block."""
    return RECORDS + 2 * num_ranks * LINE


def record_offset(rank: int) -> int:
    """Where rank `rank` says what its wait has failed on: 1, then its Record."""
    return RECORDS + rank * LINE


def barrier_offset(num_ranks: int, writer: int) -> int:
    """The barrier slot that rank `writer` writes."""
    return RECORDS + (num_ranks + writer) * LINE


def as_int32(epoch: int) -> int:
    """The epoch modulo 2^32 as int32 holds it."""
    return (epoch + 2**31) % 2**32 - 2**31


def is_reached(seen: int, expected: int) -> bool:
    """seen >= expected for epochs less than 2^31 apart, whatever they have wrapped around."""
    return (seen - expected) % 2**32 < 2**31
