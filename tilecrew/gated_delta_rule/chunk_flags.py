"""How kernel_prepare and the scan work at the same time: on which multiprocessors, and how the scan knows what is done.

A scan of few CTAs leaves multiprocessors alone. So many programs of kernel_prepare are launched that each of these gets
its share of those that stay. The others end at once, and the scan, launched as a dependent, takes their place. Programs
that stay walk the chunks in the order in which the scan needs them, and raise a flag behind each.

tickets [2 + slots * groups] int32, zeros at first: programs of the scan's multiprocessors that have left, programs that
    wished to stay, and a flag for each slot (chunk) and group of value heads.

No deadlock. Programs of kernel_prepare wait for nothing, and the scan comes on the GPU when all of them have been on
it, or, where nothing starts dependents early, when they have ended. Where the hardware puts them decides about time
only: num_staying stay in any case, and each takes its chunks by its number among these.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from tilecrew.device.compat import barrier, gl, gluon
from tilecrew.device.signal import add_release, fence_proxy_async, load_acquire, nanoseconds, trap
from tilecrew.device.tiles import wait_until_stores_complete

FIRST_FLAG = gl.constexpr(2)
# Other work on the GPU may hold kernel_prepare up; behind this time it is taken for lost.
LONGEST_WAIT = gl.constexpr(60_000_000_000)  # nanoseconds


class Placement(NamedTuple):
    """num_staying: programs of kernel_prepare that make chunks; num_scan_sms, num_sms: multiprocessors that are left to
    the scan, and all of them."""

    num_staying: int
    num_scan_sms: int
    num_sms: int

    @property
    def num_programs(self) -> int:
        """As many on every multiprocessor."""
        return self.num_sms * -(-self.num_staying // (self.num_sms - self.num_scan_sms))


NOT_BESIDE = Placement(0, 0, 0)


def allocate_tickets(x: torch.Tensor, num_flags: int) -> torch.Tensor:
    return x.new_zeros(FIRST_FLAG.value + num_flags, dtype=torch.int32)


@gluon.jit
def multiprocessor():
    """The number of the one that this program is on."""
    return gl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_item(tickets, num_staying, first_scan_sm, num_items):
    """Where this program of kernel_prepare begins; num_items where it does not stay."""
    has_left = gl.to_tensor(0)
    if multiprocessor() >= first_scan_sm:
        # No more than are to leave: whatever the hardware does, num_staying are left.
        has_left = (tl.atomic_add(tickets, 1, sem="relaxed") < gl.num_programs(0) - num_staying).to(gl.int32)
    item = num_items
    if has_left == 0:
        number = tl.atomic_add(tickets + 1, 1, sem="relaxed")
        if number < num_staying:
            item = number
    return item


@gluon.jit
def publish(flag):
    """Kernel_prepare: what it has written of a chunk may be read, by TMA too."""
    wait_until_stores_complete()
    fence_proxy_async()
    barrier()
    add_release(flag, 1, "gpu")


@gluon.jit
def wait_until_prepared(flag):
    """One warp of the scan: the chunk may be read by TMA."""
    if load_acquire(flag, "gpu") == 0:
        start = nanoseconds()
        while load_acquire(flag, "gpu") == 0:
            if nanoseconds() - start > LONGEST_WAIT:
                trap()
    fence_proxy_async()
