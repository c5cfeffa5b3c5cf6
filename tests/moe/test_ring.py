"""Communication blocks in the simulator: every row comes to its place, nothing else is written, and what is told of has
been stored. The same words stand for asynchronous copies and flags as in test_mover and test_ranks."""

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from tests.grouped_gemm.hook_examples import SimulatedCountGate
from tests.grouped_gemm.problems import H200, assert_close, expected, make
from tests.grouped_gemm.test_simulator import WIDE, sizes_of
from tests.moe.problems import random_ids
from tests.moe.test_mover import load_flag, row_of_one_tensor
from tests.simulator.plain_copies import copy_at_once, no_group, nothing_to_wait_for
from tilecrew.device.compat import gl, gluon
from tilecrew.device.launch import Launch
from tilecrew.grouped_gemm import kernel_gates, kernel_grouped_gemm
from tilecrew.grouped_gemm.hooks import BandGate
from tilecrew.moe import crew_ring, kernel_dispatch_gemm, kernel_gemm_combine, schedule
from tilecrew.moe.routing import build_routing
from tilecrew.simulator import run

NUM_TOKENS, TOP_K = 20, 3
SMALL = {"CHUNK": 16, "ROWS": 8, "COLUMNS": 256, "SLOTS": 3, "num_warps": 4}
EPOCH = -(2**31)  # behind 2^31 - 1


@gluon.jit
def reached(flag, expected, slot, writer, control, offsets, rank, size, timeout):
    return gl.load(flag) - expected >= 0


@gluon.jit
def load_counter(pointer, SCOPE: gl.constexpr):
    """By an atomic operation, as the simulator asks of what others write meanwhile."""
    nothing = (pointer.to(gl.int64) * 0).to(gl.int32)
    return gl.atomic_add(pointer, nothing, sem="acquire", scope=SCOPE)


@gluon.jit
def no_clock():
    return 0


def forget_hashes(monkeypatch):
    """Triton keeps the hash of a function, by which it finds what it has compiled, from before its globals changed."""
    for module in (crew_ring, kernel_dispatch_gemm, kernel_gates, kernel_gemm_combine):
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                monkeypatch.setattr(value, "hash", None)


@pytest.fixture(autouse=True)
def simulated_words(monkeypatch):
    forget_hashes(monkeypatch)
    for module in (kernel_dispatch_gemm, kernel_gemm_combine):
        monkeypatch.setattr(module, "load_acquire", load_flag)
    monkeypatch.setattr(kernel_dispatch_gemm, "fence_proxy_async_once", no_group)
    for name in ("fence_proxy_async", "trap"):
        monkeypatch.setattr(kernel_gates, name, no_group)
    monkeypatch.setattr(kernel_gates, "load_acquire", load_counter)
    monkeypatch.setattr(kernel_gates, "nanoseconds", no_clock)
    monkeypatch.setattr(kernel_gemm_combine, "wait_for_rank", reached)
    monkeypatch.setattr(crew_ring, "row_of_peer", row_of_one_tensor)
    monkeypatch.setattr(crew_ring, "async_copy_to_shared", copy_at_once)
    monkeypatch.setattr(crew_ring, "commit_copies", no_group)
    monkeypatch.setattr(crew_ring, "wait_for_copies", nothing_to_wait_for)


def routing_of(size, kind, rank=None):
    ids = random_ids(size * NUM_TOKENS, TOP_K, 2 * size, kind=kind).view(size, NUM_TOKENS, TOP_K)
    return build_routing(ids, num_experts=2 * size, rank=size - 1 if rank is None else rank)


class Dispatch:
    """A launch of the last of `size` ranks, and what it reads and writes."""

    def __init__(self, size, num_columns, num_blocks, options, kind="some missing"):
        self.routing = routing_of(size, kind)
        self.tokens = torch.randn(size, NUM_TOKENS, num_columns).to(torch.bfloat16)
        num_rows = self.routing.pull_dispatch_indices.shape[0]
        self.rows = torch.full((num_rows, num_columns), float("nan"), dtype=torch.bfloat16)
        self.counters = torch.zeros(num_rows // 128, dtype=torch.int32)
        self.control = torch.zeros(128, dtype=torch.int32)
        self.end = int(self.routing.offs[-1])
        offsets = torch.arange(size) * NUM_TOKENS * num_columns * 2
        tensors = (
            self.tokens,
            offsets,
            self.rows,
            self.routing.pull_dispatch_indices,
            self.routing.offs,
            self.counters,
            self.control,
        )
        self.launch = Launch(kernel_dispatch_gemm.dispatch_kernel, num_blocks, (tensors, 2, num_columns), options)

    def check(self):
        source, token = self.routing.pull_dispatch_indices[: self.end].long().unbind(1)
        wanted = torch.where((source >= 0)[:, None], self.tokens[source.clamp_min(0), token.clamp_min(0)], 0)
        assert torch.equal(self.rows[: self.end], wanted)
        assert self.rows[self.end :].isnan().all()
        num_full = self.end // 128
        assert self.counters.tolist() == [128] * num_full + [0] * (len(self.counters) - num_full)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_columns", "num_blocks", "kind"),
    [
        (1, 72, 1, "some missing"),
        (2, 520, 3, "some missing"),
        (3, 256, 5, "one expert"),
        (2, 72, 2, "all missing"),
        (2, 2048, 40, "some missing"),
    ],
)
def test_dispatch(size, num_columns, num_blocks, kind):
    """More blocks than chunks, too."""
    case = Dispatch(size, num_columns, num_blocks, SMALL, kind)
    run.simulate(case.launch, resident=2)
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize("num_columns", [2048, 7168 + 8])
def test_dispatch_as_it_is_launched(num_columns):
    case = Dispatch(2, num_columns, 3, schedule.ring_options(num_columns, H200))
    run.simulate(case.launch, resident=3)
    case.check()


@pytest.mark.slow
def test_a_failed_world_gives_no_numbers():
    case = Dispatch(2, 520, 2, SMALL)
    case.control[0] = 1
    case.rows.fill_(7.0)
    run.simulate(case.launch)
    assert case.rows[: case.end].isnan().all()
    assert case.rows[case.end :].eq(7).all()
    assert case.counters[: case.end // 128].eq(128).all()


class Pull:
    """A launch of the first of `size` ranks, and what it reads and writes. All row blocks are there."""

    def __init__(self, size, num_columns, num_blocks, options, kind="some missing", num_tokens=NUM_TOKENS):
        self.routing, self.num_routes = routing_of(size, kind, rank=0), num_tokens * TOP_K
        num_rows = self.routing.row_routes.shape[0]
        self.y = torch.randn(size, num_rows, num_columns).to(torch.bfloat16)
        self.staged = torch.full((NUM_TOKENS * TOP_K, num_columns), float("nan"), dtype=torch.bfloat16)
        self.slots = torch.full((num_rows // 128, size), EPOCH, dtype=torch.int32)
        self.control = torch.zeros(256, dtype=torch.int32)
        epoch = torch.full((1,), EPOCH, dtype=torch.int32)
        offsets = torch.arange(size) * num_rows * num_columns * 2
        tensors = (self.y, offsets, self.staged, self.routing.pull_combine_indices)
        flags = (epoch, self.slots, self.control, self.control)
        arguments = (tensors, flags, 0, size, self.num_routes, num_columns, 10**10)
        self.launch = Launch(kernel_gemm_combine.pull_kernel, num_blocks, arguments, options)

    @property
    def remote(self):
        """Routes, writers and rows of what is to be pulled."""
        writers, rows = self.routing.combine_indices.long().unbind(1)
        routes = (writers > 0).nonzero().flatten()
        return routes, writers[routes], rows[routes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_columns", "num_blocks", "kind", "options"),
    [
        (1, 72, 2, "some missing", SMALL),
        (2, 72, 1, "some missing", SMALL),
        (3, 520, 2, "some missing", SMALL),
        (2, 256, 7, "all missing", SMALL),
        (2, 7168 + 8, 3, "some missing", schedule.ring_options(7168 + 8, H200)),
    ],
)
def test_pull(size, num_columns, num_blocks, kind, options):
    case = Pull(size, num_columns, num_blocks, options, kind)
    run.simulate(case.launch, resident=2)
    routes, writers, rows = case.remote
    assert len(routes) > 0 or size == 1 or kind == "all missing"
    assert torch.equal(case.staged[routes], case.y[writers, rows])
    others = torch.ones(len(case.staged), dtype=torch.bool)
    others[routes] = False
    assert case.staged[others].isnan().all()


@pytest.mark.slow
def test_what_has_not_landed_is_not_read():
    """A wait that fails gives NaN for the rows of its chunk; rows that were pulled before have values or NaN."""
    case = Pull(3, 72, 1, SMALL)
    count = len(case.remote[0])
    table = case.routing.pull_combine_indices[:count].long()
    writer, block = int(table[-1, 0]), int(table[-1, 1]) // 128
    case.slots[block, writer] -= 1
    case.staged.fill_(7.0)
    run.simulate(case.launch)
    is_missing = (table[:, 0] == writer) & (table[:, 1] // 128 == block)
    first = int(is_missing.nonzero()[0]) // SMALL["CHUNK"] * SMALL["CHUNK"]
    found, wanted = case.staged[table[:, 2]], case.y[table[:, 0], table[:, 1]]
    assert found[first:].isnan().all()
    assert ((found == wanted) | found.isnan()).all()


def beside_a_gemm(case, num_columns, by_bands=False):
    """The launch of the GEMM that waits for a Dispatch, its weights and output."""
    _, w, _ = make([1, 1], 0, num_columns, 136)
    out = torch.full((len(case.rows), 136), float("nan"), dtype=torch.bfloat16)
    gate = SimulatedCountGate(case.counters)
    if by_bands:
        gate = BandGate(case.counters, case.routing.offs)
    hooks = kernel_grouped_gemm.hooks_of(gate, None)
    tiles = sizes_of(WIDE, 2)
    launch = kernel_grouped_gemm.launch(case.rows, w, case.routing.offs, out, tiles, 2, hooks, writes_tail=False)
    return launch, w, out


@pytest.mark.slow
@pytest.mark.parametrize("by_bands", [False, True])
def test_rows_arrive_while_a_gemm_multiplies(by_bands):
    case = Dispatch(2, 72, 2, SMALL)
    gemm, w, out = beside_a_gemm(case, 72, by_bands)
    programs = [run.compile_program(launch) for launch in (gemm, case.launch)]
    for seed in range(2):
        case.rows.fill_(float("nan"))
        case.counters.zero_()
        run.simulate([gemm, case.launch], seed, programs, 2)
        case.check()
        assert_close(out[: case.end], expected(case.rows[: case.end], w, case.routing.offs), case.routing.offs)


@gluon.jit
def count_at_once(tensors, row, is_well, CHUNK: gl.constexpr):
    gl.atomic_add(tensors[5] + row // 128, 128, sem="release", scope="gpu")
    return is_well


@pytest.mark.slow
def test_rows_that_are_told_of_too_early_are_found(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(kernel_dispatch_gemm, "wait_for_nothing", count_at_once)
    forget_hashes(monkeypatch)
    case = Dispatch(2, 72, 2, SMALL)
    gemm, _, out = beside_a_gemm(case, 72)
    run.simulate([gemm, case.launch], 0, resident=2)
    assert out[: case.end].isnan().any()
