"""Flags in global memory: how blocks, and ranks, tell each other that data is there. For Gluon and plain Triton alike.

Flags are int32. SCOPE is "gpu" where writer and reader are on one GPU, "sys" where they are on two, or one is the host.

    writer    ordinary stores -> barrier of the role -> [fence_proxy_async, where TMA will read them] -> release
    reader    acquire -> [fence_proxy_async, where TMA reads next] -> barrier of the role -> loads

A release orders what its own thread did, and what other threads did before a barrier that both passed; hence the
barrier of the role (`gl.barrier`, `tl.debug_barrier`) in front of it, which none of these functions contains. Data that
a TMA store has written is ordered by waiting for the store's completion (not only for its reads) before that barrier.

Numbers that only grow (epochs) are compared by the sign of their difference, which stays right when they pass 2^31 or
2^32, as long as they are less than 2^31 apart.
"""

import triton
import triton.language as tl

# What a wait came to.
REACHED = tl.constexpr(0)
TIMED_OUT = tl.constexpr(1)
ABORTED = tl.constexpr(2)
# A wait looks at the clock and at the abort cell once in so many polls.
POLLS_BETWEEN_CHECKS = tl.constexpr(64)


@triton.jit
def load_acquire(pointer, SCOPE: tl.constexpr):
    """The flag, loaded by every thread: later loads of each see what was written before the release."""
    tl.static_assert(SCOPE == "gpu" or SCOPE == "sys", "SCOPE must be 'gpu' or 'sys'")
    PTX: tl.constexpr = "ld.acquire." + SCOPE + ".global.b32 $0, [$1];"
    return tl.inline_asm_elementwise(PTX, "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_release(pointer, value, SCOPE: tl.constexpr):
    """Writes the flag. One lane of each warp of the role stores the same value: for flags with one writer."""
    tl.static_assert(SCOPE == "gpu" or SCOPE == "sys", "SCOPE must be 'gpu' or 'sys'")
    # An ordinary store, no exchange: between GPUs not every link carries atomics.
    PTX: tl.constexpr = (
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; @first st.release."
        + SCOPE
        + ".global.b32 [$1], $2; mov.u32 $0, 0; }"
    )
    tl.inline_asm_elementwise(PTX, "=r,l,r", [pointer, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def add_release(pointer, value, SCOPE: tl.constexpr):
    """Adds to a counter on the own GPU, once for the role."""
    tl.atomic_add(pointer, value, sem="release", scope=SCOPE)


@triton.jit
def add_acquire_release(pointer, value, SCOPE: tl.constexpr):
    """Adds to a counter on the own GPU, once for the role, and tells all its threads what it was before.

    An election: who sees the count of all others is the last, and sees what they wrote before they added.
    """
    return tl.atomic_add(pointer, value, sem="acq_rel", scope=SCOPE)


@triton.jit
def fence(SCOPE: tl.constexpr):
    """Orders what each thread did before it against what it does behind it."""
    tl.static_assert(SCOPE == "gpu" or SCOPE == "sys", "SCOPE must be 'gpu' or 'sys'")
    PTX: tl.constexpr = "fence.acq_rel." + SCOPE + "; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence_proxy_async():
    """Orders ordinary accesses and those of TMA (the asynchronous proxy), to global and to shared memory."""
    tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence_proxy_async_once():
    """The same by the first thread of a role of four warps, which is the one that adds: behind a barrier it is enough,
    and the others go on."""
    PTX: tl.constexpr = (
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; and.b32 thread, thread, 127; "
        "setp.eq.u32 first, thread, 0; @first fence.proxy.async; mov.u32 $0, 0; }"
    )
    tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def nanoseconds():
    """A clock that all blocks share."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def pause():
    """Leaves the memory system alone for some 32 ns."""
    tl.inline_asm_elementwise("nanosleep.u32 32; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def trap():
    """Ends the kernel with an error that torch reports, and with it the CUDA context."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def largest_in_warp(value):
    """The largest of an int32 that the lanes of a warp may know differently; all lanes get it."""
    PTX: tl.constexpr = "redux.sync.max.s32 $0, $1, 0xffffffff;"
    return tl.inline_asm_elementwise(PTX, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def peer_pointer(pointer, offsets, rank):
    """Where `pointer`, into this rank's part of a parallel tensor, points in that of `rank`. offsets: one int64 for
    each rank, in bytes."""
    address = pointer.to(tl.int64) + tl.load(offsets + rank)
    return address.to(pointer.dtype)


@triton.jit
def is_reached(seen, target):
    """seen >= target for numbers that wrap around."""
    return seen - target >= 0


@triton.jit
def wait_until_reached(pointer, target, abort, timeout, SCOPE: tl.constexpr):
    """Spins until the flag has reached the target -> (REACHED, TIMED_OUT or ABORTED, the flag as last seen).

    abort: an int32 cell; where it is not 0 the wait ends. It is also looked at first: behind a failed wait none is
    long. timeout: nanoseconds. All lanes of a warp get the same answer. Two warps of a role may get different ones when
    time runs out: what they do next must not branch around a barrier.
    """
    start = nanoseconds()
    status = REACHED.value
    seen = load_acquire(pointer, SCOPE)
    if load_acquire(abort, "sys") != 0:
        status = ABORTED.value
    polls = 0
    while (not is_reached(seen, target)) & (status == REACHED.value):
        pause()
        polls += 1
        if polls % POLLS_BETWEEN_CHECKS.value == 0:
            if load_acquire(abort, "sys") != 0:
                status = ABORTED.value
            elif nanoseconds() - start > timeout:
                status = TIMED_OUT.value
        seen = load_acquire(pointer, SCOPE)
    if is_reached(seen, target) & (status == TIMED_OUT.value):
        status = REACHED.value  # at the last moment
    # Lanes may have left the loop one by one. What the first of them missed is what all report.
    return largest_in_warp(status), target - largest_in_warp(target - seen)
