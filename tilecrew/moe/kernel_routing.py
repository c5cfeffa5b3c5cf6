"""The routing tables in plain Triton: what `routing` does in some eighty torch operations, in three kernels and a sort.

Computes    the tables of `routing.Routing`, the same integers (README, section 2)

Roles       one each, of four warps:
            keys_kernel      BLOCK routes a program: the key of each; and -1 into all tables
            experts_kernel   one program: where each expert begins in the sorted keys, its rows, and the rows before;
                             with more than one rank also where in pull_combine_indices the results of each begin
            rows_kernel      BLOCK sorted routes a program: the row of each, into the tables of both ends
Timeline    keys -> torch.sort -> experts -> rows, one behind the other on the stream. No program waits for another.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilecrew._launches import LaunchMemory
from tilecrew.device.launch import Launch

BLOCK = 512
#: Keys below this are int32: a sort of half as many bits takes half as many passes.
INT32_KEYS = 2**31
LAUNCHES = LaunchMemory()


class Sizes(NamedTuple):
    """What programs are compiled for. small, num_large: E / W and E mod W; search: a power of two above E.

    slots: a power of two, of W times the most experts that a rank has or more.
    """

    world_size: int
    num_experts: int
    top_k: int
    row_block: int
    small: int
    num_large: int
    search: int
    slots: int
    block: int


class Tables(NamedTuple):
    """What is computed: of `routing.Routing`, all int32 and contiguous."""

    offs: torch.Tensor
    tokens_per_expert: torch.Tensor
    pull_dispatch_indices: torch.Tensor
    row_routes: torch.Tensor
    combine_indices: torch.Tensor
    pull_combine_indices: torch.Tensor


class Scratch(NamedTuple):
    """Between the kernels: keys [W * T * K] of the routes, int32 or int64; of the experts what experts_kernel says."""

    keys: torch.Tensor
    bounds: torch.Tensor


def build(
    topk_ids: torch.Tensor, num_tokens: torch.Tensor | None, num_experts: int, rank: int, row_block: int, tables: Tables
) -> None:
    """Fills the tables of `rank`, whatever they held; topk_ids [W, T, K] with at least one route, contiguous."""
    sizes = sizes_of(topk_ids, num_experts, row_block)
    is_small = (num_experts + 1) * topk_ids.numel() < INT32_KEYS  # all keys are below (E + 1) W T K
    keys = topk_ids.new_empty(topk_ids.numel(), dtype=torch.int32 if is_small else torch.int64)
    scratch = Scratch(keys, topk_ids.new_empty(3, sizes.search, dtype=torch.int64))
    shape = (keys.shape[0], keys.shape[0] // sizes.world_size, tables.row_routes.shape[0], rank)
    key = (shape, sizes)
    tensors = (topk_ids, num_tokens, keys, *tables[2:])
    LAUNCHES.run(("keys", key), tensors, lambda: keys_launch(topk_ids, num_tokens, scratch, tables, shape, sizes))
    sorted_keys, order = torch.sort(keys)
    behind = scratch._replace(keys=sorted_keys)
    tensors = (*behind, tables.offs, tables.tokens_per_expert)
    LAUNCHES.run(("experts", key), tensors, lambda: experts_launch(behind, tables, shape, sizes))
    tensors = (*behind, order, *tables[2:])
    LAUNCHES.run(("rows", key), tensors, lambda: rows_launch(behind, order, tables, shape, sizes))


def sizes_of(topk_ids: torch.Tensor, num_experts: int, row_block: int) -> Sizes:
    """What the kernels are compiled for."""
    world_size, _, top_k = topk_ids.shape
    search = triton.next_power_of_2(num_experts + 1)
    slots = triton.next_power_of_2(triton.cdiv(num_experts, world_size) * world_size)
    return Sizes(world_size, num_experts, top_k, row_block, *divmod(num_experts, world_size), search, slots, BLOCK)


def keys_launch(
    topk_ids: torch.Tensor,
    num_tokens: torch.Tensor | None,
    scratch: Scratch,
    tables: Tables,
    shape: tuple[int, ...],
    sizes: Sizes,
) -> Launch:
    """shape: routes of all ranks, routes of a rank, rows, the rank."""
    args = (topk_ids, num_tokens, scratch.keys, tables[2:], shape, sizes)
    return Launch(keys_kernel, triton.cdiv(max(shape[0], shape[2]), BLOCK), args, {"num_warps": 4})


def experts_launch(scratch: Scratch, tables: Tables, shape: tuple[int, ...], sizes: Sizes) -> Launch:
    """scratch: with the keys sorted."""
    args = (*scratch, tables.offs, tables.tokens_per_expert, shape, shape[0].bit_length(), sizes)
    return Launch(experts_kernel, 1, args, {"num_warps": 4})


def rows_launch(scratch: Scratch, order: torch.Tensor, tables: Tables, shape: tuple[int, ...], sizes: Sizes) -> Launch:
    """scratch: with the keys sorted; order: the routes in that order."""
    args = (scratch.keys, order, scratch.bounds, tables[2:], shape, sizes)
    return Launch(rows_kernel, triton.cdiv(shape[0], BLOCK), args, {"num_warps": 4})


@triton.jit
def keys_kernel(ids, num_tokens, keys, tables, shape, sizes: tl.constexpr):
    total, per_rank, num_rows, _ = shape
    pulled, row_routes, combine, pull_combine = tables
    W: tl.constexpr = sizes.world_size
    E: tl.constexpr = sizes.num_experts
    K: tl.constexpr = sizes.top_k
    N: tl.constexpr = sizes.block
    route = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    mask = route < total
    expert = tl.load(ids + route, mask=mask, other=-1).to(tl.int64)
    source = route // per_rank
    is_route = (expert >= 0) & (expert < E)
    if num_tokens is not None:
        is_route &= route % per_rank // K < tl.load(num_tokens + source, mask=mask, other=0)
    inside = tl.where(is_route, expert, 0)
    distance = (source - owner_of(inside, sizes.small, sizes.num_large) + W) % W
    key = (inside * W + distance) * per_rank + route % per_rank
    behind = tl.full([N], E, tl.int64) * total + route  # sorts behind all routes
    tl.store(keys + route, tl.where(is_route, key, behind), mask=mask)
    none = tl.full([N], -1, tl.int32)
    tl.store(row_routes + route, none, mask=route < num_rows)
    tl.store(pulled + 2 * route, none, mask=route < num_rows)
    tl.store(pulled + 2 * route + 1, none, mask=route < num_rows)
    tl.store(combine + 2 * route, none, mask=route < per_rank)
    tl.store(combine + 2 * route + 1, none, mask=route < per_rank)
    tl.store(pull_combine + 3 * route, none, mask=route < per_rank)
    tl.store(pull_combine + 3 * route + 1, none, mask=route < per_rank)
    tl.store(pull_combine + 3 * route + 2, none, mask=route < per_rank)


@triton.jit
def experts_kernel(sorted_keys, bounds, offs, tokens_per_expert, shape, steps, sizes: tl.constexpr):
    """bounds: first sorted route of each expert, then the rows of all experts before it, then `find_pulls`."""
    total, per_rank, _, rank = shape
    E: tl.constexpr = sizes.num_experts
    S: tl.constexpr = sizes.search
    expert = tl.arange(0, S)
    begins, ends = ranges(sorted_keys, expert.to(tl.int64) * total, total, total, steps, S)
    counts = tl.where(expert < E, ends - begins, 0)
    padded = (counts + sizes.row_block - 1) // sizes.row_block * sizes.row_block
    row_ends = tl.cumsum(padded, 0)
    tl.store(bounds + expert, begins)
    tl.store(bounds + S + expert, row_ends - padded)
    first = first_expert_of(rank, sizes.small, sizes.num_large)
    own = (expert >= first) & (expert < first_expert_of(rank + 1, sizes.small, sizes.num_large))
    rows_before = tl.sum(tl.where(expert < first, padded, 0), 0)
    tl.store(offs + expert - first, (row_ends - rows_before).to(tl.int32), mask=own)
    tl.store(tokens_per_expert + expert - first, counts.to(tl.int32), mask=own)
    if sizes.world_size > 1:
        find_pulls(sorted_keys, bounds + 2 * S, per_rank, rank, total, steps, sizes)


@triton.jit
def find_pulls(sorted_keys, shifts, per_rank, rank, total, steps, sizes: tl.constexpr):
    """shifts: of each expert of the other ranks, from the sorted places of this rank's routes to those of their pulls.

    Slots are the experts in the order in which their results land.
    """
    W: tl.constexpr = sizes.world_size
    slot = tl.arange(0, sizes.slots)
    number, ring = slot // W, slot % W
    owner = (rank + ring) % W
    first = first_expert_of(owner, sizes.small, sizes.num_large)
    num_experts = first_expert_of(owner + 1, sizes.small, sizes.num_large) - first
    is_expert = (ring > 0) & (number < num_experts)
    expert = tl.where(is_expert, first + number, 0)
    distance = (rank - owner + W) % W  # of this rank as a source, as in keys_kernel
    key = (expert.to(tl.int64) * W + distance) * per_rank
    begin, end = ranges(sorted_keys, key, per_rank, total, steps, sizes.slots)
    counts = tl.where(is_expert, end - begin, 0)
    tl.store(shifts + expert, tl.cumsum(counts, 0) - counts - begin, mask=is_expert)


@triton.jit
def rows_kernel(sorted_keys, order, bounds, tables, shape, sizes: tl.constexpr):
    total, per_rank, _, rank = shape
    pulled, row_routes, combine, pull_combine = tables
    E: tl.constexpr = sizes.num_experts
    K: tl.constexpr = sizes.top_k
    S: tl.constexpr = sizes.search
    N: tl.constexpr = sizes.block
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    expert = tl.load(sorted_keys + place, mask=place < total, other=0).to(tl.int64) // total
    is_route = (place < total) & (expert < E)
    expert = tl.where(is_route, expert, 0)
    owner = owner_of(expert, sizes.small, sizes.num_large)
    first = first_expert_of(owner, sizes.small, sizes.num_large)
    row = tl.load(bounds + S + expert) - tl.load(bounds + S + first) + place - tl.load(bounds + expert)
    route = tl.load(order + place, mask=is_route, other=0)
    source, inside = route // per_rank, route % per_rank
    is_here = is_route & (owner == rank)
    tl.store(row_routes + row, route.to(tl.int32), mask=is_here)
    tl.store(pulled + 2 * row, source.to(tl.int32), mask=is_here)
    tl.store(pulled + 2 * row + 1, (inside // K).to(tl.int32), mask=is_here)
    is_mine = is_route & (source == rank)
    tl.store(combine + 2 * inside, owner.to(tl.int32), mask=is_mine)
    tl.store(combine + 2 * inside + 1, row.to(tl.int32), mask=is_mine)
    if sizes.world_size > 1:
        is_pull = is_mine & (owner != rank)
        pull = place + tl.load(bounds + 2 * S + expert, mask=is_pull, other=0)
        tl.store(pull_combine + 3 * pull, owner.to(tl.int32), mask=is_pull)
        tl.store(pull_combine + 3 * pull + 1, row.to(tl.int32), mask=is_pull)
        tl.store(pull_combine + 3 * pull + 2, inside.to(tl.int32), mask=is_pull)


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


@triton.jit
def ranges(sorted_keys, target, length, total, steps, S: tl.constexpr):
    """Where the keys from each target to target + length begin and end: two binary searches, S at a time.

    Both in one loop, because a step waits for its load and nothing else: side by side they take the time of one.
    """
    begin = tl.zeros([S], tl.int64)
    end = tl.zeros([S], tl.int64)
    above_begin = begin + total
    above_end = begin + total
    for _ in range(steps):
        begin, above_begin = halve(sorted_keys, target, begin, above_begin)
        end, above_end = halve(sorted_keys, target + length, end, above_end)
    return begin, end


@triton.jit
def halve(sorted_keys, target, low, high):
    """One step on the way to how many keys are below each target, which is low to high."""
    is_open = low < high
    middle = (low + high) // 2
    is_below = tl.load(sorted_keys + middle, mask=is_open, other=0).to(tl.int64) < target
    return tl.where(is_open & is_below, middle + 1, low), tl.where(is_open & (is_below == 0), middle, high)
