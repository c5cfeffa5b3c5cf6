"""The routing tables in plain Triton: what `routing` does in some eighty torch operations, in three kernels.

Computes    the tables of `routing.Routing`, the same integers (README, section 2), by a stable counting sort: a route's
            row is where its expert begins, and the routes of its expert that come before it. Routes are counted in
            blocks of consecutive routes of one source rank. Of an expert's routes, which go by (distance of the source,
            token, k), each block has a run: blocks follow each other in the ring, beginning with the expert's owner.

Roles       one each, of four warps, of eight in scan_kernel:
            count_kernel     a program a block: its routes of each expert; and -1 into the tables that have gaps
            scan_kernel      a program for SCAN_EXPERTS experts: in place of counts, routes of the expert in the blocks
                             before, in ring order; and in all blocks
            rows_kernel      a program a block: where each expert begins, then STEP routes at a time the row of each,
                             into the tables of both ends. All programs add up the same experts, which saves a launch.
Timeline    count -> scan -> rows, one behind the other on the stream. No program waits for another.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilecrew._launches import LaunchMemory
from tilecrew.device.launch import Launch

#: Routes of a block, or a multiple for many routes: the counts of no more than about MAX_BLOCKS are kept and added up.
BLOCK = 256
MAX_BLOCKS = 1024
#: Routes that a program of rows_kernel compares with each other, all pairs of them.
STEP = 128
#: Experts of a program of scan_kernel, which is a sector of the L2 cache, and the blocks that it adds up at a time.
SCAN_EXPERTS = 8
SCAN_BLOCKS = 512
LAUNCHES = LaunchMemory()


class Sizes(NamedTuple):
    """What programs are compiled for. small, num_large: E / W and E mod W; bins: a power of two, of E or more.

    slots: a power of two, of W times the most experts that a rank has or more.
    """

    world_size: int
    num_experts: int
    top_k: int
    row_block: int
    small: int
    num_large: int
    bins: int
    slots: int
    block: int
    step: int
    scan_experts: int
    scan_blocks: int


class Shape(NamedTuple):
    """What programs are told. per_rank: routes of a rank; per_block: of a block; blocks: of a rank; num_rows: P."""

    per_rank: int
    per_block: int
    blocks: int
    num_rows: int
    rank: int


class Tables(NamedTuple):
    """What is computed: of `routing.Routing`, all int32 and contiguous."""

    offs: torch.Tensor
    tokens_per_expert: torch.Tensor
    pull_dispatch_indices: torch.Tensor
    row_routes: torch.Tensor
    combine_indices: torch.Tensor
    pull_combine_indices: torch.Tensor


def build(
    topk_ids: torch.Tensor, num_tokens: torch.Tensor | None, num_experts: int, rank: int, row_block: int, tables: Tables
) -> None:
    """Fills the tables of `rank`, whatever they held; topk_ids [W, T, K] with at least one route, contiguous."""
    sizes = sizes_of(topk_ids, num_experts, row_block)
    shape = shape_of(topk_ids, rank, tables)
    counts = counts_for(topk_ids, shape, sizes)
    key = (shape, sizes)
    tensors = (topk_ids, num_tokens, counts, *tables)
    LAUNCHES.run(("count", key), tensors, lambda: count_launch(topk_ids, num_tokens, counts, tables, shape, sizes))
    LAUNCHES.run(("scan", key), (counts,), lambda: scan_launch(counts, shape, sizes))
    LAUNCHES.run(("rows", key), tensors, lambda: rows_launch(topk_ids, num_tokens, counts, tables, shape, sizes))


def sizes_of(topk_ids: torch.Tensor, num_experts: int, row_block: int) -> Sizes:
    """What the kernels are compiled for."""
    world_size, _, top_k = topk_ids.shape
    bins = triton.next_power_of_2(num_experts)
    slots = triton.next_power_of_2(triton.cdiv(num_experts, world_size) * world_size)
    blocks = (BLOCK, STEP, SCAN_EXPERTS, SCAN_BLOCKS)
    return Sizes(world_size, num_experts, top_k, row_block, *divmod(num_experts, world_size), bins, slots, *blocks)


def shape_of(topk_ids: torch.Tensor, rank: int, tables: Tables) -> Shape:
    """What the kernels are told."""
    world_size = topk_ids.shape[0]
    per_rank = topk_ids.numel() // world_size
    per_block = BLOCK
    while per_block < per_rank and triton.cdiv(per_rank, per_block) * world_size > MAX_BLOCKS:
        per_block *= 2
    return Shape(per_rank, per_block, triton.cdiv(per_rank, per_block), tables.row_routes.shape[0], rank)


def counts_for(topk_ids: torch.Tensor, shape: Shape, sizes: Sizes) -> torch.Tensor:
    """[W * blocks + 1, E] int32, undefined: routes of each expert in each block, and in all blocks.

    Indices are int32: there are MAX_BLOCKS or W, and a program's tensors have at most 2^20 elements, here E.
    """
    return topk_ids.new_empty(sizes.world_size * shape.blocks + 1, sizes.num_experts, dtype=torch.int32)


def count_launch(
    topk_ids: torch.Tensor,
    num_tokens: torch.Tensor | None,
    counts: torch.Tensor,
    tables: Tables,
    shape: Shape,
    sizes: Sizes,
) -> Launch:
    """Programs behind those of the blocks fill tables only: padding may be more than all routes."""
    args = (topk_ids, num_tokens, counts, tables, shape, sizes)
    num_programs = max(sizes.world_size * shape.blocks, triton.cdiv(shape.num_rows, shape.per_block))
    return Launch(count_kernel, num_programs, args, {"num_warps": 4})


def scan_launch(counts: torch.Tensor, shape: Shape, sizes: Sizes) -> Launch:
    """counts: as count_kernel leaves them."""
    num_programs = triton.cdiv(sizes.num_experts, sizes.scan_experts)
    return Launch(scan_kernel, num_programs, (counts, shape, sizes), {"num_warps": 8})


def rows_launch(
    topk_ids: torch.Tensor,
    num_tokens: torch.Tensor | None,
    counts: torch.Tensor,
    tables: Tables,
    shape: Shape,
    sizes: Sizes,
) -> Launch:
    """counts: as scan_kernel leaves them."""
    args = (topk_ids, num_tokens, counts, tables, shape, sizes)
    return Launch(rows_kernel, sizes.world_size * shape.blocks, args, {"num_warps": 4})


@triton.jit
def count_kernel(ids, num_tokens, counts, tables, shape, sizes: tl.constexpr):
    per_rank, per_block, blocks, num_rows, _ = shape
    _, _, pulled, row_routes, _, pull_combine = tables
    E: tl.constexpr = sizes.num_experts
    N: tl.constexpr = sizes.block
    BINS: tl.constexpr = sizes.bins
    block = tl.program_id(0)
    for begin in range(0, per_block, N):
        first = block.to(tl.int64) * per_block + begin
        fill(row_routes, first, num_rows, 1, N)
        fill(pulled, first, num_rows, 2, N)
        fill(pull_combine, first, per_rank, 3, N)
    source = block // blocks
    if source < sizes.world_size:
        end = end_of_routes(num_tokens, source, per_rank, sizes.top_k)
        counted = tl.zeros([BINS], tl.int32)
        for begin in range(0, per_block, N):
            first = (block % blocks).to(tl.int64) * per_block + begin
            expert = experts_of(ids, source, first, end, per_rank, E, N)
            counted += count_experts(expert, E, BINS)
        every = tl.arange(0, BINS)
        tl.store(counts + block * E + every, counted, mask=every < E)


@triton.jit
def scan_kernel(counts, shape, sizes: tl.constexpr):
    _, _, blocks, _, _ = shape
    E: tl.constexpr = sizes.num_experts
    N: tl.constexpr = sizes.scan_blocks
    M: tl.constexpr = sizes.scan_experts
    num_blocks = sizes.world_size * blocks
    expert = tl.program_id(0) * M + tl.arange(0, M)
    is_expert = expert < E
    first_block = owner_of(expert, sizes.small, sizes.num_large) * blocks
    before = tl.zeros([M], tl.int32)
    for begin in range(0, num_blocks, N):
        place = begin + tl.arange(0, N)  # in ring order
        block = place[:, None] + first_block[None, :]
        block = tl.where(block < num_blocks, block, block - num_blocks)
        mask = (place < num_blocks)[:, None] & is_expert[None, :]
        pointers = counts + block * E + expert[None, :]
        counted = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, before[None, :] + tl.cumsum(counted, 0) - counted, mask=mask)
        before += tl.sum(counted, 0)
    tl.store(counts + num_blocks * E + expert, before, mask=is_expert)


@triton.jit
def rows_kernel(ids, num_tokens, before, tables, shape, sizes: tl.constexpr):
    """before: routes of each expert in the blocks before each block, then in all."""
    per_rank, per_block, blocks, _, rank = shape
    offs, tokens_per_expert, pulled, row_routes, combine, pull_combine = tables
    W: tl.constexpr = sizes.world_size
    E: tl.constexpr = sizes.num_experts
    K: tl.constexpr = sizes.top_k
    N: tl.constexpr = sizes.step
    BINS: tl.constexpr = sizes.bins
    block = tl.program_id(0)
    source = block // blocks
    is_mine = source == rank

    every = tl.arange(0, BINS)
    counts = tl.load(before + W * blocks * E + every, mask=every < E, other=0)
    padded = (counts + sizes.row_block - 1) // sizes.row_block * sizes.row_block
    begins = tl.cumsum(padded, 0) - padded
    # From the first row of the expert's rank on. Rows of all ranks may pass 2^31; the difference is right still.
    first = first_expert_of(owner_of(every, sizes.small, sizes.num_large), sizes.small, sizes.num_large)
    begins -= tl.gather(begins, tl.where(every < E, first, 0), 0)
    if block == 0:
        local = every - first_expert_of(rank, sizes.small, sizes.num_large)
        own = (local >= 0) & (every < first_expert_of(rank + 1, sizes.small, sizes.num_large))
        tl.store(offs + local, begins + padded, mask=own)
        tl.store(tokens_per_expert + local, counts, mask=own)
    shifts = tl.zeros([BINS], tl.int32)
    if W > 1:
        if is_mine:
            shifts = pull_shifts(before, begins, blocks, rank, sizes)

    rows = begins + tl.load(before + block * E + every, mask=every < E, other=0)  # the next of each expert
    end = end_of_routes(num_tokens, source, per_rank, K)
    lane = tl.arange(0, N)
    for begin in range(0, per_block, N):
        first_inside = (block % blocks).to(tl.int64) * per_block + begin
        expert = experts_of(ids, source, first_inside, end, per_rank, E, N)
        is_route = expert < E
        is_same_before = (expert[:, None] == expert[None, :]) & (lane[:, None] < lane[None, :])
        row = tl.gather(rows, tl.where(is_route, expert, 0), 0) + tl.sum(is_same_before.to(tl.int32), 0)
        rows += count_experts(expert, E, BINS)

        inside = first_inside + lane
        owner = owner_of(expert, sizes.small, sizes.num_large)
        is_here = is_route & (owner == rank)
        place = row.to(tl.int64)
        tl.store(row_routes + place, (source.to(tl.int64) * per_rank + inside).to(tl.int32), mask=is_here)
        store_pairs(pulled, place, source, inside.to(tl.int32) // K, is_here)
        if is_mine:
            store_pairs(combine, inside, tl.where(is_route, owner, -1), tl.where(is_route, row, -1), inside < per_rank)
            if W > 1:
                is_pull = is_route & (owner != rank)
                pull = (row + tl.gather(shifts, tl.where(is_route, expert, 0), 0)).to(tl.int64)
                tl.store(pull_combine + 3 * pull, owner, mask=is_pull)
                tl.store(pull_combine + 3 * pull + 1, row, mask=is_pull)
                tl.store(pull_combine + 3 * pull + 2, inside.to(tl.int32), mask=is_pull)


@triton.jit
def pull_shifts(before, begins, blocks, rank, sizes: tl.constexpr):
    """Of each expert of the other ranks: from the rows of this rank's routes to the places of their pulls.

    Slots are the experts in the order in which their results land.
    """
    W: tl.constexpr = sizes.world_size
    E: tl.constexpr = sizes.num_experts
    slot = tl.arange(0, sizes.slots)
    number, ring = slot // W, slot % W
    owner = (rank + ring) % W
    first = first_expert_of(owner, sizes.small, sizes.num_large)
    is_expert = (ring > 0) & (number < first_expert_of(owner + 1, sizes.small, sizes.num_large) - first)
    expert = tl.where(is_expert, first + number, 0)
    # This rank's routes end where the next one's begin, or behind all where the next one is the expert's.
    next_rank = (rank + 1) % W
    end_block = tl.where(owner == next_rank, W, next_rank) * blocks
    begin = tl.load(before + rank * blocks * E + expert, mask=is_expert, other=0)
    end = tl.load(before + end_block * E + expert, mask=is_expert, other=0)
    pulls = tl.cumsum(end - begin, 0) - (end - begin)

    every = tl.arange(0, sizes.bins)
    owner = owner_of(every, sizes.small, sizes.num_large)
    number = every - first_expert_of(owner, sizes.small, sizes.num_large)
    slot = tl.where(every < E, number * W + (owner - rank + W) % W, 0)
    first_row = begins + tl.load(before + rank * blocks * E + every, mask=every < E, other=0)
    return tl.gather(pulls, slot, 0) - first_row


@triton.jit
def end_of_routes(num_tokens, source, per_rank, K: tl.constexpr):
    """Routes of a source that are of tokens which it really has."""
    if num_tokens is None:
        end = per_rank
    else:
        end = tl.minimum(tl.load(num_tokens + source).to(tl.int64) * K, per_rank)
    return end


@triton.jit
def experts_of(ids, source, first, end, per_rank, E: tl.constexpr, N: tl.constexpr):
    """[N] the experts of the routes from `first` on of a source; E where there is no route."""
    lane = tl.arange(0, N)
    pointers = ids + source.to(tl.int64) * per_rank + first + lane
    expert = tl.load(pointers, mask=lane < end - first, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def count_experts(expert, E: tl.constexpr, BINS: tl.constexpr):
    """[BINS] how many there are of each."""
    return tl.histogram(tl.where(expert < E, expert, 0), BINS, mask=expert < E)


@triton.jit
def fill(table, first, num_rows, WIDTH: tl.constexpr, N: tl.constexpr):
    """-1 into N rows of a table of that width, from `first` on, as far as there are rows."""
    for part in tl.static_range(WIDTH):
        place = part * N + tl.arange(0, N)
        tl.store(table + first * WIDTH + place, tl.full([N], -1, tl.int32), mask=place < (num_rows - first) * WIDTH)


@triton.jit
def store_pairs(table, row, left, right, mask):
    """Rows of a table of two columns, each by one store."""
    pointers = table + 2 * row[:, None] + tl.arange(0, 2)[None, :]
    tl.store(pointers, tl.join(left, right), mask=mask[:, None])


@triton.jit
def owner_of(expert, SMALL: tl.constexpr, NUM_LARGE: tl.constexpr):
    """The rank of each expert, as routing.owner_of."""
    IN_LARGE: tl.constexpr = NUM_LARGE * (SMALL + 1)
    in_large = expert // (SMALL + 1)
    if SMALL == 0:
        result = in_large
    else:
        result = tl.where(expert < IN_LARGE, in_large, NUM_LARGE + (expert - IN_LARGE) // SMALL)
    return result


@triton.jit
def first_expert_of(rank, SMALL: tl.constexpr, NUM_LARGE: tl.constexpr):
    return rank * SMALL + tl.minimum(rank, NUM_LARGE)
