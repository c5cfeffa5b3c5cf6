"""What the host launches for the expert-parallel layer on a GPU, recorded on the CPU: it deadlocks nowhere, the host
never waits, and every kernel of a call has been loaded before."""

import pytest
import torch

pytest.importorskip("triton")
from tests.moe import gpu_ranks, serial_ranks, traced_launches, world_cases
from tests.moe.world_cases import Case
from tilecrew.moe import fused, workspace
from tilecrew.moe.workspace import MoESizes, MoEWorkspace
from tilecrew.parallel.world import STREAMS_OF_TORCH, distinct_streams

BF16 = torch.bfloat16
FEW = ["one expert, one route", "no tokens on some ranks"]


@pytest.fixture
def recorder(monkeypatch):
    return traced_launches.install(monkeypatch)


def make_workspaces(recorder, worlds, sizes, dispatch="warps", combine=None):
    with recorder:
        recorder.on_every_rank(worlds, lambda world: MoEWorkspace(world, sizes, dispatch=dispatch, combine=combine))


def forward_and_backward(recorder, worlds, inputs):
    recorder.clear()
    with recorder:
        recorder.on_every_rank(worlds, gpu_ranks.forward, inputs)
        outs = recorder.on_every_rank(worlds, gpu_ranks.forward_with_gradients, inputs)
        recorder.on_every_rank(worlds, gpu_ranks.backward, inputs, outs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dispatch", "combine", "is_beside"),
    [
        (1, "gather", "push", False),
        (2, "gather", "push", False),
        (1, "warps", "push", False),
        (1, "warps", "pull", False),
        (2, "warps", "push", False),
        (2, "warps", "pull", False),
        (2, "blocks", "push", False),
        (2, "blocks", "pull", False),
        (3, "warps", "pull", True),
        (3, "blocks", "pull", True),
    ],
)
def test_no_deadlock_and_nothing_loaded_late(size, dispatch, combine, is_beside, recorder, monkeypatch):
    """All worlds of one process draw from torch's streams, which come again."""
    monkeypatch.setattr(workspace, "pulls_beside", lambda capacity, is_emulated: is_beside)
    worlds = recorder.worlds(size)
    for name, case in world_cases.cases(size, BF16).items():
        if case.shared or ((size, dispatch, combine) != (2, "warps", "push") and name not in FEW):
            continue
        recorder.clear()
        make_workspaces(recorder, worlds, case.sizes, dispatch, combine)
        assert recorder.drain(size) == [], name
        assert not any(entry.kind == "barrier" for entry in recorder.log)
        loaded, operators = recorder.kernels(), set(recorder.operators)
        inputs = [gpu_ranks.Inputs(case, rank) for rank in range(size)]
        forward_and_backward(recorder, worlds, inputs)
        assert recorder.drain(size) == [], name
        assert recorder.kernels() <= loaded, name
        assert recorder.operators <= operators, name
        assert recorder.host_waits == 0, name
        assert any(entry.name == "pull_kernel" for entry in recorder.log) == is_beside, name


@pytest.mark.parametrize("name", ["shared experts", "shared experts, halves"])
def test_shared_experts_of_gpu_tests_are_loaded_before(name, recorder):
    """They are no part of a workspace; `gpu_ranks.prepare` runs them."""
    worlds = recorder.worlds(2)
    case = world_cases.cases(2, BF16)[name]
    with recorder:
        inputs = recorder.on_every_rank(worlds, gpu_ranks.prepare, case, "gather")
    loaded, operators = recorder.kernels(), set(recorder.operators)
    forward_and_backward(recorder, worlds, inputs)
    assert recorder.drain(2) == []
    assert recorder.kernels() <= loaded
    assert recorder.operators <= operators
    assert recorder.host_waits == 0


@pytest.mark.parametrize("dispatch", ["warps", "gather"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_workspaces_made_under_inference(mode, dispatch, recorder):
    """Kernels of backward are loaded too, and calls under inference need no others."""
    worlds = recorder.worlds(2)
    case = Case([3, 5], 2, 4, 64, 32, dtype=BF16)
    with mode():
        make_workspaces(recorder, worlds, case.sizes, dispatch)
    loaded, operators = recorder.kernels(), set(recorder.operators)
    with mode():
        inputs = [gpu_ranks.Inputs(case, rank) for rank in range(2)]
        recorder.clear()
        with recorder:
            recorder.on_every_rank(worlds, gpu_ranks.forward, inputs)
        assert recorder.kernels() <= loaded
        assert recorder.operators <= operators
        assert recorder.drain(2) == []
    forward_and_backward(recorder, worlds, [gpu_ranks.Inputs(case, rank) for rank in range(2)])
    assert recorder.drain(2) == []
    assert recorder.kernels() <= loaded
    assert recorder.operators <= operators
    assert recorder.host_waits == 0


@pytest.mark.slow
def test_tokens_of_other_gpus_are_there_before_they_are_gathered(recorder, monkeypatch):
    """The GEMM that gathers is behind the side stream, which is behind the barrier of the tokens."""
    monkeypatch.setattr(workspace, "DispatchLoad", gpu_ranks.far_load(2))
    worlds = recorder.worlds(2)
    case = Case([3, 5], 2, 4, 64, 32, dtype=BF16)
    make_workspaces(recorder, worlds, case.sizes, "gather")
    inputs = [gpu_ranks.Inputs(case, rank) for rank in range(2)]
    forward_and_backward(recorder, worlds, inputs)
    assert recorder.drain(2) == []
    for world in worlds:
        own = [entry for entry in recorder.log if entry.rank == world.rank]
        side = world.side_stream.name
        gemm = next(number for number, entry in enumerate(own) if "place_of_token" in entry.key)
        waits = [number for number, entry in enumerate(own) if entry.kind == "wait"]
        to_side = [number for number in waits if own[number].stream == side]
        bring = next(number for number, entry in enumerate(own) if entry.name == "bring_kernel")
        assert own[bring].stream == side
        barriers = [number for number, entry in enumerate(own) if entry.kind == "barrier"]
        assert barriers[1] < to_side[0] < bring < gemm
        assert any(bring < number < gemm and own[number].stream == world.stream.name for number in waits)


def test_a_rank_without_experts_brings_no_tokens(recorder, monkeypatch):
    """Its first GEMM, which there is none of, is what would wait for its side stream: a captured call could not end."""
    monkeypatch.setattr(workspace, "DispatchLoad", gpu_ranks.far_load(3))
    worlds = recorder.worlds(3)
    case = Case([3, 5, 4], 2, 2, 64, 32, dtype=BF16)
    make_workspaces(recorder, worlds, case.sizes, "gather")
    assert [world.workspaces[case.sizes].near is None for world in worlds] == [False, False, True]
    assert int(worlds[2].workspaces[case.sizes].token_places.abs().min()) > 0
    forward_and_backward(recorder, worlds, [gpu_ranks.Inputs(case, rank) for rank in range(3)])
    assert recorder.drain(3) == []
    for world in worlds:
        brings = [entry.rank for entry in recorder.log if entry.name == "bring_kernel" and entry.rank == world.rank]
        assert bool(brings) == (world.rank < 2)
        # What is on a side stream, the rank's own stream has waited for.
        used = [n for n, entry in enumerate(recorder.log) if entry.stream == world.side_stream.name]
        joined = [n for e in recorder.log if e.kind == "wait" and e.stream == world.stream.name for n in e.entries]
        assert set(used[-1:]) <= set(joined)


def test_sides_are_no_streams_of_ranks(recorder):
    worlds = recorder.worlds(2)
    case = Case([3, 5], 2, 4, 64, 32, dtype=BF16)
    make_workspaces(recorder, worlds, case.sizes, "blocks")
    inputs = [gpu_ranks.Inputs(case, rank) for rank in range(2)]
    for _ in range(STREAMS_OF_TORCH):
        torch.cuda.Stream()  # anybody's
        forward_and_backward(recorder, worlds, inputs)
        sides = {entry.stream for entry in recorder.log if entry.name == "dispatch_kernel"}
        assert sides.isdisjoint({world.stream.name for world in worlds})
        assert len(sides) == 2


def test_a_rank_that_stays_away_is_found(recorder):
    worlds = recorder.worlds(2)
    case = Case([3, 5], 2, 4, 64, 32, dtype=BF16)
    make_workspaces(recorder, worlds, case.sizes)
    inputs = [gpu_ranks.Inputs(case, rank) for rank in range(2)]
    recorder.clear()
    recorder.on_every_rank(worlds[:1], gpu_ranks.forward, inputs)
    assert recorder.drain(2)[0] == f"rank 0, {worlds[0].stream.name}: barrier"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dispatch", "combine", "is_beside"),
    [
        (1, "warps", "push", False),
        (2, "blocks", "push", False),
        (1, "warps", "pull", False),
        (2, "warps", "pull", False),
        (2, "warps", "pull", True),
    ],
)
def test_serial_ranks_wait_for_nothing_that_comes_later(size, dispatch, combine, is_beside, recorder, monkeypatch):
    """What compute-sanitizer is given ends where kernels run one after the other."""
    monkeypatch.setattr(workspace, "pulls_beside", lambda capacity, is_emulated: is_beside)
    worlds = recorder.worlds(size)
    case = Case([40, 131][:size], 3, 7, 136, 72, dtype=BF16, kind="some missing")
    with recorder:
        serial_ranks.prepare(worlds, case, dispatch, combine)
        recorder.clear()
        if size == 1:
            serial_ranks.forward_and_backward(worlds, case, dispatch, combine)
        else:
            serial_ranks.forward(worlds, case, dispatch, combine)
    names = [entry.name for entry in recorder.log]
    assert names.count("pull_kernel") == size * is_beside
    assert any("notify_sources" in entry.key for entry in recorder.log) == (size > 1 and combine == "pull")
    assert "combine_kernel" in names[names.index("tables_kernel") :]
    assert recorder.drain(size) == []
    assert recorder.waits_for_later(size) == []


@pytest.mark.slow
@pytest.mark.parametrize(("combine", "waiting"), [("push", {"barrier"}), ("pull", {"barrier", "combine_kernel"})])
def test_ranks_wait_for_what_comes_later(combine, waiting, recorder):
    """What the test above would see."""
    worlds = recorder.worlds(2)
    case = Case([3, 5], 2, 4, 64, 32, dtype=BF16)
    make_workspaces(recorder, worlds, case.sizes, combine=combine)
    recorder.clear()
    recorder.on_every_rank(worlds, gpu_ranks.forward, [gpu_ranks.Inputs(case, rank) for rank in range(2)])
    assert set(recorder.waits_for_later(2)) == waiting


def test_loading_takes_what_peers_have_for_no_routes(recorder, monkeypatch):
    """The ids of a peer that has not loaded yet are zeros, which would be routes."""
    worlds = recorder.worlds(2)
    sizes = MoESizes(5, 2, 4, 64, 32, BF16)
    found = []
    launch = fused.launch_combine

    def launch_combine(workspace, routing, *arguments):
        found.append((int(routing.offs[-1]), int(workspace.ids.peer(1 - workspace.world.rank).max())))
        launch(workspace, routing, *arguments)

    monkeypatch.setattr(fused, "launch_combine", launch_combine)
    recorder.on_every_rank(worlds, lambda world: MoEWorkspace(world, sizes, dispatch="warps"))
    assert {rows for rows, _ in found} == {0}
    assert found[0][1] == 0  # there was something to be taken for routes
    assert all(int(world.workspaces[sizes].epoch) == world.first_epoch for world in worlds)


def test_streams_run_out(recorder):
    streams = distinct_streams(torch.device("cpu"), STREAMS_OF_TORCH)
    assert len({stream.name for stream in streams}) == STREAMS_OF_TORCH
    with pytest.raises(ValueError, match="size must be at most 16 emulated ranks on a GPU"):
        distinct_streams(torch.device("cpu"), STREAMS_OF_TORCH + 1)


def test_a_world_of_processes_has_a_side_for_every_stream_of_the_caller(recorder):
    (world,) = recorder.worlds(1)
    world._sides = distinct_streams(torch.device("cpu"), 2)
    for stream in (*world._sides, recorder.stream):
        with recorder.use(stream):
            assert world.side_stream != stream
