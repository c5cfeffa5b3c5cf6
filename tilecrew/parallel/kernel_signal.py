"""Waits between ranks on a GPU, the barrier, and signals behind a kernel.

Computes     nothing: flags only.
Roles        one block of one warp.
Hand-offs    slots (int32, scope sys), each written by one rank only and polled where it lies, never over a link:
                 barrier   slots[writer] of every rank <- the writer's epoch
                 notify    slots[slot][writer] <- the epoch of an operator
             What is compared are epochs, which live in device memory and only grow; nothing is reset.
Timeline     barrier   epoch + 1 -> slot on every rank -> wait for the own slots
             notify    the epoch -> all slots on every rank

The control block of a rank, int32, one line of 128 bytes each:
    0              abort: not 0 when a wait of any rank has failed
    1              epoch of the barrier
    2 + w          what rank w's wait failed on: 1, slot, writer, expected, seen
    2 + W + w      barrier slot, written by rank w

A wait that takes too long writes its record to every rank and sets abort there; all waits of all ranks end then.
"""

import triton
import triton.language as tl

from tilecrew.device.signal import (
    REACHED,
    TIMED_OUT,
    fence,
    peer_pointer,
    store_release,
    wait_until_reached,
)
from tilecrew.parallel import control as layout

LINE = tl.constexpr(layout.LINE)
EPOCH = tl.constexpr(layout.EPOCH)
RECORDS = tl.constexpr(layout.RECORDS)
BARRIER_SLOT = tl.constexpr(layout.BARRIER_SLOT)


@triton.jit
def wait_for_rank(flag, expected, slot, writer, control, offsets, rank, size, timeout):
    """Waits for a slot of this rank; True where it was reached, else every rank knows why not."""
    status, seen = wait_until_reached(flag, expected, control, timeout, "sys")
    if status == TIMED_OUT.value:
        for peer in range(size):
            there = peer_pointer(control, offsets, peer)
            record = there + RECORDS.value + rank * LINE.value
            store_release(record + 1, slot, "sys")
            store_release(record + 2, writer, "sys")
            store_release(record + 3, expected, "sys")
            store_release(record + 4, seen, "sys")
            store_release(record, 1, "sys")
            store_release(there, 1, "sys")
    return status == REACHED.value


@triton.jit(do_not_specialize=["rank", "size", "timeout"])
def barrier_kernel(control, offsets, rank, size, timeout):
    epoch = tl.load(control + EPOCH.value) + 1
    slots = control + RECORDS.value + size * LINE.value
    fence("sys")
    for peer in range(size):
        store_release(peer_pointer(slots + rank * LINE.value, offsets, peer), epoch, "sys")
    for writer in range(size):
        wait_for_rank(
            slots + writer * LINE.value, epoch, BARRIER_SLOT.value, writer, control, offsets, rank, size, timeout
        )
    fence("sys")
    tl.store(control + EPOCH.value, epoch)


@triton.jit(do_not_specialize=["rank", "size", "num_slots"])
def notify_kernel(epoch, slots, offsets, rank, size, num_slots):
    """Behind the kernels of its stream: the epoch, told to this rank's cell of every slot of every rank."""
    value = tl.load(epoch)
    fence("sys")
    for peer in range(size):
        there = peer_pointer(slots + rank, offsets, peer)
        for slot in range(num_slots):
            store_release(there + slot * size, value, "sys")


@triton.jit(do_not_specialize=["slot", "peer", "rank", "size", "value"])
def put_kernel(slots, offsets, slot, peer, rank, size, value):
    fence("sys")
    store_release(peer_pointer(slots + slot * size + rank, offsets, peer), value, "sys")


@triton.jit(do_not_specialize=["slot", "writer", "expected", "rank", "size", "timeout"])
def wait_kernel(slots, slot, writer, expected, control, offsets, rank, size, timeout):
    """offsets: those of control."""
    wait_for_rank(slots + slot * size + writer, expected, slot, writer, control, offsets, rank, size, timeout)
    fence("sys")
