"""Two ranks at once in the simulator: the GEMMs that tell all ranks of their row blocks, beside the blocks of both
ranks that wait for these and sum. Everything ends, in whatever order programs go on, and sums are right.

The simulator knows neither flags in PTX nor addresses of other tensors: flags are plain stores and atomic loads here,
and what ranks share is one tensor.
"""

import pytest
import torch
import triton
import triton.language as tl

pytest.importorskip("triton")
from tests.grouped_gemm.test_simulator import WIDE, sizes_of
from tests.moe.problems import random_ids
from tests.parallel.test_notify import no_fence, part_of_one_vector, store_flag
from tests.simulator.plain_copies import copy_at_once, no_group, nothing_to_wait_for
from tilecrew.device.compat import gl, gluon
from tilecrew.device.launch import Launch
from tilecrew.grouped_gemm import crew_scatter, kernel_grouped_gemm
from tilecrew.moe import crew_ring, kernel_gemm_combine
from tilecrew.moe.routing import build_routing
from tilecrew.simulator import run

SIZE, NUM_TOKENS, TOP_K, INNER, COLUMNS = 2, 20, 2, 72, 136
EPOCH = -(2**31)  # behind 2^31 - 1
FAR = tl.constexpr(2**24)


@triton.jit
def spin(flag, expected, slot, writer, control, offsets, rank, size, timeout):
    seen = tl.atomic_add(flag, 0)
    while seen - expected < 0:
        seen = tl.atomic_add(flag, 0)
    return seen - expected >= 0


@triton.jit
def look(pointer, SCOPE: tl.constexpr):
    return tl.load(pointer)


@triton.jit
def place_in_one_tensor(y, offsets, writer, row, num_columns):
    first = tl.load(offsets + tl.maximum(writer, 0)).to(tl.int32) // 2
    # Rows of rank 0 are in front of those of rank 1.
    return tl.where(writer >= 0, first + row * num_columns + FAR, 0)


@triton.jit
def rows_in_one_tensor(y, address):
    return y + (address - FAR)


@gluon.jit
def place_of_route_in_one_tensor(entries, tensors):
    num_routes = gl.load(tensors[3])
    num_columns = gl.load(tensors[3] + 1)
    rank = entries // num_routes
    return gl.load(tensors[2] + rank) // 2 + (entries - rank * num_routes).to(gl.int64) * num_columns + FAR


@gluon.jit
def rows_of_output(output, addresses):
    return output + (addresses - FAR)


@triton.jit
def row_of_returned(y, row, num_columns):
    return row * num_columns + FAR


@gluon.jit
def row_in_one_tensor(y, offset, row, num_columns):
    return y + (offset // 2 + gl.maximum(row, 0).to(gl.int64) * num_columns)


@pytest.fixture
def simulated_words(monkeypatch):
    monkeypatch.setattr(crew_ring, "row_of_peer", row_in_one_tensor)
    monkeypatch.setattr(crew_scatter, "rows_at", rows_of_output)
    monkeypatch.setattr(crew_ring, "async_copy_to_shared", copy_at_once)
    monkeypatch.setattr(crew_ring, "commit_copies", no_group)
    monkeypatch.setattr(crew_ring, "wait_for_copies", nothing_to_wait_for)
    monkeypatch.setattr(kernel_gemm_combine, "store_release", store_flag)
    monkeypatch.setattr(kernel_gemm_combine, "fence", no_fence)
    monkeypatch.setattr(kernel_gemm_combine, "peer_pointer", part_of_one_vector)
    monkeypatch.setattr(kernel_gemm_combine, "load_acquire", look)
    monkeypatch.setattr(kernel_gemm_combine, "wait_for_rank", spin)
    monkeypatch.setattr(kernel_gemm_combine, "address_of", place_in_one_tensor)
    monkeypatch.setattr(kernel_gemm_combine, "rows_at", rows_in_one_tensor)


def offsets_from(rank, tensor):
    """Bytes from the part of `rank` to that of each."""
    return (torch.arange(SIZE) - rank) * tensor[0].numel() * tensor.element_size()


class Ranks:
    """Tables, rows and flags of both ranks, and their launches."""

    def __init__(self, num_consumers=2):
        self.num_consumers = num_consumers
        ids = random_ids(SIZE * NUM_TOKENS, TOP_K, 2 * SIZE, kind="some missing").view(SIZE, NUM_TOKENS, TOP_K)
        self.routings = [build_routing(ids, num_experts=2 * SIZE, rank=rank) for rank in range(SIZE)]
        num_rows = self.routings[0].row_routes.shape[0]
        self.hidden = torch.randn(SIZE, num_rows, INNER).to(torch.bfloat16)
        self.w = (torch.randn(SIZE, 2, INNER, COLUMNS) * INNER**-0.5).to(torch.bfloat16)
        self.weights = torch.rand(SIZE, NUM_TOKENS, TOP_K)
        self.y = torch.empty(SIZE, num_rows, COLUMNS, dtype=torch.bfloat16)
        self.out = torch.empty(SIZE, NUM_TOKENS, COLUMNS, dtype=torch.bfloat16)
        self.returned = torch.empty(SIZE, NUM_TOKENS * TOP_K, COLUMNS, dtype=torch.bfloat16)
        self.staged = torch.empty(SIZE, NUM_TOKENS * TOP_K, COLUMNS, dtype=torch.bfloat16)
        self.slots = torch.empty(SIZE, num_rows // 128, SIZE, dtype=torch.int32)
        self.arrivals = torch.zeros(SIZE, num_rows // 128, dtype=torch.int32)
        self.epoch = torch.full((1,), EPOCH, dtype=torch.int32)
        self.control = torch.zeros(256, dtype=torch.int32)

    def reset(self):
        self.y.fill_(float("nan"))
        self.out.fill_(float("nan"))
        self.staged.fill_(float("nan"))
        self.returned.fill_(float("nan"))
        self.slots.fill_(2**31 - 1)

    def gemm(self, rank):
        place = torch.tensor([rank, SIZE], dtype=torch.int32)
        tensors = (self.arrivals[rank], self.epoch, self.slots[rank], offsets_from(rank, self.slots), place)
        hooks = kernel_grouped_gemm.Hooks(landed=kernel_gemm_combine.notify_sources, landed_tensors=tensors)
        offs, tiles = self.routings[rank].offs, sizes_of(WIDE, self.num_consumers)
        return kernel_grouped_gemm.launch(
            self.hidden[rank], self.w[rank], offs, self.y[rank], tiles, 2, hooks, writes_tail=False
        )

    def pushing_gemm(self, rank):
        returned, sizes = self.returned, torch.tensor([NUM_TOKENS * TOP_K, COLUMNS], dtype=torch.int32)
        tensors = (self.routings[rank].row_routes, returned[rank], offsets_from(rank, returned), sizes)
        hooks = kernel_grouped_gemm.Hooks(destination=place_of_route_in_one_tensor, destination_tensors=tensors)
        offs, tiles = self.routings[rank].offs, sizes_of(WIDE, self.num_consumers)
        return kernel_grouped_gemm.launch(
            self.hidden[rank], self.w[rank], offs, returned[rank], tiles, 2, hooks, writes_tail=False
        )

    def combine_returned(self, rank):
        table, weights = self.routings[rank].combine_indices, self.weights[rank]
        tensors = (self.returned[rank], self.returned[rank], table, weights, None, self.out[rank])
        arguments = (tensors, (None, None, self.control, self.control), rank, SIZE, NUM_TOKENS, COLUMNS, 10**10)
        options = {"TOP_K": TOP_K, "TOKENS": 4, "COLUMNS": 256, "WHERE": "returned", "num_warps": 4}
        return Launch(kernel_gemm_combine.combine_kernel, 2, arguments, options)

    def pull(self, rank):
        tensors = (
            self.y[rank],
            offsets_from(rank, self.y),
            self.staged[rank],
            self.routings[rank].pull_combine_indices,
        )
        flags = (self.epoch, self.slots[rank], self.control, self.control)
        arguments = (tensors, flags, rank, SIZE, NUM_TOKENS * TOP_K, COLUMNS, 10**10)
        options = {"CHUNK": 8, "ROWS": 4, "COLUMNS": 256, "SLOTS": 3, "num_warps": 4}
        return Launch(kernel_gemm_combine.pull_kernel, 2, arguments, options)

    def combine(self, rank):
        table, weights = self.routings[rank].combine_indices, self.weights[rank]
        tensors = (self.y[rank], offsets_from(rank, self.y), table, weights, None, self.out[rank])
        flags = (self.epoch, self.slots[rank], self.control, self.control)
        arguments = (tensors, flags, rank, SIZE, NUM_TOKENS, COLUMNS, 10**10)
        options = {"TOP_K": TOP_K, "TOKENS": 4, "COLUMNS": 256, "WHERE": "peers", "num_warps": 4}
        return Launch(kernel_gemm_combine.combine_kernel, 2, arguments, options)

    def wanted(self, rank):
        products = []
        for peer, routing in enumerate(self.routings):
            rows = torch.zeros(self.y.shape[1:], dtype=torch.bfloat16)
            for group, (begin, end) in enumerate(reference_bounds(routing.offs)):
                rows[begin:end] = (self.hidden[peer, begin:end].float() @ self.w[peer, group].float()).bfloat16()
            products.append(rows.double())
        table = self.routings[rank].combine_indices.view(NUM_TOKENS, TOP_K, 2).long()
        total = torch.zeros(NUM_TOKENS, COLUMNS, dtype=torch.float64)
        for k in range(TOP_K):
            for peer in range(SIZE):
                mine = table[:, k, 0] == peer
                total[mine] += products[peer][table[mine, k, 1]] * self.weights[rank, mine, k, None].double()
        return total


def reference_bounds(offs):
    ends = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.slow
def test_both_ranks_end_in_every_order(simulated_words):
    ranks = Ranks()
    makers = (ranks.combine, ranks.gemm)  # those that wait first: the worst that other ranks' GEMMs can meet
    launches = [make(rank) for rank in range(SIZE) for make in makers]
    programs = [run.compile_program(launch) for launch in launches]
    for seed in range(3):
        ranks.reset()
        run.simulate(launches, seed, programs, 2)
        for rank in range(SIZE):
            wanted = ranks.wanted(rank)
            assert (ranks.out[rank].double() - wanted).norm() <= 6e-3 * wanted.norm()
            end = int(ranks.routings[rank].offs[-1]) // 128
            assert (ranks.slots[:, :end, rank] == EPOCH).all()
            assert (ranks.slots[:, end:, rank] == 2**31 - 1).all()
        assert not ranks.arrivals.any()


@pytest.mark.slow
def test_rows_are_pulled_beside_the_gemms(simulated_words):
    ranks = Ranks()
    makers = (ranks.pull, ranks.gemm)
    launches = [make(rank) for rank in range(SIZE) for make in makers]
    programs = [run.compile_program(launch) for launch in launches]
    for seed in range(2):
        ranks.reset()
        run.simulate(launches, seed, programs, 2)
        for rank, routing in enumerate(ranks.routings):
            writers, rows = routing.combine_indices.long().unbind(1)
            is_remote = (writers >= 0) & (writers != rank)
            assert is_remote.any()
            assert torch.equal(ranks.staged[rank, is_remote], ranks.y[writers[is_remote], rows[is_remote]])
            assert ranks.staged[rank, ~is_remote].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("num_consumers", [1, 2])
def test_rows_go_to_their_tokens(num_consumers, simulated_words, monkeypatch):
    monkeypatch.setattr(kernel_gemm_combine, "address_in", row_of_returned)
    ranks = Ranks(num_consumers)
    ranks.reset()
    run.simulate([ranks.pushing_gemm(rank) for rank in range(SIZE)], 0)
    run.simulate([ranks.combine_returned(rank) for rank in range(SIZE)], 0)
    for rank, routing in enumerate(ranks.routings):
        wanted = ranks.wanted(rank)
        assert (ranks.out[rank].double() - wanted).norm() <= 6e-3 * wanted.norm()
        # Every route has a row, of all of whose columns are numbers, and nothing else is written.
        assert torch.equal(ranks.returned[rank].isnan().any(1), routing.combine_indices[:, 0] < 0)
        assert torch.equal(ranks.returned[rank].isnan().all(1), routing.combine_indices[:, 0] < 0)


@pytest.mark.slow
def test_row_blocks_that_are_told_too_early_are_found(simulated_words):
    """The test above can fail."""
    ranks = Ranks()
    ranks.reset()
    ranks.slots.fill_(EPOCH)
    run.simulate([make(rank) for rank in range(SIZE) for make in (ranks.combine, ranks.gemm)], 0, resident=2)
    assert ranks.out.isnan().any()
