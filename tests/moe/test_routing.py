"""The routing tables against their twin in loops, and against what they promise."""

import random

import pytest
import torch

from tilecrew.moe import reference
from tilecrew.moe.routing import Routing, build_routing, expert_range, max_rows, owner_of

TABLES = (
    "offs",
    "tokens_per_expert",
    "pull_dispatch_indices",
    "row_routes",
    "combine_indices",
    "pull_combine_indices",
)


def assert_same(actual: Routing, wanted: Routing) -> None:
    for name in TABLES:
        left, right = getattr(actual, name), getattr(wanted, name)
        assert left.dtype == torch.int32
        assert torch.equal(left.cpu(), right.cpu()), name


def random_ids(generator, world_size, capacity, top_k, num_experts, kind):
    shape = (world_size, capacity, top_k)
    ids = torch.randint(0, num_experts, shape, generator=generator)
    if kind == "one expert":
        ids[:] = num_experts - 1
    elif kind == "skewed":
        ids = (torch.rand(shape, generator=generator) ** 4 * num_experts).long()
    elif kind == "some missing":
        ids[torch.rand(shape, generator=generator) < 0.3] = -1
    elif kind == "all missing":
        ids[:] = -1
    elif kind == "first and last empty":
        ids.clamp_(min(1, num_experts - 1), max(num_experts - 2, 0))
    return ids


@pytest.mark.parametrize("seed", range(150))
def test_equals_the_loops(seed):
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    world_size = chance.choice([1, 2, 3, 4, 8])
    capacity = chance.choice([0, 1, 2, 17, 40])
    num_experts = chance.choice([1, 2, 5, 7, 64])
    top_k = chance.choice([k for k in (1, 2, 3, 6) if k <= num_experts])
    kind = chance.choice(["uniform", "one expert", "skewed", "some missing", "all missing", "first and last empty"])
    ids = random_ids(generator, world_size, capacity, top_k, num_experts, kind)
    num_tokens = None
    if chance.random() < 0.6:
        num_tokens = torch.randint(0, capacity + 1, (world_size,), generator=generator)
    options = {"num_experts": num_experts, "num_tokens": num_tokens, "row_block": chance.choice([128, 128, 4, 1])}
    for rank in range(world_size):
        actual = build_routing(ids.to(chance.choice([torch.int32, torch.int64])), rank=rank, **options)
        assert_same(actual, reference.routing_by_loops(ids, rank=rank, **options))


@pytest.mark.parametrize(("num_experts", "capacity"), [(512, 300), (256, 1000), (3, 4096)])
def test_larger_shapes(num_experts, capacity):
    generator = torch.Generator().manual_seed(capacity)
    ids = random_ids(generator, 2, capacity, 3, num_experts, "some missing")
    num_tokens = torch.tensor([capacity - 1, capacity // 2])
    for rank in range(2):
        options = {"num_experts": num_experts, "rank": rank, "num_tokens": num_tokens}
        assert_same(build_routing(ids, **options), reference.routing_by_loops(ids, **options))


@pytest.mark.parametrize("row_block", [1, 128])
@pytest.mark.parametrize(("world_size", "num_experts"), [(1, 4), (3, 5), (4, 3), (8, 64)])
def test_every_route_has_one_row_and_finds_it(world_size, num_experts, row_block):
    """What dispatch and combine rely on, without the twin: a round trip of every route over all ranks' tables."""
    top_k, capacity = min(3, num_experts), 50
    generator = torch.Generator().manual_seed(num_experts)
    ids = random_ids(generator, world_size, capacity, top_k, num_experts, "some missing")
    options = {"num_experts": num_experts, "row_block": row_block}
    tables = [build_routing(ids, rank=rank, **options) for rank in range(world_size)]
    seen = set()
    for source, table in enumerate(tables):
        for index, (owner, row) in enumerate(table.combine_indices.tolist()):
            token, k = divmod(index, top_k)
            if ids[source, token, k] < 0:
                assert (owner, row) == (-1, -1)
                continue
            assert (owner, row) not in seen
            seen.add((owner, row))
            there = tables[owner]
            assert there.pull_dispatch_indices[row].tolist() == [source, token]
            assert there.row_routes[row] == (source * capacity + token) * top_k + k
            experts = expert_range(owner, num_experts, world_size)
            group = int(torch.searchsorted(there.offs, row, right=True))
            assert experts[group] == ids[source, token, k]
    for rank, table in enumerate(tables):
        assert not (table.offs % row_block).any()
        assert (table.padded_tokens_per_expert >= table.tokens_per_expert).all()
        assert (table.padded_tokens_per_expert - table.tokens_per_expert < row_block).all()
        assert int((table.row_routes >= 0).sum()) == sum(owner == rank for owner, _ in seen)


def wanted_pulls(ids, num_experts, rank, table):
    """pull_combine_indices as they are defined, from combine_indices; num_tokens are applied to ids."""
    world_size, capacity, top_k = ids.shape
    pulls = []
    for route, expert in enumerate(ids[rank].flatten().tolist()):
        if expert < 0:
            continue
        (owner,) = (r for r in range(world_size) if expert in expert_range(r, num_experts, world_size))
        if owner != rank:
            there, row = table.combine_indices[route].tolist()
            assert there == owner
            number = expert - expert_range(owner, num_experts, world_size).start
            pulls.append((number, (owner - rank) % world_size, row, [owner, row, route]))
    pulls.sort()
    return [pull for *_, pull in pulls] + [[-1, -1, -1]] * (capacity * top_k - len(pulls))


@pytest.mark.parametrize("row_block", [1, 128])
@pytest.mark.parametrize("num_experts", [1, 2, 3, 5, 7, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_are_pulled_in_the_order_in_which_they_land(world_size, num_experts, row_block):
    """Without the twin. Tokens may have an expert twice or no expert, and one rank has no tokens."""
    capacity, top_k = 40, 3
    generator = torch.Generator().manual_seed(10 * world_size + num_experts)
    for kind in ("some missing", "one expert", "skewed"):
        ids = random_ids(generator, world_size, capacity, top_k, num_experts, kind)
        num_tokens = torch.randint(1, capacity + 1, (world_size,), generator=generator)
        num_tokens[-1] = 0
        is_token = torch.arange(capacity) < num_tokens[:, None]
        real_ids = torch.where(is_token[:, :, None], ids, -1)
        for rank in range(world_size):
            for counts in (None, num_tokens):
                options = {"num_experts": num_experts, "num_tokens": counts, "row_block": row_block}
                table = build_routing(ids, rank=rank, **options)
                wanted = wanted_pulls(ids if counts is None else real_ids, num_experts, rank, table)
                assert table.pull_combine_indices.tolist() == wanted


def test_pulls_alternate_between_ranks():
    ids = torch.tensor([3, 5, 2, 0, 4, 2, 1, 3]).reshape(1, 8, 1).repeat(3, 1, 1)  # two experts a rank
    pulls = build_routing(ids, num_experts=6, rank=1, row_block=1).pull_combine_indices
    assert pulls.tolist() == [
        [2, 2, 4],  # expert 4, the first one of rank 2, behind two rows of rank 2 and 0
        [0, 1, 3],  # expert 0, behind a row of rank 0
        [2, 5, 1],  # expert 5: expert 4 has three rows
        [0, 4, 6],  # expert 1
        *[[-1, -1, -1]] * 4,
    ]


def test_ranks_pull_in_ring_order():
    ids = torch.zeros(4, 2, 1, dtype=torch.int32)
    ids[:] = 3  # of the last rank
    pulled = build_routing(ids, num_experts=4, rank=3).pull_dispatch_indices
    assert pulled[:8, 0].tolist() == [3, 3, 0, 0, 1, 1, 2, 2]
    assert pulled[:8, 1].tolist() == [0, 1] * 4
    assert (pulled[8:] == -1).all()


def test_example_of_the_readme():
    ids = torch.tensor([[[0, 2], [2, -1]], [[1, 2], [0, 0]]])
    tables = [build_routing(ids, num_experts=3, rank=rank, row_block=4) for rank in range(2)]
    assert tables[0].offs.tolist() == [4, 8]
    assert tables[0].pull_dispatch_indices[:8].tolist() == [
        [0, 0], [1, 1], [1, 1], [-1, -1],
        [1, 0], [-1, -1], [-1, -1], [-1, -1],
    ]  # fmt: skip
    assert tables[1].offs.tolist() == [4]
    assert tables[1].pull_dispatch_indices[:4].tolist() == [[1, 0], [0, 0], [0, 1], [-1, -1]]
    assert tables[0].combine_indices.tolist() == [[0, 0], [1, 1], [1, 2], [-1, -1]]
    assert tables[1].combine_indices.tolist() == [[0, 4], [1, 0], [0, 1], [0, 2]]
    none = [-1, -1, -1]
    assert tables[0].pull_combine_indices.tolist() == [[1, 1, 1], [1, 2, 2], none, none]
    assert tables[1].pull_combine_indices.tolist() == [[0, 1, 2], [0, 2, 3], [0, 4, 0], none]


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("num_experts", [1, 2, 5, 8, 17, 64])
def test_every_expert_has_one_owner(num_experts, world_size):
    ranges = [expert_range(rank, num_experts, world_size) for rank in range(world_size)]
    assert [expert for experts in ranges for expert in experts] == list(range(num_experts))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    owners = owner_of(torch.arange(num_experts), num_experts, world_size).tolist()
    assert owners == [rank for rank, experts in enumerate(ranges) for _ in experts]


@pytest.mark.parametrize(("num_experts", "num_routes", "row_block"), [(4, 9, 4), (9, 4, 4), (1, 128, 128), (3, 5, 1)])
def test_the_bound_of_rows_is_reached_and_never_passed(num_experts, num_routes, row_block):
    bound = max_rows(num_routes, num_experts, row_block)
    largest = 0
    for seed in range(300):
        ids = torch.randint(0, num_experts, (num_routes,), generator=torch.Generator().manual_seed(seed))
        counts = torch.bincount(ids, minlength=num_experts)
        largest = max(largest, int((-(-counts // row_block) * row_block).sum()))
    assert largest <= bound
    assert bound - largest < row_block


@pytest.mark.parametrize("world_size", [1, 3])
def test_fake_tensors_trace_through(world_size):
    def tables(ids):
        routing = build_routing(ids, num_experts=5)
        return routing.offs, routing.pull_combine_indices

    ids = torch.randint(-1, 5, (world_size, 40, 2), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(tables, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(ids), tables(ids), strict=True):
        assert torch.equal(found, wanted)


def ids_of(*values):
    return torch.tensor(values).reshape(1, -1, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"topk_ids": ids_of(0, 5)}, ValueError, r"topk_ids must be -1 \(no route\) or 0 to 4 .*got 5"),
        ({"topk_ids": ids_of(0, -2)}, ValueError, "got -2"),
        ({"topk_ids": ids_of(0).float()}, TypeError, "topk_ids must be int32 or int64, got float32"),
        ({"topk_ids": ids_of(0)[0]}, ValueError, "topk_ids must have 3 dimensions"),
        ({"topk_ids": torch.zeros(1, 3, 0, dtype=torch.int64)}, ValueError, "at least one rank and one route"),
        ({"topk_ids": [0]}, TypeError, "topk_ids must be a torch.Tensor, got list"),
        ({"num_experts": 0}, ValueError, "num_experts must be a positive int"),
        ({"row_block": -1}, ValueError, "row_block must be a positive int"),
        ({"rank": 1}, ValueError, "rank must be 0 to 0 .*got 1"),
        ({"num_tokens": torch.tensor([3])}, ValueError, "num_tokens of rank 0 must be 0 to the capacity of 2.*got 3"),
        ({"num_tokens": torch.tensor([1, 1])}, ValueError, "num_tokens must have shape"),
        ({"num_tokens": torch.tensor([1.0])}, TypeError, "num_tokens must be int32 or int64"),
    ],
)
def test_errors(arguments, error, message):
    arguments = {"topk_ids": ids_of(0, 1), "num_experts": 5, **arguments}
    with pytest.raises(error, match=message):
        build_routing(arguments.pop("topk_ids"), **arguments)
