"""What moves rows between ranks beside a GEMM: pulling shards in front of it, summing partial products behind it.

Computes
    pull      gathered[r * rows : (r + 1) * rows] = shards of rank r, for all r
    reduce    out[m] = sum over ranks r = 0, 1, ... of partials of rank r [rank * rows + m], in float32

Roles        every block does the same. pull: it walks its pieces of ROWS rows, block b the pieces b, b + blocks, ...
             reduce: it takes pieces in turn, with the blocks of other launches
Hand-offs    pull      counters[row block of 128] (scope gpu) += rows that have landed -> BandGate of the GEMM.
                       What it reads was ordered before it by the barrier of the world.
             reduce    slots[row block of 128][r] (scope sys), written by rank r when it has that block's products ->
                       the block that sums them, before its loads
Timeline     pull      [piece] loads -> stores -> proxy fence (TMA will read them) -> barrier of the block -> release
             reduce    [piece] wait for the slots of all ranks -> barrier of the block -> [rank] load, add -> round
                       once, store

Peers' rows are loaded past the L1 cache, which nobody keeps coherent with other GPUs. Where a wait of the world has
failed, rows become NaN and counters are raised nevertheless: a GEMM that waits ends, and nobody takes its result for
one; World.synchronize says what failed.
"""

import triton
import triton.language as tl

from tilecrew.device.signal import add_release, fence_proxy_async, load_acquire
from tilecrew.parallel.kernel_signal import wait_for_rank

ROW_BLOCK = tl.constexpr(128)


@triton.jit
def peer_matrix(pointer, offsets, rank, first_row, num_columns):
    """Row `first_row` of the matrix of `rank`; rows are multiples of 16 bytes."""
    # Both hints stand where the address is made: on the result of a call Triton 3.6 loses them.
    address = pointer.to(tl.int64) + tl.load(offsets + rank)
    first = tl.multiple_of(address.to(pointer.dtype), 16)
    return tl.multiple_of(first + first_row.to(tl.int64) * num_columns, 16)


@triton.jit
def piece_pointers(first, row, num_columns, column, num_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Elements [ROWS, COLUMNS] of a contiguous matrix, and which of them exist. num_columns is a multiple of 8."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    return first + offsets, (rows < num_rows)[:, None] & (columns < num_columns)[None, :]


@triton.jit(do_not_specialize=["rank", "size", "num_rows"])
def pull_kernel(
    shards,
    offsets,
    gathered,
    counters,
    control,
    rank,
    size,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """shards: this rank's [num_rows, num_columns]; offsets: those of the shards; gathered: all rows."""
    is_well = load_acquire(control, "sys") == 0
    pieces_of_rank = tl.cdiv(num_rows, ROWS)
    for piece in range(tl.program_id(0), size * pieces_of_rank, tl.num_programs(0)):
        # Own rows are there at once; then the ring, so that ranks do not all read from one.
        peer = (rank + piece // pieces_of_rank) % size
        row = piece % pieces_of_rank * ROWS
        source = peer_matrix(shards, offsets, peer, row * 0, num_columns)
        target = gathered + peer.to(tl.int64) * num_rows * num_columns
        for column in range(0, num_columns, COLUMNS):
            pointers, exist = piece_pointers(source, row, num_columns, column, num_rows, ROWS, COLUMNS)
            values = tl.load(pointers, mask=exist & is_well, other=float("nan"), cache_modifier=".cg")
            pointers, exist = piece_pointers(target, row, num_columns, column, num_rows, ROWS, COLUMNS)
            tl.store(pointers, values, mask=exist)
        fence_proxy_async()
        tl.debug_barrier()
        # A piece may end in another row block of the GEMM than it begins in.
        first = peer * num_rows + row
        num_landed = tl.minimum(num_rows - row, ROWS)
        block = first // ROW_BLOCK
        num_in_block = tl.minimum(num_landed, (block + 1) * ROW_BLOCK - first)
        add_release(counters + block, num_in_block, "gpu")
        if num_in_block < num_landed:
            add_release(counters + block + 1, num_landed - num_in_block, "gpu")


@triton.jit(do_not_specialize=["rank", "size", "num_rows", "timeout"])
def reduce_kernel(
    matrices,
    flags,
    rank,
    size,
    num_rows,
    num_columns,
    timeout,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """matrices: partials [size * num_rows, num_columns] of this rank, their offsets, out [num_rows, num_columns].
    flags: tickets [1] int32, pieces that blocks of any launch have taken; epoch, slots, the world's control block and
    its offsets."""
    partials, offsets, out = matrices
    tickets, epoch, slots, control, control_offsets = flags
    expected = tl.load(epoch)
    is_well = expected == expected
    piece = tl.atomic_add(tickets, 1, sem="relaxed")
    while piece * ROWS < num_rows:
        row = piece * ROWS
        first = rank * num_rows + row
        last = first + tl.minimum(num_rows - row, ROWS) - 1
        for block in range(first // ROW_BLOCK, last // ROW_BLOCK + 1):
            for writer in range(size):
                flag = slots + block * size + writer
                is_well &= wait_for_rank(flag, expected, block, writer, control, control_offsets, rank, size, timeout)
        tl.debug_barrier()
        for column in range(0, num_columns, COLUMNS):
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for peer in range(size):
                source = peer_matrix(partials, offsets, peer, rank * num_rows, num_columns)
                pointers, exist = piece_pointers(source, row, num_columns, column, num_rows, ROWS, COLUMNS)
                values = tl.load(pointers, mask=exist & is_well, other=float("nan"), cache_modifier=".cg")
                total += values.to(tl.float32)
            pointers, exist = piece_pointers(out, row, num_columns, column, num_rows, ROWS, COLUMNS)
            tl.store(pointers, total.to(out.dtype.element_ty), mask=exist)
        piece = tl.atomic_add(tickets, 1, sem="relaxed")
