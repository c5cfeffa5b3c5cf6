"""Tokens of all ranks to the rows of this rank's experts, beside the grouped GEMM that multiplies them.

Computes
    dispatch    rows[p] = x of rank r [t],  (r, t) = indices[p];  zeros where it is (-1, -1)             (README, 1)
    share       ids and route weights of this rank to where others read them, those of no expert as -1; counters of rows
                to zero, and the next epoch
    tables      all_ids[r], all_weights[r] = ids and route weights of rank r
    values      out[t * K + k] = values of rank r [p],  (r, p) = indices[t * K + k];  0 where it is (-1, -1)

Roles        every block does the same: it walks its pieces of ROWS rows, block b the pieces b, b + blocks, ...
Hand-offs    dispatch   counters[row block of 128] (scope gpu) += rows that have landed, padding too -> CountGate of the
                        GEMM, whose target is therefore always 128. Rows are padded to whole row blocks.
             What is read from other ranks was ordered before it by a barrier of the world, or by a combine's waits.
Timeline     dispatch   [piece] indices -> loads of peers' rows -> stores -> proxy fence (TMA will read them) -> barrier
                        of the block -> release

Pieces are in the order in which the GEMM takes row blocks. Inside an expert the ranks are in ring order, so that ranks
do not all read from one. Peers' memory is loaded past the L1 cache, which nobody keeps coherent with other GPUs. Where
a wait of the world has failed rows become NaN and counters are raised nevertheless: a GEMM that waits ends, and nobody
takes its result for one; World.synchronize says what failed.
"""

import triton
import triton.language as tl

from tilecrew.device.signal import add_release, fence_proxy_async, load_acquire

ROW_BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["num_experts"])
def dispatch_kernel(
    x,
    offsets,
    indices,
    offs,
    num_experts,
    rows,
    counters,
    control,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x: this rank's [T, num_columns], offsets: those of all ranks; indices [P, 2]; offs [num_experts]; rows [P, ...].
    num_columns is a multiple of 8, offs are multiples of 128."""
    is_well = load_acquire(control, "sys") == 0
    fill = tl.where(is_well, 0.0, float("nan")).to(rows.dtype.element_ty)
    num_rows = tl.load(offs + num_experts - 1)
    for piece in range(tl.program_id(0), num_rows // ROWS, tl.num_programs(0)):
        row = piece * ROWS + tl.arange(0, ROWS)
        rank = tl.load(indices + 2 * row)
        token = tl.load(indices + 2 * row + 1)
        is_row = (rank >= 0) & is_well
        address = x.to(tl.int64) + tl.load(offsets + tl.maximum(rank, 0))
        first = tl.multiple_of(address.to(x.dtype), 16)
        source = tl.multiple_of(first + tl.maximum(token, 0).to(tl.int64) * num_columns, 16)
        target = tl.multiple_of(rows + row.to(tl.int64) * num_columns, 16)
        for begin in range(0, num_columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            exists = (column // 8 < num_columns // 8)[None, :]
            values = tl.load(
                source[:, None] + column[None, :], mask=exists & is_row[:, None], other=fill, cache_modifier=".cg"
            )
            tl.store(target[:, None] + column[None, :], values, mask=exists)
        fence_proxy_async()
        tl.debug_barrier()
        add_release(counters + piece * ROWS // ROW_BLOCK, ROWS, "gpu")


@triton.jit(do_not_specialize=["num_routes", "length", "num_experts", "num_counters"])
def share_kernel(
    ids,
    weights,
    shared_ids,
    shared_weights,
    counters,
    epoch,
    num_routes,
    length,
    num_experts,
    num_counters,
    BLOCK: tl.constexpr,
):
    """ids, weights [num_routes] of any dtypes -> shared_ids [length] int32, -1 behind the routes, and shared_weights;
    counters [num_counters], epoch [1] int32."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = element < num_routes
    expert = tl.load(ids + element, mask=exists, other=-1).to(tl.int64)
    is_expert = (expert >= 0) & (expert < num_experts)
    tl.store(shared_ids + element, tl.where(is_expert, expert, -1).to(tl.int32), mask=element < length)
    tl.store(shared_weights + element, tl.load(weights + element, mask=exists, other=0.0), mask=exists)
    tl.store(counters + element, 0, mask=element < num_counters)
    if tl.program_id(0) == 0:
        tl.store(epoch, tl.load(epoch) + 1)


@triton.jit(do_not_specialize=["length"])
def tables_kernel(ids, ids_offsets, weights, weights_offsets, all_ids, all_weights, length, BLOCK: tl.constexpr):
    """ids [length] int32 and weights [length] float32 of this rank, offsets: those of all; all_ids, all_weights
    [W, length]. Program (r, piece) in a flat grid."""
    num_pieces = tl.cdiv(length, BLOCK)
    rank = tl.program_id(0) // num_pieces
    element = tl.program_id(0) % num_pieces * BLOCK + tl.arange(0, BLOCK)
    target = rank.to(tl.int64) * length + element
    exists = element < length
    source = (ids.to(tl.int64) + tl.load(ids_offsets + rank)).to(ids.dtype)
    tl.store(all_ids + target, tl.load(source + element, mask=exists, cache_modifier=".cg"), mask=exists)
    source = (weights.to(tl.int64) + tl.load(weights_offsets + rank)).to(weights.dtype)
    tl.store(all_weights + target, tl.load(source + element, mask=exists, cache_modifier=".cg"), mask=exists)


@triton.jit(do_not_specialize=["length"])
def values_kernel(values, offsets, indices, control, out, length, BLOCK: tl.constexpr):
    """values [P] float32 of this rank, offsets: those of all; indices [length, 2]; out [length]. NaN where a wait of
    the world has failed."""
    is_well = load_acquire(control, "sys") == 0
    fill = tl.where(is_well, 0.0, float("nan"))
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = element < length
    rank = tl.load(indices + 2 * element, mask=exists, other=-1)
    row = tl.load(indices + 2 * element + 1, mask=exists, other=-1)
    is_route = rank >= 0
    address = values.to(tl.int64) + tl.load(offsets + tl.maximum(rank, 0))
    source = address.to(values.dtype) + tl.maximum(row, 0)
    found = tl.load(source, mask=is_route & is_well, other=fill, cache_modifier=".cg")
    tl.store(out + element, found, mask=exists)
