"""The kernels that move rows between ranks, under Triton's interpreter: run by test_exchange.py.

The interpreter runs one block after the other on the host and knows no PTX: flags are loaded and stored plainly, and
what is not there when a wait begins counts as a wait that timed out.
"""

import pytest
import torch

from tests import interpreter
from tests.moe.problems import random_ids
from tests.parallel.interpreted_kernels import load_flag, look_once, no_scoped_fence, store_flag
from tilecrew.moe import kernel_dispatch_gemm, kernel_gemm_combine
from tilecrew.moe.routing import build_routing
from tilecrew.parallel import ParallelTensor, Signals, WaitError, World, kernel_signal

interpreter.allow_loop_bounds()
SECOND = 10**9
NUM_TOKENS, TOP_K, COLUMNS = 20, 3, 72


@pytest.fixture(autouse=True)
def plain_flags(monkeypatch):
    monkeypatch.setattr(kernel_dispatch_gemm, "load_acquire", load_flag)
    monkeypatch.setattr(kernel_gemm_combine, "load_acquire", load_flag)
    monkeypatch.setattr(kernel_signal, "store_release", store_flag)
    monkeypatch.setattr(kernel_signal, "fence", no_scoped_fence)
    monkeypatch.setattr(kernel_signal, "wait_until_reached", look_once)


class Ranks:
    """Tables, tokens and results of all ranks."""

    def __init__(self, size, kind="some missing"):
        self.worlds = World.emulated(size, device="cpu", timeout_seconds=1.0)
        ids = random_ids(size * NUM_TOKENS, TOP_K, 2 * size, kind=kind).view(size, NUM_TOKENS, TOP_K)
        self.ids = ids.to(torch.int32)
        self.routings = [build_routing(ids, num_experts=2 * size, rank=rank) for rank in range(size)]
        self.x = self.parallel((NUM_TOKENS, COLUMNS), torch.float16)
        num_rows = self.routings[0].pull_dispatch_indices.shape[0]
        self.y = self.parallel((num_rows, COLUMNS), torch.float16)
        self.slots = [Signals(world, num_rows // 128) for world in self.worlds]

    def parallel(self, shape, dtype):
        tensors = [ParallelTensor(shape, dtype, world) for world in self.worlds]
        for tensor in tensors:
            tensor.local.copy_(torch.randn(shape))
        return tensors


@pytest.mark.parametrize("size", [1, 3])
def test_tables_and_values(size):
    ranks = Ranks(size)
    ids, weights = ranks.parallel((NUM_TOKENS, TOP_K), torch.int32), ranks.parallel((NUM_TOKENS, TOP_K), torch.float32)
    values = ranks.parallel((ranks.y[0].shape[0],), torch.float32)
    for rank in range(size):
        ids[rank].local.copy_(ranks.ids[rank])
    length = NUM_TOKENS * TOP_K
    for rank, routing in enumerate(ranks.routings):
        all_ids, all_weights = torch.full((size, length), -7, dtype=torch.int32), torch.zeros(size, length)
        kernel_dispatch_gemm.tables_kernel[(size * 2,)](
            ids[rank].local, ids[rank].offsets, weights[rank].local, weights[rank].offsets, all_ids, all_weights,
            length, BLOCK=32,
        )  # fmt: skip
        assert torch.equal(all_ids, ranks.ids.flatten(1))
        assert torch.equal(all_weights, torch.stack([part.local.flatten() for part in weights]))
        out = torch.full((length,), float("nan"))
        control = ranks.worlds[rank].control.local
        kernel_dispatch_gemm.values_kernel[(2,)](
            values[rank].local, values[rank].offsets, routing.combine_indices, control, out, length, BLOCK=32
        )
        for route, (source, row) in enumerate(routing.combine_indices.tolist()):
            assert out[route] == (values[source].local[row] if source >= 0 else 0)


@pytest.mark.parametrize("size", [2, 3])
def test_bring(size):
    """Tokens that have a route to the rank, and no others."""
    ranks = Ranks(size)
    ids = ranks.parallel((NUM_TOKENS, TOP_K), torch.int32)
    for rank in range(size):
        ids[rank].local.copy_(ranks.ids[rank])
    for rank in range(size):
        near = torch.full((size - 1, NUM_TOKENS, COLUMNS), float("nan"), dtype=torch.float16)
        x = ranks.x[rank]
        kernel_dispatch_gemm.bring_kernel[((size - 1) * 3,)](
            (x.local, x.offsets, ids[rank].local, ids[rank].offsets), near, rank, size, NUM_TOKENS, 2 * rank,
            2 * rank + 2, COLUMNS, TOP_K=TOP_K, ROWS=8, COLUMNS=64,
        )  # fmt: skip
        for slot in range(size - 1):
            peer = (rank + 1 + slot) % size
            is_needed = (ranks.ids[peer] // 2 == rank).any(1)
            assert 0 < is_needed.sum() < NUM_TOKENS
            assert torch.equal(near[slot, is_needed], ranks.x[peer].local[is_needed])
            assert near[slot, ~is_needed].isnan().all()


def pulled(ranks, rank):
    """Rows of other ranks; NaN for the others."""
    staged = torch.full((NUM_TOKENS * TOP_K, COLUMNS), float("nan"), dtype=torch.float16)
    for route, (source, row) in enumerate(ranks.routings[rank].combine_indices.tolist()):
        if source not in (-1, rank):
            staged[route] = ranks.y[source].local[row]
    return staged


def returned(ranks, rank):
    """Rows of all ranks, by route; NaN where there is none."""
    rows = torch.full((NUM_TOKENS * TOP_K, COLUMNS), float("nan"), dtype=torch.float16)
    for route, (source, row) in enumerate(ranks.routings[rank].combine_indices.tolist()):
        if source >= 0:
            rows[route] = ranks.y[source].local[row]
    return rows


def combine(ranks, rank, epoch, weights, base, tokens=8, where="peers"):
    world, routing, y, slots = ranks.worlds[rank], ranks.routings[rank], ranks.y[rank], ranks.slots[rank].cells.local
    out = torch.full((NUM_TOKENS, COLUMNS), 7.0, dtype=torch.float16)
    flags = (torch.tensor([epoch], dtype=torch.int32), slots)
    if where == "returned":
        rows, flags = 2 * (returned(ranks, rank),), (None, None)
    else:
        rows = (y.local, y.offsets if where == "peers" else pulled(ranks, rank))
    kernel_gemm_combine.combine_kernel[(3,)](
        (*rows, routing.combine_indices, weights, base, out),
        (*flags, world.control.local, world.control.offsets),
        rank,
        world.size,
        NUM_TOKENS,
        COLUMNS,
        SECOND,
        TOP_K=TOP_K,
        TOKENS=tokens,
        COLUMNS=64,
        WHERE=where,
    )
    return out


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize(
    ("size", "tokens", "where"),
    [(1, 8, "peers"), (3, 8, "peers"), (3, 1, "peers"), (3, 8, "staged"), (1, 8, "returned"), (3, 8, "returned")],
)
def test_combine(size, tokens, where, has_weights):
    ranks = Ranks(size)
    for rank, routing in enumerate(ranks.routings):
        ranks.slots[rank].cells.local.fill_(-(2**31))  # the epoch that follows 2^31 - 1
        weights = torch.rand(NUM_TOKENS, TOP_K) if has_weights else None
        base = torch.randn(NUM_TOKENS, COLUMNS).to(torch.float16) if has_weights else None
        out = combine(ranks, rank, 2**31 - 1, weights, base, tokens, where)
        table = routing.combine_indices.view(NUM_TOKENS, TOP_K, 2).tolist()
        for token in range(NUM_TOKENS):
            total = torch.zeros(COLUMNS)
            for k, (source, row) in enumerate(table[token]):
                if source >= 0:
                    total += ranks.y[source].local[row].float() * (weights[token, k] if has_weights else 1)
            if has_weights:
                total += base[token].float()
            assert torch.equal(out[token], total.to(torch.float16))


def test_a_row_block_that_does_not_come_is_named_on_all_ranks():
    ranks = Ranks(3)
    for slots in ranks.slots:
        slots.cells.local.fill_(5)
    ranks.slots[1].cells.local[0, 2] = 4
    out = combine(ranks, 1, 5, None, None)
    assert out.isnan().any()
    for world in ranks.worlds:
        with pytest.raises(WaitError) as error:
            world.check()
        assert (error.value.rank, tuple(error.value.record)) == (1, (0, 2, 5, 4))
