"""The grouped GEMM with a mover in every block, in the simulator: rows and products are right, nobody reads a row of
global memory before it has landed, and no block waits for ever.

The simulator knows no asynchronous copies of a warp's own and one address space for each tensor: copies are loads and
stores here, and the tokens of all ranks are one tensor.
"""

import pytest
import torch

pytest.importorskip("triton")
from tests.grouped_gemm.hook_examples import SimulatedCountGate
from tests.grouped_gemm.problems import assert_close, expected, make
from tests.grouped_gemm.test_simulator import WIDE, sizes_of
from tests.moe.problems import random_ids
from tests.simulator.plain_copies import copy_at_once, no_group, nothing_to_wait_for
from tilecrew.device.compat import gl, gluon
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.moe import crew_mover, schedule
from tilecrew.moe.routing import build_routing
from tilecrew.simulator import run


@gluon.jit
def load_flag(pointer, SCOPE: gl.constexpr):
    return gl.load(pointer)


@gluon.jit
def row_of_one_tensor(x, offset, token, num_columns):
    return x + (offset // 2 + gl.maximum(token, 0).to(gl.int64) * num_columns)


@pytest.fixture
def simulated_words(monkeypatch):
    monkeypatch.setattr(crew_mover, "load_acquire", load_flag)
    monkeypatch.setattr(crew_mover, "row_of_peer", row_of_one_tensor)
    monkeypatch.setattr(crew_mover, "async_copy_to_shared", copy_at_once)
    monkeypatch.setattr(crew_mover, "commit_copies", no_group)
    monkeypatch.setattr(crew_mover, "wait_for_copies", nothing_to_wait_for)


def launch_of(size, num_columns, num_programs, mover=crew_mover.move_rows, rank=None, tokens=None):
    """A launch of rank size - 1, or of `rank`, its tables, and the tensors that it reads and writes. tokens: of all
    ranks."""
    rank = size - 1 if rank is None else rank
    num_experts, num_tokens = 2 * size, 20
    ids = random_ids(size * num_tokens, 2, num_experts, kind="some missing").view(size, num_tokens, 2)
    routing = build_routing(ids, num_experts=num_experts, rank=rank)
    tokens = torch.randn(size, num_tokens, num_columns).to(torch.bfloat16) if tokens is None else tokens
    offsets = torch.arange(size) * num_tokens * num_columns * 2
    num_rows = routing.pull_dispatch_indices.shape[0]
    rows = torch.full((num_rows, num_columns), float("nan"), dtype=torch.bfloat16)
    counters = torch.zeros(num_rows // 128, dtype=torch.int32)
    _, w, _ = make([1, 1], 0, num_columns, 136)
    out = torch.full((num_rows, 136), float("nan"), dtype=torch.bfloat16)
    sizes = torch.tensor([2, num_columns], dtype=torch.int32)
    control = torch.zeros(128, dtype=torch.int32)
    hooks = kernel_grouped_gemm.hooks_of(SimulatedCountGate(counters), None)._replace(
        mover=mover,
        mover_tensors=(
            tokens, offsets, routing.pull_dispatch_indices, routing.offs, sizes, rows, counters, control,
        ),
        mover_slots=schedule.MOVER_SLOTS,
        mover_columns=schedule.MOVER_COLUMNS,
    )  # fmt: skip
    launch = kernel_grouped_gemm.launch(
        rows, w, routing.offs, out, sizes_of(WIDE, 2), num_programs, hooks, writes_tail=False
    )
    return launch, routing, tokens, rows, counters, control, w, out


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_columns", "num_programs"), [(1, 72, 1), (2, 1032, 2), (3, 72, 3)])
def test_rows_arrive_while_others_multiply(size, num_columns, num_programs, simulated_words):
    launch, routing, tokens, rows, counters, _, w, out = launch_of(size, num_columns, num_programs)
    program = run.compile_program(launch)
    end = int(routing.offs[-1])
    source, token = routing.pull_dispatch_indices[:end].long().unbind(1)
    wanted = torch.where((source >= 0)[:, None], tokens[source.clamp_min(0), token.clamp_min(0)], 0)
    for seed in range(2):
        rows.fill_(float("nan"))
        out.fill_(float("nan"))
        counters.zero_()
        run.simulate(launch, seed, [program], num_programs)
        assert torch.equal(rows[:end], wanted)
        assert rows[end:].isnan().all()
        assert counters.tolist() == [128] * (end // 128) + [0] * (len(counters) - end // 128)
        assert_close(out[:end], expected(wanted, w, routing.offs), routing.offs)
        assert out[end:].isnan().all()


@pytest.mark.slow
def test_two_ranks_at_once(simulated_words):
    """Each with several blocks, which wait for each other's movers."""
    tokens = torch.randn(2, 20, 72).to(torch.bfloat16)
    found = [launch_of(2, 72, 2, rank=rank, tokens=tokens) for rank in range(2)]
    launches = [parts[0] for parts in found]
    programs = [run.compile_program(launch) for launch in launches]
    for seed in range(2):
        for _, _, _, rows, counters, _, _, out in found:
            rows.fill_(float("nan"))
            out.fill_(float("nan"))
            counters.zero_()
        run.simulate(launches, seed, programs, 2)
        for _, routing, _, rows, _, _, w, out in found:
            end = int(routing.offs[-1])
            source, token = routing.pull_dispatch_indices[:end].long().unbind(1)
            wanted = torch.where((source >= 0)[:, None], tokens[source.clamp_min(0), token.clamp_min(0)], 0)
            assert torch.equal(rows[:end], wanted)
            assert_close(out[:end], expected(wanted, w, routing.offs), routing.offs)


@pytest.mark.slow
def test_a_failed_world_gives_no_numbers(simulated_words):
    launch, routing, _, rows, counters, control, _, out = launch_of(1, 72, 1)
    control[0] = 1
    run.simulate(launch, 0, [run.compile_program(launch)], 1)
    end = int(routing.offs[-1])
    assert rows[:end].isnan().all()
    assert out[:end].isnan().all()
    assert counters[: end // 128].eq(128).all()


@gluon.jit
def hasty_mover(slots, tensors):
    gl.atomic_add(tensors[6], 128, sem="release", scope="gpu")
    crew_mover.move_rows(slots, tensors)


@pytest.mark.slow
def test_a_counter_that_is_raised_too_early_is_found(simulated_words):
    """The tests above can fail."""
    launch, routing, *_, out = launch_of(1, 72, 1, hasty_mover)
    run.simulate(launch, 0, [run.compile_program(launch)], 1)
    assert out[: int(routing.offs[-1])].isnan().any()
