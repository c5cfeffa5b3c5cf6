"""Problem and hardware -> Schedule: which implementation a grouped GEMM uses, its tiles, and why. Pure Python.

Implementations:
    hopper     wgmma kernel for compute capability 9.0, with gates, epilogues and notifications inside
    mma_sync   the same kernel with mma.sync in place of wgmma, for 12.x; runs on 9.0 where it is asked for
    portable   plain Triton, every GPU that Triton compiles for; epilogues follow in torch
    torch      one torch product a group, where the offsets are on the host

Hopper tiles have 128 rows, or 64 where groups are so small that most of 128 would be padding: there the weights bind,
not the products. They have 256 columns, or 128 where even these give no SM a second tile; never fewer, which measured
slower even where they fill the SMs' last turn, and K is not split over blocks, which gained little and only for a row
or 64 (docs/notes/grouped-gemm.md). All shared memory goes into stages of the ring, after what the epilogue needs.

Tiles of mma_sync are 128 x 128 x 64: a block of compute capability 12.0 has 99 KB of shared memory, three stages of 32
KB fill it, and results leave registers without a staging tile.

Tiles come in a fixed order, block b of B taking the tiles b, b + B, ...: on an H200 taking them by ticket measured the
same in alternating runs (674 and 677 TFLOP/s), for a counter in global memory that each call must reset.
"""

from dataclasses import dataclass

from tilecrew._hardware import Hardware

IMPLEMENTATIONS = ("hopper", "mma_sync", "portable", "torch")
HALF_DTYPES = ("bfloat16", "float16")
KERNEL_DTYPES = (*HALF_DTYPES, "float32")

SHARED_MEMORY = 232_448  # bytes of a block, compute capability 9.0
SMALL_SHARED_MEMORY = 101_376  # bytes of a block, compute capability 12.0
COMPILER_BYTES = 512  # what Triton keeps in shared memory for itself: captured values, scratch of the scan
ELEMENT_BYTES = 2
BLOCK_K = 64
CONSUMER_ROWS = 64
ROW_BLOCK = 128  # rows that gates and notifications count together
PIECE = 64  # columns of the accumulator that the epilogue takes at a time
MMA_SYNC_WARPS = 8  # 16 rows each
STAGES = (8, 4, 3, 2)  # counts by which the ring can number its stages
STORED_TILES = 4  # how far consumers may be ahead of the notify role: it is quick, they hardly ever wait
BAND = 4  # row blocks that are computed together; up to 8 measured the same
SMALL_GROUP = 64  # mean rows of a group up to which tiles have 64 rows
MAX_GROUPS = 1022
MAX_ROWS = 2**31 - 1024
SEARCH = 128  # the table of groups is read in pieces of this length


@dataclass(frozen=True)
class Problem:
    """What a schedule may depend on: sizes known on the host, never the offsets.

    num_rows M, num_groups E, num_inner K, num_columns N (of the accumulator); dtype as torch prints it without its
    prefix; has_gate: the call gives a gate; notifies: its epilogue says what has landed; mover_bytes: shared memory for
    a warp that brings rows, 0 without one; gathers, scatters: rows of x lie, and rows of the output go, anywhere.
    """

    num_rows: int
    num_groups: int
    num_inner: int
    num_columns: int
    dtype: str
    has_gate: bool = False
    notifies: bool = False
    mover_bytes: int = 0
    gathers: bool = False
    scatters: bool = False


@dataclass(frozen=True)
class TileSizes:
    """Tiles of the hopper and mma_sync kernels. num_output_buffers: staging tiles of a consumer, 0 where it stores from
    registers. table_length: elements of the tables of groups. Registers are those of a thread: of the load role, of the
    second consumer, and before the roles re-divide them. A consumer is consumer_warps warps that multiply
    consumer_rows rows, with wgmma or else with mma.sync."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_output_buffers: int
    band: int
    table_length: int
    load_registers: int
    consumer_registers: int
    entry_registers: int
    consumer_rows: int = CONSUMER_ROWS
    consumer_warps: int = 4
    uses_wgmma: bool = True
    mover_bytes: int = 0

    @property
    def shared_memory_bytes(self) -> int:
        """Upper bound of what a block needs."""
        tile = self.block_k * (self.block_m + self.block_n) * ELEMENT_BYTES
        staging = self.num_output_buffers * self.block_m * PIECE * ELEMENT_BYTES
        barriers = 2 * 8 * (self.num_stages + STORED_TILES)
        tables = 2 * 4 * self.table_length
        return self.num_stages * tile + staging + tables + barriers + self.mover_bytes + COMPILER_BYTES


@dataclass(frozen=True)
class Schedule:
    """The choice: implementation, tiles and blocks of hopper and mma_sync (None and 0 for others), the reason."""

    implementation: str
    tiles: TileSizes | None
    num_programs: int
    reason: str

    def __str__(self) -> str:
        if self.tiles is None:
            return f"{self.implementation}: {self.reason}"
        tiles = self.tiles
        shape = f"tiles {tiles.block_m} x {tiles.block_n} x {tiles.block_k}, {tiles.num_stages} stages"
        return f"{self.implementation}, {shape}, {self.num_programs} blocks: {self.reason}"


def supports(implementation: str, problem: Problem, hardware: Hardware) -> str | None:
    """None where the implementation can run the problem on the hardware, else the reason why it cannot."""
    if implementation == "hopper":
        return hardware.hopper_limit() or _crew_limit(problem) or _hopper_roles_limit(problem)
    if implementation == "mma_sync":
        return hardware.tma_limit() or _crew_limit(problem) or _anywhere_limit(problem)
    if implementation == "portable":
        return _portable_limit(problem, hardware) or _anywhere_limit(problem)
    if hardware.device_type == "cuda":
        return "it would read offs on the host, and waits for the GPU to do so"
    return _anywhere_limit(problem)


def pick(problem: Problem, hardware: Hardware, implementation: str | None = None) -> Schedule:
    """The Schedule of a problem; `implementation` forces one. Raises ValueError where it, or all, cannot run."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation is not None:
        limit = supports(implementation, problem, hardware)
        if limit is not None:
            raise ValueError(f"implementation={implementation!r} cannot run: {limit}")
        return _schedule(implementation, problem, hardware, "asked for by implementation=")
    limits = {name: supports(name, problem, hardware) for name in IMPLEMENTATIONS}
    name = next((name for name in IMPLEMENTATIONS if limits[name] is None), None)
    if name is None:
        reasons = "; ".join(f"{name}: {limit}" for name, limit in limits.items())
        raise ValueError(f"no implementation can run this grouped GEMM: {reasons}")
    reason = f"the kernel for {hardware.name}"
    if name not in ("hopper", "mma_sync"):
        reason = f"hopper cannot run: {limits['hopper']}; mma_sync cannot run: {limits['mma_sync']}"
    return _schedule(name, problem, hardware, reason)


def hopper_tiles(problem: Problem, num_sms: int) -> TileSizes:
    """The tiles of the hopper kernel. Gates and notifications count rows of 128-row blocks, which are fixed then."""
    mean_rows = problem.num_rows / max(problem.num_groups, 1)
    may_be_small = not (problem.has_gate or problem.notifies or problem.gathers)
    block_m = CONSUMER_ROWS if mean_rows <= SMALL_GROUP and may_be_small else ROW_BLOCK
    load, consumer, entry = (40, 232, 168) if block_m == ROW_BLOCK else (80, 240, 160)
    if problem.gathers:  # addresses of rows are the load role's
        load, consumer = 72, 216
    is_wide = _likely_row_blocks(problem, block_m) * _ceil_div(problem.num_columns, 128) > num_sms
    block_n = 256 if is_wide and problem.num_columns > 128 else 128
    for num_stages in STAGES:
        for num_output_buffers in (2, 1):
            tiles = TileSizes(
                block_m=block_m,
                block_n=block_n,
                block_k=BLOCK_K,
                num_stages=num_stages,
                num_output_buffers=num_output_buffers,
                band=BAND,
                table_length=table_length(problem.num_groups),
                load_registers=load,
                consumer_registers=consumer,
                entry_registers=entry,
                mover_bytes=problem.mover_bytes,
            )
            if tiles.shared_memory_bytes <= SHARED_MEMORY:
                return tiles
    raise AssertionError("two stages fit for every number of groups that supports() lets through")


def mma_sync_tiles(problem: Problem) -> TileSizes:
    """The tiles of the mma_sync kernel, on every GPU within what a block of compute capability 12.0 has."""
    for num_stages in (3, 2):
        tiles = TileSizes(
            block_m=ROW_BLOCK,
            block_n=128,
            block_k=BLOCK_K,
            num_stages=num_stages,
            num_output_buffers=0,
            band=BAND,
            table_length=table_length(problem.num_groups),
            load_registers=40,
            consumer_registers=232,
            entry_registers=168,
            consumer_rows=ROW_BLOCK,
            consumer_warps=MMA_SYNC_WARPS,
            uses_wgmma=False,
        )
        if tiles.shared_memory_bytes <= SMALL_SHARED_MEMORY:
            return tiles
    raise AssertionError("two stages fit for every number of groups that supports() lets through")


def max_row_blocks(num_rows: int, num_groups: int) -> int:
    """The most 128-row blocks that groups of `num_rows` rows in all can have: every group may have a partial one."""
    num_partial = min(num_groups, num_rows)
    return (num_rows - num_partial) // ROW_BLOCK + num_partial


def table_length(num_groups: int) -> int:
    """A power of two with room for the groups, the rows behind them, and the end of these."""
    length = SEARCH
    while length < num_groups + 2:
        length *= 2
    return length


def _schedule(implementation: str, problem: Problem, hardware: Hardware, reason: str) -> Schedule:
    if implementation not in ("hopper", "mma_sync"):
        return Schedule(implementation, None, 0, reason)
    is_hopper = implementation == "hopper"
    tiles = hopper_tiles(problem, hardware.num_sms) if is_hopper else mma_sync_tiles(problem)
    most_row_blocks = problem.num_rows // tiles.block_m + min(problem.num_groups + 1, problem.num_rows)
    most_tiles = most_row_blocks * _ceil_div(problem.num_columns, tiles.block_n)
    return Schedule(implementation, tiles, min(hardware.num_sms, most_tiles), reason)


def _likely_row_blocks(problem: Problem, block_m: int) -> int:
    """Row blocks where every row goes to any group with the same probability."""
    num_groups = max(problem.num_groups, 1)
    num_filled = num_groups * (1 - (1 - 1 / num_groups) ** problem.num_rows)
    return max(round(num_filled), _ceil_div(problem.num_rows, block_m), 1)


def _crew_limit(problem: Problem) -> str | None:
    """What the kernel with roles cannot do, with wgmma or with mma.sync."""
    if problem.dtype not in HALF_DTYPES:
        return f"it needs bfloat16 or float16, x is {problem.dtype}"
    if problem.num_groups > MAX_GROUPS:
        return f"it needs at most {MAX_GROUPS} groups, w has {problem.num_groups}"
    return None


def _anywhere_limit(problem: Problem) -> str | None:
    """Of implementations whose rows are those of x and the output only."""
    if problem.mover_bytes:
        return "it has no mover"
    if problem.gathers:
        return "it gathers no rows"
    return "it scatters no rows" if problem.scatters else None


def _hopper_roles_limit(problem: Problem) -> str | None:
    if problem.gathers and (problem.notifies or problem.scatters or problem.mover_bytes > 0):
        return "a kernel that gathers has no mover, no notifications, and no rows that go anywhere"
    return None


def _portable_limit(problem: Problem, hardware: Hardware) -> str | None:
    if limit := hardware.triton_limit():
        return limit
    if problem.dtype not in KERNEL_DTYPES:
        return f"it needs {', '.join(KERNEL_DTYPES)}, x is {problem.dtype}"
    if problem.has_gate:
        return "it has no gates"
    if problem.notifies:
        return "it has no notifications"
    return None


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
