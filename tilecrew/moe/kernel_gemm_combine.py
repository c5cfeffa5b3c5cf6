"""Results of the experts back to their tokens: pushed there by the grouped GEMM, or pulled as they land; and summed.

Computes    out[t] = sum over k, in order, of weights[t, k] * y of rank r [p] + base[t],  (r, p) = indices[t * K + k]
            in float32, rounded once; (-1, -1) is skipped, whatever its weight is                        (README, 2)
            weights and base may be None: factor one, and nothing to add.

Pushed      the GEMM's consumers store each row where place_of_route says, in `returned` of the token's rank. Behind the
            GEMM a barrier of all ranks, then combine (WHERE "returned"), which finds a token's rows side by side.
            Nobody tells of row blocks, and nobody waits for one. What follows is of results that are pulled.

Roles       the GEMM's notify role (notify_sources, the `landed` of an epilogue); pull blocks beside the GEMM: their
            movers walk the chunks of CHUNK rows of other ranks, in the order in which they land, through rings in
            shared memory (crew_ring); combine blocks behind both: block b walks the groups b, b + blocks, ... of
            TOKENS tokens
Hand-offs   arrivals[row block of 128] (scope gpu): elects the call that brings a row block's last columns
            slots[row block][r] of every rank (scope sys), written by rank r alone <- the epoch -> pull blocks
            staged[t * K + k] -> combine, a kernel behind the pull blocks
Timeline    GEMM        [tile] rows are in global memory -> count -> [last of the row block] fence -> release to all
            pull        [chunk] look at the slots of all its rows at once, wait for those that are not there -> barrier
                        of the mover -> [tile] ring -> staged. Copies of the chunk before stay on their way meanwhile.
            combine     [group] [columns] all K rows of all its tokens in flight, added in the order of k -> round
                        once, store

WHERE "peers": without pull blocks, for few tokens of several ranks. Combine waits for the slots itself, and loads from
peers.

The GEMM never waits for the others; these wait for GEMMs only. Sums do not begin beside it, because a token's last row
lands near the end: of K rows, which are spread over all experts, the last one comes when K / (K + 1) of the experts are
done. What takes long is the way from other ranks, and pull blocks go it in the shadow of the product. Which row comes
first changes no bit: sums go in the order of k. Peers' rows are loaded past the L1 cache. Tokens whose wait has failed
become NaN.
"""

import triton
import triton.language as tl

from tilecrew.device.compat import gl, gluon
from tilecrew.device.signal import fence, is_reached, load_acquire, peer_pointer, store_release
from tilecrew.grouped_gemm.kernel_epilogues import is_last_call
from tilecrew.moe.crew_ring import load_place, move_tiles
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


@gluon.jit
def place_of_route(entries, tensors):
    """The `destination` of a GEMM. entries: routes (rank * T + token) * K + k; tensors: row_routes, `returned` of this
    rank [T * K, columns], offsets of all ranks', [2] int32: T * K and columns."""
    num_routes = gl.load(tensors[3])
    num_columns = gl.load(tensors[3] + 1)
    rank = entries // num_routes
    first = tensors[1].to(gl.int64) + gl.load(tensors[2] + rank)
    BYTES: gl.constexpr = tensors[1].dtype.element_ty.primitive_bitwidth // 8
    return first + (entries - rank * num_routes).to(gl.int64) * num_columns * BYTES


@triton.jit(do_not_specialize=["rank", "size", "num_tokens", "timeout"])
def combine_kernel(
    tensors,
    flags,
    rank,
    size,
    num_tokens,
    num_columns,
    timeout,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHERE: tl.constexpr,
):
    """tensors: y, other, indices [T * K, 2], weights [T, K] float32 or None, base [T, num_columns] or None, out
    [T, num_columns]. flags: epoch, slots (None where results are "returned"), the world's control block and its
    offsets. WHERE rows are, by route t * K + k and (rank, row) of indices:

    returned    y [T * K, num_columns] by route
    staged      y [P, num_columns] by row, of this rank, and other [T * K, num_columns] by route, of others
    peers       y [P, num_columns] by row, of this rank; other: offsets of all ranks'"""
    y, other, indices, weights, base, out = tensors
    epoch, slots, control, control_offsets = flags
    is_well = load_acquire(control, "sys") == 0
    k = tl.arange(0, triton.next_power_of_2(TOP_K))
    for group in range(tl.program_id(0), tl.cdiv(num_tokens, TOKENS), tl.num_programs(0)):
        token = group * TOKENS + tl.arange(0, TOKENS)
        is_token = token < num_tokens
        route = token[:, None] * TOP_K + k[None, :]
        exists = is_token[:, None] & (k < TOP_K)[None, :]
        writer = tl.load(indices + 2 * route, mask=exists, other=-1)
        if WHERE == "returned":
            address = tl.where(writer >= 0, address_in(y, route, num_columns), 0)
        else:
            row = tl.load(indices + 2 * route + 1, mask=exists, other=0)
            if WHERE == "staged":
                address = address_here(y, other, writer, row, route, rank, num_columns)
            else:
                expected = tl.load(epoch)
                is_well &= wait_for_rows(slots, expected, writer, row, control, control_offsets, rank, size, timeout)
                address = address_of(y, other, writer, row, num_columns)
        factor = tl.full([TOKENS, k.shape[0]], 1.0, tl.float32)
        if weights is not None:
            factor = tl.load(weights + route, mask=writer >= 0, other=0.0)
        target = tl.multiple_of(token.to(tl.int64) * num_columns, 8)[:, None]
        for begin in range(0, num_columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            mask = is_token[:, None] & (column // 8 < num_columns // 8)[None, :]
            total = tl.zeros([TOKENS, COLUMNS], tl.float32)
            if TOP_K <= MAX_UNROLLED_ROUTES:
                for number in tl.static_range(TOP_K):
                    total = add_route(total, y, address, factor, k == number, column, mask)
            else:
                for number in range(TOP_K):
                    total = add_route(total, y, address, factor, k == number, column, mask)
            place = target + column[None, :]
            if base is not None:
                total += tl.load(base + place, mask=mask, other=0.0).to(tl.float32)
            total = tl.where(is_well, total, float("nan"))
            tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["rank", "size", "num_routes", "timeout"])
def pull_kernel(
    tensors,
    flags,
    rank,
    size,
    num_routes,
    num_columns,
    timeout,
    CHUNK: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """tensors: y [P, num_columns] of this rank, the offsets of all, staged [num_routes, num_columns], and pulled
    [num_routes, 3] (rank, row, route), -1 behind the last. flags as of combine_kernel."""
    y, offsets, staged, pulled = tensors
    epoch, slots, control, control_offsets = flags
    expected = gl.load(epoch)
    is_well = load_acquire(control, "sys") == 0
    num_pulled = count_pulled(pulled, num_routes)
    move_tiles(
        (y, offsets, staged, pulled, num_pulled, slots, expected, control, control_offsets, rank, size, timeout),
        gl.cdiv(num_pulled, CHUNK),
        num_columns,
        is_well,
        load_result,
        load_route,
        wait_for_results,
        tell_nobody,
        (CHUNK, ROWS, COLUMNS, SLOTS),
    )


@gluon.jit
def count_pulled(pulled, num_routes):
    """How many entries the table has: those in front of the first -1."""
    PROBES: gl.constexpr = 32 * gl.num_warps()
    probe = gl.arange(0, PROBES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    begin, end = 0, num_routes
    while begin < end:
        step = gl.cdiv(end - begin, PROBES)
        place = begin + probe * step
        found = gl.load(pulled + 3 * place, mask=place < end, other=-1) >= 0
        num_found = gl.sum(found.to(gl.int32), 0)
        end = gl.where(num_found == 0, begin, gl.minimum(begin + num_found * step, end))
        begin = gl.where(num_found == 0, begin, begin + (num_found - 1) * step + 1)
    return begin


@gluon.jit
def load_result(tensors, entry):
    return load_place(tensors[3], entry, tensors[4], 3)


@gluon.jit
def load_route(tensors, entry):
    return gl.load(tensors[3] + 3 * entry + 2, mask=entry < tensors[4], other=-1)


@gluon.jit
def wait_for_results(tensors, entry, is_well, CHUNK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0])
    chunk = entry + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    writer, row = load_result(tensors, chunk)
    slots, expected, control, control_offsets = tensors[5], tensors[6], tensors[7], tensors[8]
    rank, size, timeout = tensors[9], tensors[10], tensors[11]
    return is_well & wait_for_rows(
        slots, expected, writer[:, None], row[:, None], control, control_offsets, rank, size, timeout
    )


@gluon.jit
def tell_nobody(tensors, entry, CHUNK: gl.constexpr):
    pass


@triton.jit
def wait_for_rows(slots, expected, writer, row, control, control_offsets, rank, size, timeout):
    """Waits for the row blocks of all routes (writer, row) [tokens, K]; whether all came. Gluon calls it, too.

    At a deadline one warp may see the slot and another one not: both go on as long as somebody misses a slot and none
    of his waits has failed, because all warps take part in what finds out.
    """
    is_route = writer >= 0
    place = tl.where(is_route, row // ROW_BLOCK * size + writer, 0)
    is_well = expected == expected
    missing = last_missing(slots, place, is_route, expected)
    while missing >= 0:
        # What comes last, most likely: then the others are there.
        is_well &= wait_for_rank(
            slots + missing, expected, missing // size, missing % size, control, control_offsets, rank, size, timeout
        )
        missing = last_missing(slots, place, is_route & is_well, expected)
    tl.debug_barrier()
    return is_well


@triton.jit
def last_missing(slots, place, is_route, expected):
    """The largest place of a slot that has not reached the epoch; -1: all have."""
    is_missing = is_route & (is_reached(load_acquire(slots + place, "sys"), expected) == 0)
    return tl.max(tl.max(tl.where(is_missing, place, -1), 1), 0)


@triton.jit
def address_in(y, row, num_columns):
    return (y + row.to(tl.int64) * num_columns).to(tl.int64)


@triton.jit
def address_of(y, offsets, writer, row, num_columns):
    """Where the rows of routes begin, as numbers; 0 for no route."""
    first = y.to(tl.int64) + tl.load(offsets + tl.maximum(writer, 0))
    address = (first.to(y.dtype) + row.to(tl.int64) * num_columns).to(tl.int64)
    return tl.where(writer >= 0, address, 0)


@triton.jit
def address_here(y, staged, writer, row, route, rank, num_columns):
    """The same where rows of other ranks are in `staged`."""
    own = address_in(y, row, num_columns)
    address = tl.where(writer == rank, own, address_in(staged, route, num_columns))
    return tl.where(writer >= 0, address, 0)


@triton.jit
def rows_at(y, address):
    return tl.multiple_of(address.to(y.dtype), 16)


@triton.jit
def add_route(total, y, address, factor, is_it, column, mask):
    """total + factor * row of one route of each token. What is chosen here stays the same for all columns: the
    compiler takes it out of their loop, where only the rows themselves are loaded."""
    chosen = tl.sum(tl.where(is_it[None, :], address, 0), 1)
    first = rows_at(y, chosen)
    values = tl.load(
        first[:, None] + column[None, :], mask=mask & (chosen != 0)[:, None], other=0.0, cache_modifier=".cg"
    )
    return total + values.to(tl.float32) * tl.sum(tl.where(is_it[None, :], factor, 0.0), 1)[:, None]
