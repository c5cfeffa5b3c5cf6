"""Results of the experts back to their tokens: told by the grouped GEMM's epilogue, pulled and summed beside it.

Computes    out[t] = sum over k, in order, of weights[t, k] * y of rank r [p] + base[t],  (r, p) = indices[t * K + k]
            in float32, rounded once; (-1, -1) is skipped, whatever its weight is                        (README, 2)
            weights and base may be None: factor one, and nothing to add.

Roles       the GEMM's consumers (notify_sources, the `landed` of an epilogue), and combine blocks: block b walks the
            tokens b, b + blocks, ...
Hand-offs   arrivals[row block of 128] (scope gpu): elects the call that brings a row block's last columns
            slots[row block][r] of every rank (scope sys), written by rank r alone <- the epoch -> combine blocks
Timeline    GEMM        [tile] rows are in global memory -> count -> [last of the row block] fence -> release to all
            combine     [token] wait for the slots of its K rows -> barrier of the block -> [columns] load K rows,
                        add in the order of k -> round once, store

The GEMM never waits for combine blocks; these wait for GEMMs only. Which of them comes first changes no bit: sums go
in the order of k. Peers' rows are loaded past the L1 cache. Tokens whose wait has failed become NaN.
"""

import triton
import triton.language as tl

from tilecrew.device.compat import gl, gluon
from tilecrew.device.signal import fence, peer_pointer, store_release
from tilecrew.grouped_gemm.kernel_epilogues import is_last_call
from tilecrew.parallel.kernel_signal import wait_for_rank

ROW_BLOCK = tl.constexpr(128)
# Routes of a token up to which all of their loads are in flight at once.
MAX_UNROLLED_ROUTES = tl.constexpr(16)


@gluon.jit
def notify_sources(row_block, column_block, num_rows, num_calls, tensors):
    """tensors: arrivals, epoch, slots, their offsets, and [2] int32: rank, number of ranks."""
    if is_last_call(tensors[0] + row_block, num_calls):
        value = gl.load(tensors[1])
        rank = gl.load(tensors[4])
        size = gl.load(tensors[4] + 1)
        fence("sys")
        for peer in range(size):
            store_release(peer_pointer(tensors[2] + row_block * size + rank, tensors[3], peer), value, "sys")


@triton.jit(do_not_specialize=["rank", "size", "num_tokens", "timeout"])
def combine_kernel(
    tensors,
    epoch,
    slots,
    control,
    control_offsets,
    rank,
    size,
    num_tokens,
    num_columns,
    timeout,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """tensors: y [P, num_columns] of this rank, the offsets of all, indices [T * K, 2], weights [T, K] float32 or None,
    base [T, num_columns] or None, out [T, num_columns]."""
    y, offsets, indices, weights, base, out = tensors
    expected = tl.load(epoch)
    is_well = expected == expected
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        first = tl.cast(token, tl.int64) * TOP_K
        for route in range(first, first + TOP_K):
            writer = tl.load(indices + 2 * route)
            if writer >= 0:
                block = tl.load(indices + 2 * route + 1) // ROW_BLOCK
                flag = slots + block * size + writer
                is_well &= wait_for_rank(flag, expected, block, writer, control, control_offsets, rank, size, timeout)
        tl.debug_barrier()
        target = tl.cast(token, tl.int64) * num_columns
        for begin in range(0, num_columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            exists = column // 8 < num_columns // 8
            total = tl.zeros([COLUMNS], tl.float32)
            if TOP_K <= MAX_UNROLLED_ROUTES:
                for k in tl.static_range(TOP_K):
                    total = add_route(total, y, offsets, indices, weights, first + k, column, exists, num_columns)
            else:
                for k in range(TOP_K):
                    total = add_route(total, y, offsets, indices, weights, first + k, column, exists, num_columns)
            if base is not None:
                total += tl.load(base + target + column, mask=exists, other=0.0).to(tl.float32)
            total = tl.where(is_well, total, float("nan"))
            tl.store(out + target + column, total.to(out.dtype.element_ty), mask=exists)


@triton.jit
def add_route(total, y, offsets, indices, weights, route, column, exists, num_columns):
    rank = tl.load(indices + 2 * route)
    row = tl.load(indices + 2 * route + 1)
    is_route = rank >= 0
    address = y.to(tl.int64) + tl.load(offsets + tl.maximum(rank, 0))
    first = tl.multiple_of(address.to(y.dtype), 16)
    source = tl.multiple_of(first + tl.maximum(row, 0).to(tl.int64) * num_columns, 16)
    values = tl.load(source + column, mask=exists & is_route, other=0.0, cache_modifier=".cg").to(tl.float32)
    if weights is not None:
        values *= tl.load(weights + route, mask=is_route, other=0.0)
    return total + values
