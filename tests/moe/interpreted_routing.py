"""The routing kernels under Triton's interpreter: run by test_routing_kernels.py. Integers: equal, without bounds."""

import random

import pytest
import torch

from tests import interpreter
from tests.moe.test_routing import assert_same, random_ids
from tilecrew.moe import kernel_routing, operators, reference
from tilecrew.moe.routing import Routing

interpreter.allow_loop_bounds()


def build(ids, num_tokens, num_experts, rank, row_block):
    tables = kernel_routing.Tables(*operators._routing_fake(ids, num_tokens, num_experts, rank, row_block))
    for table in tables:
        table.fill_(-77)  # what is not written shows
    kernel_routing.build(ids, num_tokens, num_experts, rank, row_block, tables)
    return Routing(rank, ids.shape[0], num_experts, row_block, *tables)


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_loops(seed):
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    world_size = chance.choice([1, 2, 3, 4, 8])
    capacity = chance.choice([1, 2, 17, 40, 129])
    num_experts = chance.choice([1, 2, 5, 7, 64, 512])
    top_k = chance.choice([k for k in (1, 2, 3, 6) if k <= num_experts])
    kind = chance.choice(["uniform", "one expert", "skewed", "some missing", "all missing", "first and last empty"])
    ids = random_ids(generator, world_size, capacity, top_k, num_experts, kind)
    if chance.random() < 0.3:
        ids[0, 0, 0] = chance.choice([num_experts, -9, 2**31 - 1])
    num_tokens = None
    if chance.random() < 0.6:
        num_tokens = torch.randint(0, capacity + 1, (world_size,), generator=generator)
    row_block = chance.choice([128, 128, 4, 1])
    for rank in {0, world_size // 2, world_size - 1}:
        dtype = chance.choice([torch.int32, torch.int64])
        actual = build(ids.to(dtype), num_tokens, num_experts, rank, row_block)
        options = {"num_experts": num_experts, "rank": rank, "num_tokens": num_tokens, "row_block": row_block}
        assert_same(actual, reference.routing_by_loops(ids, **options))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 routes in steps of 4, of which the scan takes 4 at a time and there are to be no more than 6."""
    for name, value in (("BLOCK", 8), ("STEP", 4), ("SCAN_EXPERTS", 2), ("SCAN_BLOCKS", 4), ("MAX_BLOCKS", 6)):
        monkeypatch.setattr(kernel_routing, name, value)


@pytest.mark.parametrize("seed", range(24))
def test_blocks_in_ring_order(seed, small_blocks):
    """Several blocks a rank, several steps a block, several turns of the scan; ranks without experts."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    world_size, top_k = chance.choice([1, 2, 3, 5]), chance.choice([1, 3])
    capacity, num_experts = chance.choice([3, 8, 11, 21]), chance.choice([3, 4, 7, 40])
    kind = chance.choice(["uniform", "one expert", "some missing", "first and last empty"])
    ids = random_ids(generator, world_size, capacity, top_k, num_experts, kind)
    num_tokens = None
    if chance.random() < 0.5:
        num_tokens = torch.randint(0, capacity + 1, (world_size,), generator=generator)
    for rank in {0, world_size - 1}:
        options = {"num_experts": num_experts, "rank": rank, "num_tokens": num_tokens, "row_block": 4}
        assert_same(build(ids, num_tokens, num_experts, rank, 4), reference.routing_by_loops(ids, **options))


@pytest.mark.parametrize("num_routes", [1, 127, 128, 129, 255, 256, 257, 513])
@pytest.mark.parametrize(("world_size", "num_experts", "kind"), [(1, 1, "uniform"), (2, 3, "some missing")])
def test_routes_about_the_size_of_a_block(num_routes, world_size, num_experts, kind):
    ids = random_ids(torch.Generator().manual_seed(num_routes), world_size, num_routes, 1, num_experts, kind)
    for rank in range(world_size):
        wanted = reference.routing_by_loops(ids, num_experts=num_experts, rank=rank, row_block=128)
        assert_same(build(ids, None, num_experts, rank, 128), wanted)


@pytest.mark.parametrize("kind", ["one expert", "all missing", "uniform"])
@pytest.mark.parametrize(("world_size", "num_experts"), [(1, 1), (1, 300), (3, 300), (8, 5)])
def test_extremes(world_size, num_experts, kind):
    """One expert for all routes, no routes, more experts than routes, more ranks than experts."""
    ids = random_ids(torch.Generator().manual_seed(0), world_size, 90, 2, num_experts, kind)
    for rank in {0, world_size - 1}:
        wanted = reference.routing_by_loops(ids, num_experts=num_experts, rank=rank, row_block=128)
        assert_same(build(ids, None, num_experts, rank, 128), wanted)


def test_more_tokens_than_there_can_be_are_all():
    """Nobody looks at counts on a GPU; what they say is never read outside of the ids."""
    ids = random_ids(torch.Generator().manual_seed(0), 2, 5, 3, 4, "uniform")
    wanted = reference.routing_by_loops(ids, num_experts=4, num_tokens=torch.tensor([5, 0]), row_block=4)
    assert_same(build(ids, torch.tensor([2**31 - 1, -7], dtype=torch.int32), 4, 0, 4), wanted)


@pytest.mark.parametrize(
    ("per_rank", "world_size"), [(1, 1), (65536, 2), (10240, 8), (2**20, 1), (2**20, 8), (1, 4000)]
)
def test_counts_stay_small(per_rank, world_size):
    """However many routes there are: the scan goes through the counts of all blocks."""
    ids = torch.empty(world_size, per_rank, 1, dtype=torch.int32)
    tables = kernel_routing.Tables(*operators._routing_fake(ids, None, 1, 0, 128))
    shape = kernel_routing.shape_of(ids, 0, tables)
    assert shape.per_block * (shape.blocks - 1) < per_rank <= shape.per_block * shape.blocks
    assert world_size * shape.blocks <= max(kernel_routing.MAX_BLOCKS, world_size)
    assert shape.per_block == kernel_routing.BLOCK or world_size * shape.blocks > kernel_routing.MAX_BLOCKS // 4
