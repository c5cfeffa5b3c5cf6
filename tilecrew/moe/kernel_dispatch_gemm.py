"""Tokens of all ranks to the rows of this rank's experts, beside the grouped GEMM that multiplies them.

Computes
    dispatch    rows[p] = x of rank r [t],  (r, t) = indices[p];  zeros where it is (-1, -1)             (README, 1)
    source      place_of_token: where that is, for a GEMM that gathers and needs no rows; place_of_own_token: the same
                where all tokens are in one tensor
    bring       near[d - 1, t] = x of rank r + d [t], where a route of that token goes to this rank's experts
    share       ids and route weights of this rank to where others read them, those of no expert as -1; counters of rows
                to zero, and the next epoch
    tables      all_ids[r], all_weights[r] = ids and route weights of rank r
    values      out[t * K + k] = values of rank r [p],  (r, p) = indices[t * K + k];  0 where it is (-1, -1)

Roles        every block does the same. bring: a program has ROWS tokens of one rank. dispatch: its movers walk chunks
             of CHUNK rows, in tiles that go through rings in its shared memory (crew_ring)
Hand-offs    dispatch   counters[row block of 128] (scope gpu) += rows that have landed, padding too -> BandGate of the
                        GEMM, whose target is therefore always 128. Rows are padded to whole row blocks.
             What is read from other ranks was ordered before it by a barrier of the world, or by a combine's waits.
Timeline     dispatch   [tile] ring -> stores -> [last tile of a chunk] barrier of the mover -> one thread: proxy fence
                        (TMA will read them), release

A release waits until every store before it can be seen, a microsecond or two: one for a chunk of some 128 KB, and by a
thread for which the others wait with the next tile only; copies set out before go on. Chunks are in the order in which
the GEMM takes row blocks. Inside an expert the ranks are in ring order, so that ranks do not all read from one. Peers'
memory is loaded past the L1 cache, which nobody keeps coherent with other GPUs. Where a wait of the world has failed
rows become NaN and counters are raised nevertheless: a GEMM that waits ends, and nobody takes its result for one;
World.synchronize says what failed.
"""

import triton
import triton.language as tl

from tilecrew.device.compat import barrier, gl, gluon
from tilecrew.device.signal import add_release, fence_proxy_async_once, load_acquire, peer_pointer
from tilecrew.moe.crew_ring import load_place, move_tiles

ROW_BLOCK = tl.constexpr(128)


@gluon.jit(do_not_specialize=["num_experts"])
def dispatch_kernel(
    tensors,
    num_experts,
    num_columns,
    CHUNK: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """tensors: x [T, num_columns] of this rank, offsets of all ranks', rows [P, num_columns], indices [P, 2], offs
    [num_experts], counters, the world's control block. num_columns is a multiple of 8, offs are multiples of 128."""
    x, offsets, rows, indices, offs, counters, control = tensors
    num_rows = gl.load(offs + num_experts - 1)
    is_well = load_acquire(control, "sys") == 0
    move_tiles(
        (x, offsets, rows, indices, num_rows, counters),
        num_rows // CHUNK,
        num_columns,
        is_well,
        load_token,
        same_row,
        wait_for_nothing,
        count_rows,
        (CHUNK, ROWS, COLUMNS, SLOTS),
    )


@gluon.jit
def load_token(tensors, row):
    return load_place(tensors[3], row, tensors[4], 2)


@gluon.jit
def same_row(tensors, row):
    return row


@gluon.jit
def wait_for_nothing(tensors, row, is_well, CHUNK: gl.constexpr):
    return is_well


@gluon.jit
def count_rows(tensors, row, CHUNK: gl.constexpr):
    barrier()
    fence_proxy_async_once()
    add_release(tensors[5] + row // ROW_BLOCK, CHUNK, "gpu")


@gluon.jit
def place_of_token(rows, tensors):
    """The `source` of a GEMM. tensors: indices [P, 2], addresses of the ranks' tokens [W] int64, and [2] int32, the
    second the columns of a token, of 16 bits."""
    rank = gl.load(tensors[0] + 2 * rows)
    token = gl.load(tensors[0] + 2 * rows + 1)
    first = gl.load(tensors[1] + gl.maximum(rank, 0))
    return gl.where(rank >= 0, first + token.to(gl.int64) * gl.load(tensors[2] + 1) * 2, 0)


@gluon.jit
def place_of_own_token(rows, tensors):
    """The `source` of a GEMM of a rank that has all tokens. tensors: x [T, H], row_routes [P], and the numbers K and
    bytes of a token. x itself, and no address in device memory: launches that are remembered replace it."""
    x, row_routes, top_k, row_bytes = tensors
    route = gl.load(row_routes + rows)
    token = gl.maximum(route, 0) // top_k
    return gl.where(route >= 0, address_of(x) + token.to(gl.int64) * row_bytes, 0)


@gluon.jit
def address_of(x):
    return x.to(gl.int64)


@triton.jit(do_not_specialize=["rank", "size", "num_tokens", "first_expert", "end_expert"])
def bring_kernel(
    tensors,
    near,
    rank,
    size,
    num_tokens,
    first_expert,
    end_expert,
    num_columns,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """tensors: x [num_tokens, num_columns] and ids [num_tokens, TOP_K] of this rank, each with the offsets of all
    ranks'; near [size - 1, num_tokens, num_columns], next rank first. Experts of this rank: first_expert to
    end_expert - 1. Program (distance - 1, group of ROWS tokens) in a flat grid: ranks do not all read from one."""
    x, offsets, ids, ids_offsets = tensors
    num_groups = tl.cdiv(num_tokens, ROWS)
    slot = tl.program_id(0) // num_groups
    peer = (rank + 1 + slot) % size
    token = tl.program_id(0) % num_groups * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, triton.next_power_of_2(TOP_K))
    exists = (token < num_tokens)[:, None] & (k < TOP_K)[None, :]
    there = peer_pointer(ids, ids_offsets, peer) + token[:, None] * TOP_K + k[None, :]
    expert = tl.load(there, mask=exists, other=-1, cache_modifier=".cg")
    is_needed = tl.max(((expert >= first_expert) & (expert < end_expert)).to(tl.int32), 1) > 0
    source = peer_pointer(x, offsets, peer) + token.to(tl.int64)[:, None] * num_columns
    target = near + (slot.to(tl.int64) * num_tokens + token)[:, None] * num_columns
    for begin in range(0, num_columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        mask = is_needed[:, None] & (column // 8 < num_columns // 8)
        values = tl.load(tl.multiple_of(source + column, [1, 16]), mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(tl.multiple_of(target + column, [1, 16]), values, mask=mask)


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
