"""How rows of other ranks reach a grouped GEMM, and why. Pure Python.

warps     a mover warp in every block of the GEMM; costs no multiprocessor. Needs the hopper kernel
blocks    communication blocks beside the GEMM, whose grid leaves them their multiprocessors
"""

import dataclasses

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
# Of combine blocks a thread has 16 bytes of each route of its tokens in flight, or twice that.
MOST_COMBINE_TOKENS, MOST_COMBINE_ROWS = 16, 128
MOST_COMBINE_COLUMNS, LEAST_COMBINE_COLUMNS = 2048, 512


def with_mover(problem: Problem) -> Problem:
    """The problem of a grouped GEMM whose blocks have a mover warp."""
    return dataclasses.replace(problem, mover_bytes=MOVER_BYTES)


def pick_dispatch(dispatch: str | None, problem: Problem, hardware: Hardware) -> str | None:
    """The form of dispatch for a GEMM; None on the CPU. Raises ValueError for one that cannot run."""
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
    return "blocks" if limit is not None else "warps"


def pulls_results(capacity: int, is_emulated: bool) -> bool:
    """Whether results of other ranks are pulled beside the second GEMM: where they are far, and more than a few.

    Memory of emulated ranks is as near as one's own: pull blocks would only cost the product their multiprocessors.
    """
    return capacity >= LEAST_PULLED_TOKENS and not is_emulated


def combine_options(num_tokens: int, top_k: int, num_blocks: int) -> dict[str, int]:
    """Options of combine_kernel: groups of as many tokens as leave most blocks a group, and a thread its registers."""
    tokens = MOST_COMBINE_TOKENS
    while tokens > 1 and (tokens * top_k > MOST_COMBINE_ROWS or 2 * num_tokens <= tokens * num_blocks):
        tokens //= 2
    columns = min(max(4096 // tokens, LEAST_COMBINE_COLUMNS), MOST_COMBINE_COLUMNS)
    # maxnreg: all that 16 warps can have.
    return {"TOKENS": tokens, "COLUMNS": columns, "num_warps": min(tokens * columns // 256, 16), "maxnreg": 128}
