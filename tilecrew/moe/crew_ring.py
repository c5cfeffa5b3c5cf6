"""The ring of communication blocks: rows of peers through shared memory, with nearly all of it in flight all the time.

Computes     row target(g) <- row source(g) for the rows of the groups 0, 1, ... of a block; what a mask of the source
             leaves out becomes zeros
Roles        four movers of four warps, which do the same with different chunks. A warp has rows of its own, and a
             thread the same 16 bytes of each 512 of them: it computes one address a row and steps along the columns.
Hand-offs    none between threads: each reads from a slot what it has copied there itself. Those of a kernel are its
             `begin` (what to wait for in front of a chunk's copies) and `end` (whom to tell behind its stores).
Timeline     [tile] wait for the copy of SLOTS tiles before -> slot -> registers -> store -> asynchronous copy of the
             next tile into the same slot -> [last tile of a group] where the next rows come from, the offsets of the
             rows behind them, the indices of those behind these

A tile is ROWS rows of COLUMNS columns, a group the tiles of the same rows, a chunk CHUNK rows that are waited for and
told of together. Mover m of all movers has the chunks m, m + movers, ..., so that all work on what is needed, or lands,
next.

Why four: the compiler puts barriers in front of a slot and behind it, though no thread reads what another one has
copied. With all 16 warps behind the same barriers a block moved 32 GB/s, in four groups that do not wait for each other
45, which is what a multiprocessor can write. Most of the 192 KB is on its way at any time, so that a peer's latency
does not bind. Nothing waits for what it has just loaded: indices are two groups ahead. Copies go past the L1 cache,
which nobody keeps coherent with other GPUs.
"""

from tilecrew.device.compat import (
    async_copy_to_shared,
    commit_copies,
    gl,
    gluon,
    wait_for_copies,
)
from tilecrew.moe.crew_mover import row_of_peer
from tilecrew.moe.schedule import NUM_MOVERS

MOVERS = gl.constexpr(NUM_MOVERS)
REGISTERS = gl.constexpr(128)  # of a thread: all that 16 warps can have


@gluon.jit
def move_tiles(
    tensors,
    num_chunks,
    num_columns,
    is_well,
    load_source: gl.constexpr,
    load_target: gl.constexpr,
    begin_chunk: gl.constexpr,
    end_chunk: gl.constexpr,
    SIZES: gl.constexpr,
):
    """tensors: source, offsets of all ranks', target, and what the functions need. num_chunks: of all blocks.
    is_well: `begin_chunk` gives the next one; where it is false rows become NaN.

    load_source(tensors, row) -> ranks and rows there, int32, -1 for none; load_target(tensors, row) -> rows, -1 for
    none; begin_chunk(tensors, first row, is_well, CHUNK) -> is_well; end_chunk(tensors, a row of the chunk,
    CHUNK). SIZES: CHUNK, ROWS, COLUMNS, SLOTS."""
    CHUNK: gl.constexpr = SIZES[0]
    ELEMENT: gl.constexpr = tensors[0].dtype.element_ty
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    slots = gl.allocate_shared_memory(ELEMENT, [MOVERS * SIZES[3], SIZES[1], SIZES[2]], LAYOUT)
    work = (tensors, slots, num_chunks, num_columns, is_well)
    gl.warp_specialize(
        [
            (move_own_tiles, (work, load_source, load_target, begin_chunk, end_chunk, CHUNK, 0)),
            (move_own_tiles, (work, load_source, load_target, begin_chunk, end_chunk, CHUNK, 1)),
            (move_own_tiles, (work, load_source, load_target, begin_chunk, end_chunk, CHUNK, 2)),
            (move_own_tiles, (work, load_source, load_target, begin_chunk, end_chunk, CHUNK, 3)),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS],
    )


@gluon.jit
def move_own_tiles(
    work,
    load_source: gl.constexpr,
    load_target: gl.constexpr,
    begin_chunk: gl.constexpr,
    end_chunk: gl.constexpr,
    CHUNK: gl.constexpr,
    MOVER: gl.constexpr,
):
    """What one of a block's movers does, in slots of its own."""
    tensors, slots, num_chunks, num_columns, is_well = work
    SLOTS: gl.constexpr = slots.shape[0] // MOVERS
    ROWS: gl.constexpr = slots.shape[1]
    COLUMNS: gl.constexpr = slots.shape[2]
    source, offsets, target = tensors[0], tensors[1], tensors[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    mover, num_movers = MOVERS * gl.program_id(0) + MOVER, MOVERS * gl.num_programs(0)
    tiles_of_group = gl.cdiv(num_columns, COLUMNS)
    num_own = gl.maximum(num_chunks - mover + num_movers - 1, 0) // num_movers
    num_tiles = num_own * (CHUNK // ROWS) * tiles_of_group
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    # The groups whose tiles set out (source) and are stored (target); `next` is the one after, `last` that behind it.
    source_row, target_row = mover * CHUNK, mover * CHUNK
    rank, row = load_source(tensors, source_row + lane)
    is_row = rank >= 0
    first = row_of_peer(source, load_offsets(offsets, rank), row, num_columns)
    next_row = row_after(source_row, num_movers, CHUNK, ROWS)
    next_rank, next_source = load_source(tensors, next_row + lane)
    next_offset = load_offsets(offsets, next_rank)
    last_row = row_after(next_row, num_movers, CHUNK, ROWS)
    last_rank, last_source = load_source(tensors, last_row + lane)
    place = load_target(tensors, target_row + lane)
    next_place = load_target(tensors, next_row + lane)
    source_column, target_column, slot = 0, 0, MOVER * SLOTS
    for index in range(num_tiles + SLOTS):
        is_stored = index >= SLOTS
        if is_stored:
            wait_for_copies(SLOTS - 1)
            values = slots.index(slot).load(layout)
            there = gl.multiple_of(target + place.to(gl.int64) * num_columns + target_column, 16)
            exists = (column // 8 < (num_columns - target_column) // 8)[None, :] & (place >= 0)[:, None]
            gl.store(there[:, None] + column[None, :], values, mask=exists)
            if not is_well:  # a store of its own: chosen values would cost every tile as many instructions again
                gl.store(there[:, None] + column[None, :], gl.full_like(values, float("nan")), mask=exists)
        if index < num_tiles:
            if (source_column == 0) & (source_row % CHUNK == 0):
                is_well = begin_chunk(tensors, source_row, is_well, CHUNK)
            here = gl.multiple_of(first + source_column, 16)
            exists = (column // 8 < (num_columns - source_column) // 8)[None, :] & (is_row & is_well)[:, None]
            async_copy_to_shared(slots.index(slot), here[:, None] + column[None, :], mask=exists, cache_modifier=".cg")
            source_column += COLUMNS
            if source_column >= num_columns:
                source_column = 0
                source_row = next_row
                next_row = last_row
                is_row = next_rank >= 0
                first = row_of_peer(source, next_offset, next_source, num_columns)
                next_rank, next_source = last_rank, last_source
                next_offset = load_offsets(offsets, last_rank)
                last_row = row_after(last_row, num_movers, CHUNK, ROWS)
                last_rank, last_source = load_source(tensors, last_row + lane)
        # Behind the last tile, groups without copies keep the count.
        commit_copies()
        slot = gl.where(slot == MOVER * SLOTS + SLOTS - 1, MOVER * SLOTS, slot + 1)
        if is_stored:
            target_column += COLUMNS
            if target_column >= num_columns:
                target_column = 0
                if target_row % CHUNK == CHUNK - ROWS:
                    end_chunk(tensors, target_row, CHUNK)
                target_row = row_after(target_row, num_movers, CHUNK, ROWS)
                place = next_place
                next_place = load_target(tensors, row_after(target_row, num_movers, CHUNK, ROWS) + lane)
    wait_for_copies(0)


@gluon.jit
def row_after(row, num_movers, CHUNK: gl.constexpr, ROWS: gl.constexpr):
    """The first row of the mover's next group."""
    is_last = row % CHUNK == CHUNK - ROWS
    return row + ROWS + gl.where(is_last, (num_movers - 1) * CHUNK, 0)


@gluon.jit
def load_place(table, entry, num_entries, WIDTH: gl.constexpr):
    """Rank and row there, of entries of WIDTH integers that begin with them; -1 where there is no such entry."""
    exists = entry < num_entries
    rank = gl.load(table + WIDTH * entry, mask=exists, other=-1)
    return rank, gl.load(table + WIDTH * entry + 1, mask=exists, other=-1)


@gluon.jit
def load_offsets(offsets, rank):
    return gl.load(offsets + gl.maximum(rank, 0))
