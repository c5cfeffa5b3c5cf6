"""How rows of other ranks reach a grouped GEMM, and why. Pure Python.

blocks    communication blocks beside the GEMM, whose grid leaves them their multiprocessors
warps     a mover warp in every block of the GEMM; costs no multiprocessor. Needs the hopper kernel

Operands of wgmma come from shared memory and fill its bandwidth: a mover beside them is slow, and slows them down. On
two H200 the best number of communication blocks measured faster from 2048 tokens a rank on, by up to 1.45 times
(docs/notes/grouped-gemm.md). For few tokens the weights bind, shared memory is idle, and what counts is that movers
need neither multiprocessors nor a kernel on a second stream.

How many blocks is chosen by a model of one forward call at the workspace's capacity with uniform routing, because a
workspace fixes its kernels when it is made. A block brings BLOCK_BYTES_PER_SECOND, a link LINK_BYTES_PER_SECOND. With n
blocks of S multiprocessors the GEMM has S - n; its first tiles wait for their rows; and it cannot end before the last
row has come:

    seconds(n) = max(gemm * S / (S - n) + first rows / (n * block), rows / (n * block), rows of peers / link)
"""

import dataclasses

from tilecrew._hardware import Hardware
from tilecrew.grouped_gemm.schedule import BAND, ELEMENT_BYTES, ROW_BLOCK, Problem, supports

DISPATCHES = ("warps", "blocks")
MOVER_SLOTS = 7  # with eight, tables of 256 experts would cost the GEMM a stage
MOVER_COLUMNS = 1024  # elements of 16 bits: pieces of 2 KB
MOVER_BYTES = MOVER_SLOTS * MOVER_COLUMNS * 2
# The ring of a communication block: SLOTS tiles of ROWS rows, which are 32 KB each, and a thread's 16 bytes four times.
RING = {"ROWS": 8, "COLUMNS": 1024, "SLOTS": 3, "num_warps": 4, "maxnreg": 128}
RING_SCRATCH = 1024  # bytes that Triton may need beside it
CHUNK_BYTES = 512 * 1024  # at most, of rows that are told of together; but a tile's rows at least
MOST_COMM_BLOCKS = 32
BLOCK_BYTES_PER_SECOND = 70e9  # of rows that one communication block moves
LINK_BYTES_PER_SECOND = 417e9  # between two H200, the most that was measured
FLOPS_PER_SECOND = 650e12  # of the grouped GEMM on all multiprocessors
WEIGHT_BYTES_PER_SECOND = 4e12
TILE_COLUMNS = 256
LEAST_BLOCKS_TOKENS = 512
LEAST_PULLED_TOKENS = 512
# Of combine blocks a thread has 16 bytes of each route of its tokens in flight, or twice that.
MOST_COMBINE_TOKENS, MOST_COMBINE_ROWS = 16, 128
MOST_COMBINE_COLUMNS, LEAST_COMBINE_COLUMNS = 2048, 512


def with_mover(problem: Problem) -> Problem:
    """The problem of a grouped GEMM whose blocks have a mover warp."""
    return dataclasses.replace(problem, mover_bytes=MOVER_BYTES)


@dataclasses.dataclass(frozen=True)
class DispatchLoad:
    """What a rank's dispatch and first GEMM have to do. num_rows: without padding; num_ranks: 1 where all memory is
    near."""

    problem: Problem
    num_rows: int
    num_ranks: int

    @property
    def gemm_seconds(self) -> float:
        """On all multiprocessors, of the larger of products and weights."""
        weights = self.problem.num_inner * self.problem.num_columns
        flops = 2 * self.num_rows * weights
        weight_bytes = min(self.problem.num_groups, self.num_rows) * weights * ELEMENT_BYTES
        return max(flops / FLOPS_PER_SECOND, weight_bytes / WEIGHT_BYTES_PER_SECOND)

    @property
    def row_bytes(self) -> int:
        return self.problem.num_inner * ELEMENT_BYTES

    def seconds(self, num_comm_blocks: int, num_sms: int) -> float:
        """The model above."""
        rate = num_comm_blocks * BLOCK_BYTES_PER_SECOND
        num_bytes = self.num_rows * self.row_bytes
        # Row blocks are taken BAND at a time, and of these all columns.
        row_blocks = max(-(-num_sms // -(-self.problem.num_columns // TILE_COLUMNS)), BAND)
        first_bytes = min(row_blocks * ROW_BLOCK, self.num_rows) * self.row_bytes
        remote_bytes = num_bytes * (self.num_ranks - 1) / self.num_ranks
        gemm = self.gemm_seconds * num_sms / (num_sms - num_comm_blocks)
        return max(gemm + first_bytes / rate, num_bytes / rate, remote_bytes / LINK_BYTES_PER_SECOND)


def pick_comm_blocks(load: DispatchLoad, num_sms: int) -> int:
    """The number of communication blocks with the least predicted time; the least such."""
    numbers = range(1, max(1, min(MOST_COMM_BLOCKS, num_sms - 1)) + 1)
    return min(numbers, key=lambda number: load.seconds(number, num_sms)) if num_sms > 1 else 1


def ring_options(num_columns: int, hardware: Hardware) -> dict[str, int]:
    """Options of the kernels of communication blocks, for rows of num_columns elements.

    CHUNK: rows that are waited for and told of together, a power of two between a tile's rows and a row block. Where
    blocks have less shared memory there are fewer slots.
    """
    chunk = ROW_BLOCK
    while chunk > RING["ROWS"] and chunk * num_columns * ELEMENT_BYTES > CHUNK_BYTES:
        chunk //= 2
    slots = RING["SLOTS"]
    if hardware.shared_memory_bytes > 0:
        tile = RING["ROWS"] * RING["COLUMNS"] * ELEMENT_BYTES
        slots = max(2, min(slots, (hardware.shared_memory_bytes - RING_SCRATCH) // tile))
    return {**RING, "SLOTS": slots, "CHUNK": chunk}


def pick_dispatch(dispatch: str | None, problem: Problem, hardware: Hardware, capacity: int) -> str | None:
    """The form of dispatch for a GEMM; None on the CPU. Raises ValueError for one that cannot run.

    By itself "blocks", which measured faster; "warps" for fewer than LEAST_BLOCKS_TOKENS tokens a rank, whose rows come
    in the time of a launch beside weights that bind.
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
    return "blocks" if limit is not None or capacity >= LEAST_BLOCKS_TOKENS else "warps"


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
