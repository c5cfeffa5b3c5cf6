"""From the router's top-k ids of all ranks to rows: who computes what where, and where results come back from.

Symbols: W ranks, T tokens a rank (its capacity), K routes a token, E experts of all ranks. A *route* is one of a
token's K choices; its number is (rank * T + token) * K + k.

Every rank builds its tables from the ids of all ranks, so nothing else has to be exchanged: the order of rows on every
rank follows from a key that no two routes share. All sizes are fixed by shapes, all counts stay in device
memory: nothing here waits for a GPU, and a CUDA graph may capture it. README.md has the tables with an example.
"""

from dataclasses import dataclass

import torch

from tilecrew._shapes import Sizes, require_dtype, require_same_device, require_tensor

#: Rows of a block that no two experts share: what a gate of the grouped GEMM waits for.
ROW_BLOCK = 128
MAX_ROUTES = 2**31 - 1


@dataclass(frozen=True)
class Routing:
    """The tables of one rank, all int32, on the device of the ids. P rows, L experts of the rank.

    offs                        [L] row behind the last one of each expert; a multiple of row_block. Rows from
                                offs[-1] to P belong to none.
    tokens_per_expert           [L] routes of each expert: its rows without padding
    pull_dispatch_indices       [P, 2] (rank, token) whose row of x stands there; (-1, -1) where padding does
    row_routes                  [P] number of the route that is computed there, -1 for padding
    combine_indices             [T * K, 2] (rank, row there) that holds the result of each route of this rank's tokens;
                                (-1, -1) for a route that is skipped
    pull_combine_indices        [T * K, 3] (rank, row there, route t * K + k) of the routes of this rank's tokens that
                                other ranks compute, in the order in which their results are expected to land: by the
                                expert's number within its rank, then by (rank there - rank) mod W, then by row;
                                (-1, -1, -1) behind the last
    """

    rank: int
    world_size: int
    num_experts: int
    row_block: int
    offs: torch.Tensor
    tokens_per_expert: torch.Tensor
    pull_dispatch_indices: torch.Tensor
    row_routes: torch.Tensor
    combine_indices: torch.Tensor
    pull_combine_indices: torch.Tensor

    @property
    def padded_tokens_per_expert(self) -> torch.Tensor:
        """[L] rows of each expert with padding."""
        return self.offs.diff(prepend=self.offs.new_zeros(1))


def expert_range(rank: int, num_experts: int, world_size: int) -> range:
    """The experts of a rank: consecutive ones, and one more on each of the first num_experts % world_size ranks."""
    small, num_large = divmod(num_experts, world_size)
    first = rank * small + min(rank, num_large)
    return range(first, first + small + (rank < num_large))


def owner_of(experts: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """The rank of each expert: the inverse of `expert_range`."""
    small, num_large = divmod(num_experts, world_size)
    in_large = num_large * (small + 1)
    behind_large = num_large + (experts - in_large) // max(small, 1)
    return torch.where(experts < in_large, experts // (small + 1), behind_large)


def max_rows(num_routes: int, num_local_experts: int, row_block: int) -> int:
    """Rows that suffice for any routing: every route, and padding for as many experts as can have one."""
    most = num_routes + (row_block - 1) * min(num_local_experts, num_routes)
    return most // row_block * row_block if num_local_experts else 0


def build_routing(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    rank: int = 0,
    num_tokens: torch.Tensor | None = None,
    row_block: int = ROW_BLOCK,
) -> Routing:
    """The tables of `rank`, from the ids of all ranks, without host synchronisation.

    On GPUs three Triton kernels that count (`kernel_routing.py`), elsewhere torch operations that sort by the key; the
    same integers.

    Rows are sorted by expert. Inside an expert the ranks follow each other in ring order from the one that computes
    (itself first, then the next), so that ranks do not all pull from the same one; a rank's routes are in the order of
    its tokens, then k.

    Args:
        topk_ids: [W, T, K] int32 or int64, experts of all ranks' tokens. -1 is no route. The same expert may occur
            twice in a token. Ids outside of -1 to E - 1 raise where they are on the host, and are no routes on a GPU.
        num_experts: E, of all ranks together; ranks own them as `expert_range` says.
        rank: whose tables.
        num_tokens: [W] int32 or int64 tokens that each rank really has; None: T each.
        row_block: an expert's rows are padded to a multiple of this; 1 leaves no padding.

    Returns:
        Routing with P = `max_rows(W * T * K, L, row_block)`.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or value; the message names it.
    """
    _check(topk_ids, num_experts, rank, num_tokens, row_block)
    # An operator, so that torch.compile need not look inside; `operators` chooses between kernels and `torch_tables`.
    tables = torch.ops.tilecrew.moe_routing(topk_ids, num_tokens, num_experts, rank, row_block)
    return Routing(rank, topk_ids.shape[0], num_experts, row_block, *tables)


def torch_tables(
    topk_ids: torch.Tensor, num_tokens: torch.Tensor | None, num_experts: int, rank: int, row_block: int
) -> tuple[torch.Tensor, ...]:
    """The tables in the order of Routing's fields."""
    world_size, capacity, top_k = topk_ids.shape
    per_rank, total = capacity * top_k, topk_ids.numel()
    device = topk_ids.device

    ids = topk_ids.reshape(-1).to(torch.int64)
    route = torch.arange(total, dtype=torch.int64, device=device)
    source = route // max(per_rank, 1)
    is_route = (ids >= 0) & (ids < num_experts)
    if num_tokens is not None:
        is_route &= route % max(per_rank, 1) // top_k < num_tokens.to(torch.int64)[source]
    owner = owner_of(ids, num_experts, world_size)

    # Unique: (expert, distance of the source in the ring, token, k). What is no route sorts behind all of them.
    key = (ids * world_size + (source - owner) % world_size) * per_rank + route % max(per_rank, 1)
    key = torch.where(is_route, key, num_experts * total + route)
    sorted_key, order = torch.sort(key)

    expert = torch.arange(num_experts + 1, dtype=torch.int64, device=device)
    begins = torch.searchsorted(sorted_key, expert * total)  # of each expert in the sorted routes
    counts = begins.diff()
    padded = (counts + row_block - 1) // row_block * row_block
    ends = padded.cumsum(0)
    small, num_large = divmod(num_experts, world_size)
    owners = owner_of(expert[:-1], num_experts, world_size)
    first_expert = owners * small + owners.clamp_max(num_large)
    row_begins = ends - padded
    row_begins = row_begins - row_begins[first_expert]  # counted from the first row of the expert's rank

    sorted_expert = (sorted_key // max(total, 1)).clamp_max(num_experts - 1)
    rows = row_begins[sorted_expert] + route - begins[sorted_expert]
    rows = torch.where(sorted_key < num_experts * total, rows, -1)
    own = slice(rank * per_rank, (rank + 1) * per_rank)
    own_places = torch.empty_like(order).scatter_(0, order, route)[own]  # in the sorted routes
    own_rows = rows[own_places]
    combine_indices = torch.stack((torch.where(own_rows < 0, -1, owner[own]), own_rows), 1)
    pulls = _pulls(combine_indices, ids[own], own_places, sorted_key, num_experts, world_size, rank)

    local = expert_range(rank, num_experts, world_size)
    experts = slice(local.start, local.stop)
    offs = row_begins[experts] + padded[experts]
    row_routes = _routes_of_rows(offs, row_begins[experts], counts[experts], begins[experts], order, row_block)
    is_row = row_routes >= 0
    pulled = torch.stack((row_routes // max(per_rank, 1), row_routes % max(per_rank, 1) // top_k), 1)
    return (
        offs.to(torch.int32),
        counts[experts].to(torch.int32),
        torch.where(is_row[:, None], pulled, -1).to(torch.int32),
        row_routes.to(torch.int32),
        combine_indices.to(torch.int32),
        pulls.to(torch.int32),
    )


def _pulls(
    combine_indices: torch.Tensor,
    experts: torch.Tensor,
    places: torch.Tensor,
    sorted_key: torch.Tensor,
    num_experts: int,
    world_size: int,
    rank: int,
) -> torch.Tensor:
    """[T * K, 3] the pulls of a rank; the first three are of its routes, places those in the sorted routes.

    Inside an expert the rank's routes are sorted already. A slot is an expert's place in the order in which results
    land, so the counts of the slots before say where in the table its routes begin, and nothing is sorted again.
    """
    per_rank = places.shape[0]
    small, num_large = divmod(num_experts, world_size)
    slot = torch.arange((small + 1) * world_size, dtype=torch.int64, device=places.device)
    number, ring = slot // world_size, slot % world_size
    owner = (rank + ring) % world_size
    is_expert = (ring > 0) & (number < small + (owner < num_large).to(torch.int64))
    first = owner * small + owner.clamp_max(num_large)
    key = ((first + number) * world_size + (rank - owner) % world_size) * per_rank
    begins = torch.searchsorted(sorted_key, key)
    counts = torch.where(is_expert, torch.searchsorted(sorted_key, key + per_rank) - begins, 0)
    shifts = counts.cumsum(0) - counts - begins

    there = combine_indices[:, 0]
    is_pull = (there >= 0) & (there != rank)
    number = experts - there * small - there.clamp_max(num_large)
    slot = torch.where(is_pull, number * world_size + (there - rank) % world_size, 0)
    pull = torch.where(is_pull, places + shifts[slot], per_rank)  # what is none goes into a row behind the table
    route = torch.arange(per_rank, dtype=torch.int64, device=places.device)
    table = route.new_full((per_rank + 1, 3), -1)
    table[pull] = torch.cat((combine_indices, route[:, None]), 1)
    return table[:per_rank]


def _routes_of_rows(
    offs: torch.Tensor,
    row_begins: torch.Tensor,
    counts: torch.Tensor,
    begins: torch.Tensor,
    order: torch.Tensor,
    row_block: int,
) -> torch.Tensor:
    """[P] the route of each row of a rank, -1 for padding; the first four are of the rank's experts."""
    num_local = offs.shape[0]
    num_rows = max_rows(order.shape[0], num_local, row_block)
    row = torch.arange(num_rows, dtype=torch.int64, device=offs.device)
    if num_rows == 0:
        return row
    group = torch.searchsorted(offs, row, right=True)
    inside = group.clamp_max(num_local - 1)
    place = row - row_begins[inside]
    is_row = (group < num_local) & (place < counts[inside])
    position = torch.where(is_row, begins[inside] + place, 0)
    return torch.where(is_row, order[position], -1)


def _check(
    topk_ids: torch.Tensor, num_experts: int, rank: int, num_tokens: torch.Tensor | None, row_block: int
) -> None:
    sizes = Sizes()
    sizes.bind("topk_ids", topk_ids, "W T K")
    require_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    if sizes["W"] < 1 or sizes["K"] < 1:
        raise ValueError(f"topk_ids must have at least one rank and one route, got shape {tuple(topk_ids.shape)}")
    if topk_ids.numel() > MAX_ROUTES:
        raise ValueError(f"topk_ids must have at most {MAX_ROUTES} elements, got {topk_ids.numel()}")
    for name, value in (("num_experts", num_experts), ("row_block", row_block)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")
    if not isinstance(rank, int) or not 0 <= rank < sizes["W"]:
        raise ValueError(
            f"rank must be 0 to {sizes['W'] - 1} (from topk_ids of shape {tuple(topk_ids.shape)}), got {rank!r}"
        )
    check_ids(topk_ids, num_experts)
    if num_tokens is None:
        return
    require_tensor("num_tokens", num_tokens)
    require_dtype("num_tokens", num_tokens, (torch.int32, torch.int64))
    sizes.bind("num_tokens", num_tokens, "W")
    require_same_device("num_tokens", num_tokens, "topk_ids", topk_ids)
    if num_tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        for index, count in enumerate(num_tokens.tolist()):
            if not 0 <= count <= sizes["T"]:
                raise ValueError(
                    f"num_tokens of rank {index} must be 0 to the capacity of {sizes['T']} tokens, got {count}"
                )


def check_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """Raises ValueError for an id that is on the host and no expert, nor -1."""
    if topk_ids.device.type != "cpu" or topk_ids.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = (int(value) for value in torch.aminmax(topk_ids))
    check_id_range(low, high, num_experts)


def check_id_range(low: int, high: int, num_experts: int, where: str = "") -> None:
    """Raises ValueError unless ids from `low` to `high` are experts or -1."""
    if low < -1 or high >= num_experts:
        raise ValueError(
            f"topk_ids{where} must be -1 (no route) or 0 to {num_experts - 1} (E = {num_experts} experts), "
            f"got {low if low < -1 else high}"
        )
