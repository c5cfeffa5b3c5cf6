"""How rows of other ranks reach a grouped GEMM, and why. Pure Python.

warps     a mover warp in every block of the GEMM; costs no multiprocessor. Needs the hopper kernel
blocks    communication blocks beside the GEMM, whose grid leaves them their multiprocessors

The products read their operands from shared memory at nearly its full rate, and a mover, whose rows pass through it,
gets what is left: from memory that is near it still comes along, from that of other GPUs it does not. There
communication blocks are faster in spite of the multiprocessors that they take (docs/notes/grouped-gemm.md).
"""

import dataclasses
import math

from tilecrew._hardware import Hardware
from tilecrew.grouped_gemm.schedule import Problem, supports

DISPATCHES = ("warps", "blocks")
MOVER_SLOTS = 7  # with eight, tables of 256 experts would cost the GEMM a stage
MOVER_COLUMNS = 1024  # elements of 16 bits: pieces of 2 KB
MOVER_BYTES = MOVER_SLOTS * MOVER_COLUMNS * 2
# Launches of blocks that move rows: there is one on a multiprocessor, and what it has in flight, here 64 KB, over the
# two microseconds that a peer's memory is away is the speed of a multiprocessor.
DISPATCH = {"ROWS": 32, "COLUMNS": 1024, "num_warps": 16}
PULL = DISPATCH
LEAST_PULLED_TOKENS = 512
# Measured between two H200: what comes from a peer at most, and what one block moves where all together come near that.
LINK_BYTES_PER_SECOND, BLOCK_BYTES_PER_SECOND = 417e9, 26e9
# Of combine blocks a thread has 16 bytes of each route of its tokens in flight, or twice that.
MOST_COMBINE_TOKENS, MOST_COMBINE_ROWS = 16, 128
MOST_COMBINE_COLUMNS, LEAST_COMBINE_COLUMNS = 2048, 512


def with_mover(problem: Problem) -> Problem:
    """The problem of a grouped GEMM whose blocks have a mover warp."""
    return dataclasses.replace(problem, mover_bytes=MOVER_BYTES)


def pick_dispatch(dispatch: str | None, problem: Problem, hardware: Hardware, is_far: bool) -> str | None:
    """The form of dispatch for a GEMM; None on the CPU. is_far: many rows come from other GPUs, see `pulls_results`.

    Raises ValueError for a form that cannot run.
    """
    if dispatch is not None and dispatch not in DISPATCHES:
        raise ValueError(f"dispatch must be None or one of {', '.join(DISPATCHES)}, got {dispatch!r}")
    if hardware.device_type != "cuda":
        if dispatch is not None:
            raise ValueError(f"dispatch must be None on the CPU, which has neither, got {dispatch!r}")
        return None
    limit = supports("hopper", with_mover(problem), hardware)
    if dispatch == "warps" and limit is not None:
        raise ValueError(f"dispatch='warps' cannot run: {limit}")
    if dispatch is not None:
        return dispatch
    return "blocks" if is_far or limit is not None else "warps"


def pulls_results(capacity: int, is_emulated: bool) -> bool:
    """Whether results of other ranks are pulled beside the second GEMM: where they are far, and more than a few.

    Memory of emulated ranks is as near as one's own: pull blocks would only cost the product their multiprocessors.
    """
    return capacity >= LEAST_PULLED_TOKENS and not is_emulated


def num_blocks_of_link(world_size: int, num_sms: int) -> int:
    """Communication blocks that bring rows as fast as the link to the peers gives their share of (W - 1) / W, while
    the rank's own share comes from its own memory; no more than a quarter of the multiprocessors."""
    rate = LINK_BYTES_PER_SECOND * world_size / (world_size - 1)
    return max(1, min(math.floor(rate / BLOCK_BYTES_PER_SECOND), num_sms // 4))


def combine_options(num_tokens: int, top_k: int, num_blocks: int) -> dict[str, int]:
    """Options of combine_kernel: groups of as many tokens as leave most blocks a group, and a thread its registers."""
    tokens = MOST_COMBINE_TOKENS
    while tokens > 1 and (tokens * top_k > MOST_COMBINE_ROWS or 2 * num_tokens <= tokens * num_blocks):
        tokens //= 2
    columns = min(max(4096 // tokens, LEAST_COMBINE_COLUMNS), MOST_COMBINE_COLUMNS)
    # maxnreg: all that 16 warps can have.
    return {"TOKENS": tokens, "COLUMNS": columns, "num_warps": min(tokens * columns // 256, 16), "maxnreg": 128}
