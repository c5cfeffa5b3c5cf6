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


@pytest.mark.parametrize("rank", range(3))
def test_keys_of_64_bits(rank, monkeypatch):
    """As for more routes and experts than an interpreter can do."""
    monkeypatch.setattr(kernel_routing, "INT32_KEYS", 0)
    ids = random_ids(torch.Generator().manual_seed(0), 3, 17, 2, 7, "some missing")
    wanted = reference.routing_by_loops(ids, num_experts=7, rank=rank, row_block=4)
    assert_same(build(ids, None, 7, rank, 4), wanted)
