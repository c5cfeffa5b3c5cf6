"""The mover: one warp in every block of the grouped GEMM that brings rows from all ranks while the others multiply.

Computes     rows[p] = x of rank r [t],  (r, t) = indices[p];  zeros where it is (-1, -1)                  (README, 1)
Roles        one warp of the GEMM's blocks, beside its load role and consumers (kernel_grouped_gemm)
Hand-offs    counters[row block of 128] (scope gpu) += rows that have landed, padding too -> CountGate of the GEMM, of
             any block. The mover itself waits for nothing but its own copies, and never for the GEMM.
Timeline     [piece of 2 KB] asynchronous copy of piece i into slot i mod 8 -> wait for piece i - 7 -> slot ->
             registers -> store -> [last piece of a chunk of rows] proxy fence (TMA will read them) -> barrier of the
             warp -> release

Block b moves the chunks b, b + blocks, ... of CHUNK rows, so that row blocks are complete in the order in which tiles
need them. Copies go past the L1 cache. Where a wait of the world has failed rows become NaN, and are counted.
"""

from tilecrew.device.compat import (
    async_copy_to_shared,
    barrier,
    commit_copies,
    gl,
    gluon,
    wait_for_copies,
)
from tilecrew.device.signal import add_release, fence_proxy_async, load_acquire, peer_pointer
from tilecrew.moe.schedule import MOVER_COLUMNS, MOVER_SLOTS

ROW_BLOCK = gl.constexpr(128)
CHUNK = gl.constexpr(2)  # rows
SLOTS = gl.constexpr(MOVER_SLOTS)
COLUMNS = gl.constexpr(MOVER_COLUMNS)  # of a piece


@gluon.jit
def move_rows(slots, tensors):
    """slots: [8, 1024] in shared memory. tensors: x of this rank, offsets of all ranks', indices [P, 2], offs, [2]
    int32 (number of experts, columns), rows, counters, control block of the world."""
    x, offsets, indices, offs, sizes, rows, counters, control = tensors
    is_well = load_acquire(control, "sys") == 0
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    num_columns = gl.load(sizes + 1)
    num_rows = gl.load(offs + gl.load(sizes) - 1)
    pieces_of_row = gl.cdiv(num_columns, COLUMNS)
    pieces_of_chunk = pieces_of_row * CHUNK
    block, num_blocks = gl.program_id(0), gl.num_programs(0)
    num_chunks = gl.maximum(num_rows // CHUNK - block + num_blocks - 1, 0) // num_blocks
    num_pieces = num_chunks * pieces_of_chunk
    AHEAD: gl.constexpr = SLOTS - 1
    for index in range(num_pieces + AHEAD):
        # Piece `index` sets out; behind the last one, groups without copies keep the count.
        row = (block + index // pieces_of_chunk * num_blocks) * CHUNK + index % pieces_of_chunk // pieces_of_row
        first = index % pieces_of_row * COLUMNS
        exists = index < num_pieces
        rank = gl.load(indices + 2 * row, mask=exists, other=-1)
        token = gl.load(indices + 2 * row + 1, mask=exists, other=-1)
        offset = gl.maximum(token, 0).to(gl.int64) * num_columns + first
        source = gl.multiple_of(peer_pointer(x, offsets, gl.maximum(rank, 0)) + offset, 16)
        column = gl.arange(0, COLUMNS, layout)
        mask = (column // 8 < (num_columns - first) // 8) & (rank >= 0) & is_well
        async_copy_to_shared(slots.index(index % SLOTS), source + column, mask=mask, cache_modifier=".cg")
        commit_copies()
        if index >= AHEAD:
            store_piece(index - AHEAD, slots, tensors, pieces_of_row, num_columns, is_well, layout)
    wait_for_copies(0)


@gluon.jit
def store_piece(index, slots, tensors, pieces_of_row, num_columns, is_well, layout: gl.constexpr):
    """Piece number `index` of this block from its slot to its row; the last one of a chunk counts the chunk's rows."""
    pieces_of_chunk = pieces_of_row * CHUNK
    first_row = (gl.program_id(0) + index // pieces_of_chunk * gl.num_programs(0)) * CHUNK
    row = first_row + index % pieces_of_chunk // pieces_of_row
    first = index % pieces_of_row * COLUMNS
    wait_for_copies(SLOTS - 1)
    barrier()
    values = slots.index(index % SLOTS).load(layout)
    barrier()  # the slot is free for the copy that follows
    values = gl.where(is_well, values, gl.full_like(values, float("nan")))
    column = gl.arange(0, COLUMNS, layout)
    target = gl.multiple_of(tensors[5] + (row.to(gl.int64) * num_columns + first), 16)
    gl.store(target + column, values, mask=column // 8 < (num_columns - first) // 8)
    if index % pieces_of_chunk == pieces_of_chunk - 1:
        fence_proxy_async()
        barrier()
        add_release(tensors[6] + first_row // ROW_BLOCK, CHUNK, "gpu")
