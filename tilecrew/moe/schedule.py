"""How rows of other ranks reach a grouped GEMM, and why. Pure Python.

gather    the GEMM's load role reads tokens where they are, and nobody writes rows. Needs the hopper kernel
blocks    communication blocks beside the GEMM, whose grid leaves them their multiprocessors
warps     a mover warp in every block of the GEMM; costs no multiprocessor. Needs the hopper kernel

A product of gathered rows takes no longer than one of rows in their order, less where rows are padded, because padding
is not read. Tokens of other GPUs must be near before: a tile needs any of them, so all that have a route to the rank
are brought, once each, beside the making of the tables. Copy engines do so where there are many: they take no
multiprocessor from the tables, and fill the link, where a kernel moved 150 GB/s of 380. They know nothing of routes,
nor of how many tokens a peer has, and copy all that it may have: which a call with few tokens would wait for.
Gradients of the weights need the rows in their order: calls with gradients, and backward, have blocks or warps.

Operands of wgmma come from shared memory and fill its bandwidth: a mover beside them is slow, and slows them down. A
communication block moves as much as a multiprocessor can write. Between GPUs blocks measured faster than movers from
2048 tokens a rank on. Where all memory is near (one rank, or emulated ones) they do where products are long for the
bytes of their rows, so that few of them are enough; movers, where rows are needed at more than NEAR_BYTES_PER_SECOND.
For few tokens the weights bind, shared memory is idle, and what counts is that movers need neither multiprocessors nor
a kernel on a second stream.

How many blocks: as few as bring the rows in the time of the products, or in the link's where that is longer. Rows that
come much earlier than they are needed leave the L2 cache before the products read them, which cost more than the
multiprocessors did. The load is that of one forward call at the workspace's capacity with uniform routing, because a
workspace fixes its kernels when it is made. What `bench moe` prints as predicted, for n blocks of S multiprocessors:

    seconds(n) = max(gemm * S / (S - n), rows / (n * block), rows of peers / link) + first rows / (n * block alone)

Rates are those of an H200, measured with 1 to 8 ranks (docs/notes/grouped-gemm.md).
"""

import dataclasses
import math

from tilecrew._hardware import Hardware
from tilecrew.grouped_gemm.schedule import BAND, ELEMENT_BYTES, ROW_BLOCK, Problem, supports

DISPATCHES = ("warps", "blocks", "gather")
COMBINES = ("push", "pull")
MOVER_SLOTS = 7  # with eight, tables of 256 experts would cost the GEMM a stage
MOVER_COLUMNS = 1024  # elements of 16 bits: pieces of 2 KB
MOVER_BYTES = MOVER_SLOTS * MOVER_COLUMNS * 2
# The ring of a communication block: four movers of four warps, each with SLOTS tiles of ROWS rows.
NUM_MOVERS = 4
RING = {"ROWS": 8, "COLUMNS": 1024, "SLOTS": 3, "num_warps": 4, "maxnreg": 128}
RING_SCRATCH = 1024  # bytes that Triton may need beside it
CHUNK_BYTES = 128 * 1024  # at most, of rows that are told of together; but a tile's rows at least
MOST_COMM_BLOCKS = 32
BRING = {"ROWS": 16, "COLUMNS": 1024, "num_warps": 8}  # a program's tokens, 32 KB of them on their way
BLOCK_BYTES_PER_SECOND = 42e9  # of rows that one communication block moves beside products
BLOCK_ALONE_BYTES_PER_SECOND = 45e9  # and while these wait for their first rows: what a multiprocessor can write
NEAR_BYTES_PER_SECOND = 200e9  # of rows, of the whole GPU
LINK_BYTES_PER_SECOND = 417e9  # between two H200, the most that was measured
# Of the grouped GEMM, and of the memory beside it, on all multiprocessors of an H200.
FLOPS_PER_SECOND = 760e12
MEMORY_BYTES_PER_SECOND = 3.6e12
TILE_COLUMNS = 256
MOST_IDLE = 20  # one multiprocessor of so many may be idle for a better number of blocks
LEAST_COPIED_TOKENS = 1024  # a copy engine needs some 10 us to begin
LEAST_BLOCKS_TOKENS = 512
LEAST_PULLED_TOKENS = 512
# Of combine blocks a thread has 16 bytes of each route of its tokens in flight, or twice that.
MOST_COMBINE_TOKENS, MOST_COMBINE_ROWS = 16, 128
MOST_COMBINE_COLUMNS, LEAST_COMBINE_COLUMNS = 2048, 512


def with_mover(problem: Problem) -> Problem:
    """The problem of a grouped GEMM whose blocks have a mover warp."""
    return dataclasses.replace(problem, mover_bytes=MOVER_BYTES)


def num_gemm_blocks(num_sms: int, num_comm_blocks: int) -> int:
    """Blocks of a GEMM beside communication blocks, on as many of the rank's multiprocessors.

    A multiple of BAND where that leaves few of them idle: tiles of a column of a band, which read the same weights, are
    then always computed by the same blocks, which stay in step.
    """
    left = num_sms - num_comm_blocks
    idle = left % BAND
    return left - idle if MOST_IDLE * idle <= left else left


@dataclasses.dataclass(frozen=True)
class DispatchLoad:
    """What a rank's dispatch and first GEMM have to do, and with how much of a GPU.

    num_rows      rows that tokens have been sent to, without padding
    num_ranks     ranks whose memory is behind a link, and this one; 1 where all memory is near
    num_sms       the rank's multiprocessors
    share         of the GPU's throughput: less than one for emulated ranks
    """

    problem: Problem
    num_rows: int
    num_ranks: int
    num_sms: int
    share: float = 1.0

    @property
    def num_padded_rows(self) -> int:
        """An expert with rows has half a row block of padding, in the mean."""
        return self.num_rows + min(self.problem.num_groups, self.num_rows) * ROW_BLOCK // 2

    @property
    def num_bytes(self) -> int:
        """Of rows that are written, padding too."""
        return self.num_padded_rows * self.problem.num_inner * ELEMENT_BYTES

    @property
    def num_first_bytes(self) -> int:
        """Of rows that the first tile of every multiprocessor needs: a band of row blocks, and all their columns."""
        row_blocks = max(-(-self.num_sms // -(-self.problem.num_columns // TILE_COLUMNS)), BAND)
        return min(row_blocks * ROW_BLOCK, self.num_padded_rows) * self.problem.num_inner * ELEMENT_BYTES

    @property
    def gemm_seconds(self) -> float:
        """Of the GEMM alone on all of the rank's multiprocessors: products or memory bind."""
        num_inner, num_columns = self.problem.num_inner, self.problem.num_columns
        flops = 2 * self.num_padded_rows * num_inner * num_columns
        elements = min(self.problem.num_groups, self.num_rows) * num_inner * num_columns
        elements += self.num_padded_rows * (num_inner + num_columns // 2)
        return max(flops / FLOPS_PER_SECOND, elements * ELEMENT_BYTES / MEMORY_BYTES_PER_SECOND) / self.share

    @property
    def bytes_per_second(self) -> float:
        """At which products need rows, for the whole GPU."""
        return self.num_bytes / (self.gemm_seconds * self.share)

    @property
    def link_seconds(self) -> float:
        """Of what comes from peers."""
        peers = self.num_rows * (self.num_ranks - 1) / self.num_ranks
        return peers * self.problem.num_inner * ELEMENT_BYTES / LINK_BYTES_PER_SECOND

    @property
    def num_comm_blocks(self) -> int:
        """As few as keep up, at least one, and at most MOST_COMM_BLOCKS and all multiprocessors but one."""
        needed = math.ceil(self.num_bytes / (BLOCK_BYTES_PER_SECOND * max(self.gemm_seconds, self.link_seconds)))
        number = max(1, min(needed, MOST_COMM_BLOCKS, self.num_sms - 1))
        return self.num_sms - num_gemm_blocks(self.num_sms, number)

    def seconds(self, num_comm_blocks: int) -> float:
        """The model above."""
        gemm = self.gemm_seconds * self.num_sms / num_gemm_blocks(self.num_sms, num_comm_blocks)
        rows = self.num_bytes / (num_comm_blocks * BLOCK_BYTES_PER_SECOND)
        first = self.num_first_bytes / (num_comm_blocks * BLOCK_ALONE_BYTES_PER_SECOND)
        return max(gemm, rows, self.link_seconds) + first


def ring_options(num_columns: int, hardware: Hardware) -> dict[str, int]:
    """Options of the kernels of communication blocks, for rows of num_columns elements.

    CHUNK: rows that are waited for and told of together, a power of two between a tile's rows and a row block. Where
    blocks have less shared memory tiles have fewer rows.
    """
    chunk = ROW_BLOCK
    while chunk > RING["ROWS"] and chunk * num_columns * ELEMENT_BYTES > CHUNK_BYTES:
        chunk //= 2
    rows, slots = RING["ROWS"], RING["SLOTS"]
    if hardware.shared_memory_bytes > 0:
        row = NUM_MOVERS * RING["COLUMNS"] * ELEMENT_BYTES
        num_rows = (hardware.shared_memory_bytes - RING_SCRATCH) // row
        while rows > 1 and num_rows < slots * rows:
            rows //= 2
        slots = max(1, min(slots, num_rows // rows))
    return {**RING, "ROWS": rows, "SLOTS": slots, "CHUNK": chunk}


def gathers(dispatch: str | None, problem: Problem, hardware: Hardware) -> bool:
    """Whether the first GEMM of calls without gradients, whose problem this is, gathers its rows: by itself where it
    can. Raises ValueError where it should and cannot."""
    if hardware.device_type != "cuda" or dispatch not in (None, "gather"):
        return False
    limit = supports("hopper", dataclasses.replace(problem, has_gate=False, gathers=True), hardware)
    if dispatch == "gather" and limit is not None:
        raise ValueError(f"dispatch='gather' cannot run: {limit}")
    return limit is None


def copies_tokens(num_tokens: int, capacity: int) -> bool:
    """Whether copy engines bring the tokens of other GPUs, all `capacity` of each, to a rank that itself has
    num_tokens: with fewer than half of the capacity most of what they copy would be nobody's."""
    return num_tokens >= LEAST_COPIED_TOKENS and 2 * num_tokens >= capacity


def pick_dispatch(dispatch: str | None, load: DispatchLoad, hardware: Hardware, capacity: int) -> str | None:
    """The form of dispatch that writes rows; None on the CPU. Raises ValueError for one that cannot run.

    By itself as the module's text says.
    """
    if dispatch is not None and dispatch not in DISPATCHES:
        raise ValueError(f"dispatch must be None or one of {', '.join(DISPATCHES)}, got {dispatch!r}")
    if hardware.device_type != "cuda":
        if dispatch is not None:
            raise ValueError(f"dispatch must be None on the CPU, which has one form, got {dispatch!r}")
        return None
    if dispatch == "gather":
        dispatch = None
    limit = supports("hopper", with_mover(load.problem), hardware)
    if dispatch == "warps" and limit is not None:
        raise ValueError(f"dispatch='warps' cannot run: {limit}")
    if dispatch is not None:
        return dispatch
    if limit is not None:
        return "blocks"
    if capacity < LEAST_BLOCKS_TOKENS:
        return "warps"
    is_near = load.num_ranks == 1
    return "warps" if is_near and load.bytes_per_second > NEAR_BYTES_PER_SECOND else "blocks"


def pick_combine(combine: str | None, problem: Problem, hardware: Hardware) -> str | None:
    """How results come to the ranks of their tokens; None on the CPU. Raises ValueError for a form that cannot run.

    push    the second GEMM, whose problem this is, stores each row where its token is. Needs the hopper kernel
    pull    it tells all ranks of its row blocks, and they load them
    """
    if combine is not None and combine not in COMBINES:
        raise ValueError(f"combine must be None or one of {', '.join(COMBINES)}, got {combine!r}")
    if hardware.device_type != "cuda":
        if combine is not None:
            raise ValueError(f"combine must be None on the CPU, which has one form, got {combine!r}")
        return None
    limit = supports("hopper", dataclasses.replace(problem, scatters=True), hardware)
    if combine == "push" and limit is not None:
        raise ValueError(f"combine='push' cannot run: {limit}")
    return combine or ("push" if limit is None else "pull")


def pulls_beside(capacity: int, is_emulated: bool) -> bool:
    """Where results are pulled: whether by blocks beside the second GEMM, which pays where they are far and many.

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
