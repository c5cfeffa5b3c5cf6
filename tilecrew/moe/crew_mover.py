"""The mover: a warp in every block of the grouped GEMM that brings rows from all ranks while the others multiply.

Computes     rows[p] = x of rank r [t],  (r, t) = indices[p];  zeros where it is (-1, -1)                  (README, 1)
Roles        one warp of the GEMM's blocks, beside its load role and consumers (kernel_grouped_gemm)
Hand-offs    counters[row block of 128] (scope gpu) += rows that have landed, padding too -> BandGate of the GEMM, of
             any block. The mover itself waits for nothing but its own copies, and never for the GEMM.
Timeline     [piece of 2 KB] asynchronous copy into the next of 7 slots -> [last piece of a row] where the next row
             comes from, the offset of the row behind it, the indices of the one after that -> wait for the copy of six
             pieces before -> slot -> registers -> store -> [last piece of a chunk of rows] proxy fence (TMA will read
             them) -> barrier -> release

Block b moves the chunks b, b + blocks, ... of CHUNK rows, so that row blocks are complete in the order in which tiles
need them. A release waits until all stores before it can be seen: one for CHUNK rows. Every thread reads from a slot
what it has copied there itself, so slots need no barrier. Copies go past the L1 cache. Where a wait of the world has
failed rows become NaN, and are counted.
"""

from tilecrew.device.compat import (
    async_copy_to_shared,
    barrier,
    commit_copies,
    gl,
    gluon,
    wait_for_copies,
)
from tilecrew.device.signal import add_release, fence_proxy_async, load_acquire
from tilecrew.moe.schedule import MOVER_COLUMNS, MOVER_SLOTS

ROW_BLOCK = gl.constexpr(128)
CHUNK = gl.constexpr(8)  # rows; a power of two
SLOTS = gl.constexpr(MOVER_SLOTS)
COLUMNS = gl.constexpr(MOVER_COLUMNS)  # of a piece


@gluon.jit
def move_rows(slots, tensors):
    """slots: [7, 1024] in shared memory. tensors: x of this rank, offsets of all ranks', indices [P, 2], offs, [2]
    int32 (number of experts, columns), rows, counters, control block of the world."""
    x, offsets, indices, offs, sizes, rows, counters, control = tensors
    is_well = load_acquire(control, "sys") == 0
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    num_columns = gl.load(sizes + 1)
    num_rows = gl.load(offs + gl.load(sizes) - 1)
    pieces_of_row = gl.cdiv(num_columns, COLUMNS)
    block, num_blocks = gl.program_id(0), gl.num_programs(0)
    num_chunks = gl.maximum(num_rows // CHUNK - block + num_blocks - 1, 0) // num_blocks
    num_pieces = num_chunks * CHUNK * pieces_of_row
    column = gl.arange(0, COLUMNS, layout)
    AHEAD: gl.constexpr = SLOTS - 1
    # Known of the row whose pieces set out: its rank and place; of the one after it: rank, token and the rank's offset;
    # of the one after that: rank and token. So nothing waits for what it has just loaded, past the L1 cache, which
    # acquires of the load role empty all the time.
    rank, token = load_indices(indices, block * CHUNK, num_rows)
    source = row_of_peer(x, load_offset(offsets, rank), token, num_columns)
    last_row = row_after(block * CHUNK, num_blocks)
    next_rank, next_token = load_indices(indices, last_row, num_rows)
    next_offset = load_offset(offsets, next_rank)
    last_row = row_after(last_row, num_blocks)
    last_rank, last_token = load_indices(indices, last_row, num_rows)
    piece, slot = 0, 0
    stored_row, stored_piece, stored_slot = block * CHUNK, 0, 0
    for index in range(num_pieces + AHEAD):
        # Behind the last piece, groups without copies keep the count.
        is_left = column // 8 < (num_columns - piece * COLUMNS) // 8
        mask = is_left & (rank >= 0) & is_well & (index < num_pieces)
        pointers = gl.multiple_of(source + piece * COLUMNS, 16) + column
        async_copy_to_shared(slots.index(slot), pointers, mask=mask, cache_modifier=".cg")
        commit_copies()
        slot = slot_after(slot)
        piece += 1
        if piece == pieces_of_row:
            piece = 0
            rank = next_rank
            source = row_of_peer(x, next_offset, next_token, num_columns)
            next_rank, next_token = last_rank, last_token
            next_offset = load_offset(offsets, last_rank)
            last_row = row_after(last_row, num_blocks)
            last_rank, last_token = load_indices(indices, last_row, num_rows)
        if index >= AHEAD:
            wait_for_copies(AHEAD)
            values = slots.index(stored_slot).load(layout)
            stored_slot = slot_after(stored_slot)
            values = gl.where(is_well, values, gl.full_like(values, float("nan")))
            offset = stored_row.to(gl.int64) * num_columns + stored_piece * COLUMNS
            target = gl.multiple_of(rows + offset, 16)
            gl.store(target + column, values, mask=column // 8 < (num_columns - stored_piece * COLUMNS) // 8)
            stored_piece += 1
            if stored_piece == pieces_of_row:
                stored_piece = 0
                if stored_row % CHUNK == CHUNK - 1:
                    fence_proxy_async()
                    barrier()
                    add_release(counters + stored_row // ROW_BLOCK, CHUNK, "gpu")
                stored_row = row_after(stored_row, num_blocks)
    wait_for_copies(0)


@gluon.jit
def slot_after(slot):
    return gl.where(slot == SLOTS - 1, 0, slot + 1)


@gluon.jit
def row_after(row, num_blocks):
    """The next row of this block."""
    is_last = row % CHUNK == CHUNK - 1
    return row + 1 + gl.where(is_last, (num_blocks - 1) * CHUNK, 0)


@gluon.jit
def load_indices(indices, row, num_rows):
    """Rank and token of a row; -1 where there is no such row."""
    exists = row < num_rows
    rank = gl.load(indices + 2 * row, mask=exists, other=-1)
    return rank, gl.load(indices + 2 * row + 1, mask=exists, other=-1)


@gluon.jit
def load_offset(offsets, rank):
    return gl.load(offsets + gl.maximum(rank, 0))


@gluon.jit
def row_of_peer(x, offset, token, num_columns):
    """Where the token's row begins in the memory of the rank with that offset; anywhere inside, where there is none."""
    address = x.to(gl.int64) + offset
    return address.to(x.dtype) + gl.maximum(token, 0).to(gl.int64) * num_columns
