"""The expert-parallel layer by emulated ranks on one GPU, each with streams of its own.

Run by test_gpu.py, in a process with enough hardware queues. By hand:

    CUDA_DEVICE_MAX_CONNECTIONS=32 PYTHONPATH=. python -m pytest -v -x --capture=sys tests/moe/emulated_gpu.py
"""

import random
import time

import pytest
import torch
import torch.distributed as dist

import tilecrew
from tests import watchdog
from tests.moe import gpu_ranks, world_cases
from tests.moe.world_cases import Case

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
from tilecrew.moe import fused
from tilecrew.moe.workspace import MoESizes, MoEWorkspace
from tilecrew.parallel import WaitError, World, host_signal, on_every_rank
from tilecrew.parallel.control import BARRIER_SLOT

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
NAMES = [name for name, case in world_cases.cases(1).items() if not case.shared]
LENGTHS = [40, 130, 0, 9, 64, 1, 128, 33]  # of up to eight ranks


def emulate(size, **options):
    if torch.cuda.get_device_capability()[0] not in (9, 12):
        pytest.skip("needs compute capability 9.0 or 12.x")
    return World.emulated(size, device="cuda", **{"timeout_seconds": gpu_ranks.TIMEOUT_SECONDS, **options})


def synchronize(worlds):
    torch.cuda.synchronize()
    for world in worlds:
        world.synchronize()


@pytest.fixture(params=["warps", "blocks", "gather"])
def dispatch(request):
    if request.param != "blocks" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return request.param


def check(worlds, case, dispatch=None, combine=None, turns=2, num_comm_blocks=None):
    """Values and gradients of all ranks; the same bits every time."""
    wanted = case.expected()
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case, dispatch, combine, num_comm_blocks)
    with watchdog.watch(worlds, "a call of all ranks"):
        compare(worlds, case, inputs, wanted, turns)


def compare(worlds, case, inputs, wanted, turns):
    first = None
    for _ in range(turns):
        outs = on_every_rank(worlds, gpu_ranks.forward, inputs)
        synchronize(worlds)
        gpu_ranks.check_forward(case, outs, wanted)
        first = first or outs
        assert all(torch.equal(a, b) for a, b in zip(outs, first, strict=True))
    gradients = compare_gradients(worlds, case, inputs, wanted)
    outs = on_every_rank(worlds, gpu_ranks.forward_with_gradients, inputs)
    again = on_every_rank(worlds, gpu_ranks.backward, inputs, outs)
    synchronize(worlds)
    for left, right in zip(gradients, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def compare_gradients(worlds, case, inputs, wanted):
    outs = on_every_rank(worlds, gpu_ranks.forward_with_gradients, inputs)
    gradients = on_every_rank(worlds, gpu_ranks.backward, inputs, outs)
    synchronize(worlds)
    gpu_ranks.check_forward(case, [out.detach() for out in outs], wanted)
    for rank, found in enumerate(gradients):
        gpu_ranks.check_gradients(case, rank, found, wanted)
    return gradients


def first_results(worlds, cases, inputs):
    """Of one call of each case, alone on the GPU, and right."""
    found = []
    for case, own in zip(cases, inputs, strict=True):
        wanted = case.expected()
        found.append(on_every_rank(worlds, gpu_ranks.forward, own))
        synchronize(worlds)
        gpu_ranks.check_forward(case, found[-1], wanted)
    return found


def differing_calls(worlds, inputs, first, num_calls, before_call=lambda: None):
    """Numbers of the calls whose results are not the bits of `first`; call n takes case n % len(inputs), so that what
    the call before has left is wrong. Compared on the device: the host waits once in a hundred calls."""
    differs = torch.zeros(len(worlds), num_calls, dtype=torch.bool, device="cuda")

    def compare(world, number, outs):
        out, expected = outs[world.rank], first[number % len(first)][world.rank]
        differs[world.rank, number].copy_((out.view(torch.int16) != expected.view(torch.int16)).any())

    def call(world, number):
        compare(world, number, {world.rank: gpu_ranks.forward(world, inputs[number % len(inputs)])})

    for number, outs in enumerate(first):  # loads what compares
        on_every_rank(worlds, compare, number, outs)
    for start in range(0, num_calls, 100):
        with watchdog.watch(worlds, f"calls from number {start} on"):
            for number in range(start, min(start + 100, num_calls)):
                before_call()
                on_every_rank(worlds, call, number)
            synchronize(worlds)
    return differs.any(0).nonzero().flatten().tolist()


def test_steps_of_a_call(dispatch):
    """One after the other: each waits for all ranks before the next begins, so that a hang has a name."""
    worlds = emulate(2)
    case = world_cases.cases(2, BF16, "cuda")["uniform"]
    wanted = case.expected()
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case, dispatch)
    for name, step in gpu_ranks.steps(worlds, case, inputs).items():
        with watchdog.watch(worlds, f"step {name!r}"):
            found = on_every_rank(worlds, step)
            synchronize(worlds)
    gpu_ranks.check_forward(case, found, wanted)


@pytest.mark.parametrize("is_beside", [False, True], ids=["behind", "beside"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_matrix_with_pulled_results(size, name, is_beside, monkeypatch):
    """Beside the second GEMM, however few tokens there are, or by combine behind it."""
    monkeypatch.setattr("tilecrew.moe.workspace.pulls_beside", lambda capacity, is_emulated: is_beside)
    worlds = emulate(size)
    check(worlds, world_cases.cases(size, BF16, "cuda")[name], combine="pull")


@pytest.mark.parametrize("is_copied", [False, True], ids=["kernel", "copied"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_matrix_with_tokens_of_other_gpus(size, name, is_copied, monkeypatch):
    """What processes do, where ranks are far: tokens are brought in front of the first GEMM."""
    monkeypatch.setattr("tilecrew.moe.workspace.DispatchLoad", gpu_ranks.far_load(size))
    monkeypatch.setattr("tilecrew.moe.workspace.copies_tokens", lambda num_tokens, capacity: is_copied)
    worlds = emulate(size)
    case = world_cases.cases(size, BF16, "cuda")[name]
    check(worlds, case, "gather")
    for world in worlds:
        workspace = world.workspaces[case.sizes]
        assert (workspace.near is None) == (len(workspace.experts) == 0)
        assert workspace.near is None or workspace.near.shape[0] == size - 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_matrix(size, name, dispatch):
    """Epochs pass 2^32 on the way."""
    check(emulate(size, first_epoch=2**32 - 4), world_cases.cases(size, BF16, "cuda")[name], dispatch)


def test_many_workspaces(dispatch):
    """More than torch has streams: side streams that were drawn for each would be those of the ranks."""
    worlds = emulate(2)
    for capacity in range(1, 41):
        case = Case([capacity, 3 if capacity > 2 else 1], 2, 4, 64, 32, dtype=BF16, device="cuda")
        inputs = on_every_rank(worlds, gpu_ranks.prepare, case, dispatch)
        with watchdog.watch(worlds, f"a call of workspace {capacity}"):
            on_every_rank(worlds, gpu_ranks.forward, inputs)
            synchronize(worlds)


def test_the_host_never_waits(dispatch, sync_is_an_error):
    (world,) = worlds = emulate(1)
    case = Case([40], 2, 5, 136, 64, dtype=BF16, device="cuda")
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case, dispatch)
    with world.use(), sync_is_an_error():
        outs = [gpu_ranks.forward_with_gradients(world, inputs)]
        gpu_ranks.backward(world, inputs, outs)
    synchronize(worlds)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_workspaces_made_under_inference(mode, dispatch):
    """They serve calls in the mode, on its tensors, and calls with gradients."""
    case = Case([40, 130], 2, 5, 136, 64, dtype=BF16, device="cuda")
    wanted = case.expected()
    with mode():
        worlds = emulate(2)
        own = on_every_rank(worlds, gpu_ranks.prepare, case, dispatch)
    assert own[0].x.is_inference() == (mode is torch.inference_mode)
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case)
    with watchdog.watch(worlds, "calls in all modes"):
        for _ in range(2):
            with mode():
                outs = on_every_rank(worlds, gpu_ranks.forward, own)
                synchronize(worlds)
            gpu_ranks.check_forward(case, outs, wanted)
            compare_gradients(worlds, case, inputs, wanted)


@pytest.mark.parametrize(("size", "hidden", "intermediate"), [(2, 2048, 768), (4, 2880, 128), (8, 7168, 256)])
def test_large(size, hidden, intermediate):
    worlds = emulate(size)
    check(
        worlds, Case([700, 0, 512, 129, 1, 300, 4, 60][:size], 8, 64, hidden, intermediate, dtype=BF16, device="cuda")
    )


def test_float16():
    worlds = emulate(2)
    check(worlds, Case([40, 130], 2, 5, 136, 64, dtype=torch.float16, device="cuda", kind="some missing"))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_late_change_nothing(size, dispatch):
    worlds = emulate(size)
    case = Case([130, 5, 0, 77][:size], 4, 9, 264, 64, dtype=BF16, device="cuda")
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case, dispatch)
    first = on_every_rank(worlds, gpu_ranks.forward, inputs)
    synchronize(worlds)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        cycles = torch.randint(0, 2_000_000, (size,), generator=generator).tolist()

        def late(world, cycles=cycles):
            torch.cuda._sleep(cycles[world.rank])
            return gpu_ranks.forward(world, inputs)

        outs = on_every_rank(worlds, late)
        synchronize(worlds)
        assert all(torch.equal(a, b) for a, b in zip(outs, first, strict=True))


def test_calls_that_differ_are_found():
    worlds = emulate(2)
    cases = [Case([40, 130], 3, 7, 136, 64, dtype=BF16, device="cuda", seed=seed) for seed in range(2)]
    inputs = [on_every_rank(worlds, gpu_ranks.prepare, case) for case in cases]
    first = first_results(worlds, cases, inputs)
    assert differing_calls(worlds, inputs, first, 3) == []
    first[1][1][7, 5] += 1
    assert differing_calls(worlds, inputs, first, 4) == [1, 3]


@pytest.mark.parametrize(
    ("size", "dispatch", "combine", "is_beside", "num_calls"),
    [
        (2, "gather", "push", False, 1000),
        (2, "blocks", "pull", False, 1000),
        (3, "gather", "push", False, 1000),
        (3, "blocks", "pull", True, 1000),
        (4, "warps", "pull", False, 1000),
        (4, "blocks", "push", False, 1000),
        (4, "gather", "push", False, 1000),
        (4, "warps", "pull", True, 1000),
        (8, "gather", "push", False, 1000),
        (8, "blocks", "pull", True, 1000),
    ],
)
def test_a_thousand_calls_with_late_ranks_and_roles(size, dispatch, combine, is_beside, num_calls, monkeypatch):
    """Whatever a rank launches that waits, or is waited for, is held up at random on its stream: barriers, GEMMs,
    combine, and blocks that dispatch or pull. Mostly by 20 us at most, about a kernel's time, rarely by 1 ms."""
    monkeypatch.setattr("tilecrew.moe.workspace.pulls_beside", lambda capacity, is_emulated: is_beside)
    worlds = emulate(size)
    shape = (LENGTHS[:size], 3, 7, 136, 64)
    cases = [Case(*shape, dtype=BF16, device="cuda", seed=seed) for seed in range(3)]
    inputs = [on_every_rank(worlds, gpu_ranks.prepare, case, dispatch, combine) for case in cases]
    first = first_results(worlds, cases, inputs)
    generator = random.Random(size)
    num_late = 0

    def hold_up(launch):
        def late(*arguments, **options):
            nonlocal num_late
            num_late += 1
            torch.cuda._sleep(2_000_000 if generator.random() < 0.01 else generator.randrange(1, 40_000))
            launch(*arguments, **options)

        return late

    for module, name in (
        (host_signal, "barrier"),
        (fused, "launch_dispatch"),
        (fused, "launch_gemm_with_movers"),
        (fused, "launch_gemm"),
        (fused, "launch_gemm_with_source"),
        (fused, "launch_gemm_with_destination"),
        (fused, "launch_pull"),
        (fused, "launch_combine"),
    ):
        monkeypatch.setattr(module, name, hold_up(getattr(module, name)))
    assert differing_calls(worlds, inputs, first, num_calls) == []
    # Two barriers, two GEMMs and combine; the blocks that dispatch where no warps do; a barrier behind pushed results.
    # With eight ranks and seven experts the last rank has no GEMM, nor what dispatches for it.
    num_with_experts = min(size, 7)
    num_of_rank = 3 + (combine == "push") + is_beside
    assert num_late == num_calls * (size * num_of_rank + num_with_experts * (2 + (dispatch == "blocks")))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("priority", [0, -1])
def test_other_work_on_the_gpu_changes_nothing(priority, size, dispatch):
    """Products that fill the GPU for some milliseconds in front of each call and beside it: blocks of the ranks'
    kernels find room late and one by one, and blocks that are needed wait for room behind blocks that wait for them.
    With priority -1 the other work goes first wherever a multiprocessor is free."""
    worlds = emulate(size)
    shape = ([300, 129, 0, 40][:size], 4, 9, 520, 136)
    cases = [Case(*shape, dtype=BF16, device="cuda", seed=seed) for seed in range(2)]
    inputs = [on_every_rank(worlds, gpu_ranks.prepare, case, dispatch) for case in cases]
    first = first_results(worlds, cases, inputs)
    taken = [stream for world in worlds for stream in (world.stream, world.side_stream)]
    # torch's streams come again: one of a rank's would order what must run side by side.
    beside = next(s for s in iter(lambda: torch.cuda.Stream(priority=priority), None) if s not in taken)
    matrix = torch.randn(8192, 8192, dtype=BF16, device="cuda")
    product = torch.empty_like(matrix)

    def fill_the_gpu():
        with torch.cuda.stream(beside):
            for _ in range(2):
                torch.mm(matrix, matrix, out=product)

    beside.wait_stream(torch.cuda.current_stream())
    fill_the_gpu()  # cuBLAS loads its kernel and takes memory
    torch.cuda.synchronize()
    assert differing_calls(worlds, inputs, first, 40, fill_the_gpu) == []
    torch.cuda.synchronize()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_before", [4, 5, 6])
def test_epochs_pass_two_to_the_32nd(size, num_before, dispatch):
    """A turn has three exchanges: a call, one that keeps what backward needs, and backward. num_before decides which of
    them is the one with epoch 0, in the second turn. Each turn has other tokens, routes and weights, so that what the
    turn before has left is wrong."""
    worlds = emulate(size, first_epoch=2**32 - num_before)
    cases = [Case([40, 130, 9][:size], 3, 7, 136, 64, dtype=BF16, device="cuda", seed=seed) for seed in range(4)]
    wanted = [case.expected() for case in cases]
    inputs = [on_every_rank(worlds, gpu_ranks.prepare, case, dispatch) for case in cases]
    workspaces = [world.workspaces[cases[0].sizes] for world in worlds]
    assert [int(workspace.epoch) for workspace in workspaces] == [-num_before] * size
    for case, own, truth in zip(cases, inputs, wanted, strict=True):
        with watchdog.watch(worlds, "a turn"):
            outs = on_every_rank(worlds, gpu_ranks.forward, own)
            synchronize(worlds)
            gpu_ranks.check_forward(case, outs, truth)
            compare_gradients(worlds, case, own, truth)
    assert [int(workspace.epoch) for workspace in workspaces] == [3 * len(cases) - num_before] * size


def test_many_calls_without_waiting_for_the_device():
    worlds = emulate(2)
    case = Case([70, 33], 2, 4, 136, 64, dtype=BF16, device="cuda")
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case)
    first = on_every_rank(worlds, gpu_ranks.forward, inputs)
    for _ in range(200):
        outs = on_every_rank(worlds, gpu_ranks.forward, inputs)
    synchronize(worlds)
    assert all(torch.equal(a, b) for a, b in zip(outs, first, strict=True))


def replay(worlds, graphs, outs):
    """Of all ranks, into outputs that were NaN."""
    for out in outs:
        out.fill_(float("nan"))
    torch.cuda.synchronize()
    with watchdog.watch(worlds, "a replay"):
        on_every_rank(worlds, lambda world: graphs[world.rank].replay())
        synchronize(worlds)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_cuda_graph_replays_with_other_tokens_and_routes(size, dispatch):
    check_replays(size, dispatch)


@pytest.mark.parametrize(
    ("size", "form", "combine"),
    [(8, "gather", "push"), (8, "warps", "push"), (2, "warps", "pull"), (3, "blocks", "pull"), (8, "warps", "pull")],
)
def test_cuda_graph_replays_of_eight_ranks_and_of_pulled_results(size, form, combine):
    """Graphs of eight ranks have no branches, which would need more hardware queues than there are streams for."""
    check_replays(size, form, combine)


def check_replays(size, dispatch, combine=None):
    worlds = emulate(size, first_epoch=2**32 - 18)  # 12 eager calls before, 0 is the epoch of a replay
    shape = (LENGTHS[:size], 3, 7, 136, 64)
    problems = [Case(*shape, dtype=BF16, device="cuda", seed=seed) for seed in range(12)]
    problems[3] = Case(*shape, dtype=BF16, device="cuda", kind="all missing")
    problems[5] = Case(*shape, dtype=BF16, device="cuda", kind="one expert")
    inputs = on_every_rank(worlds, gpu_ranks.prepare, problems[0], dispatch, combine)
    others = [[gpu_ranks.Inputs(problem, rank) for rank in range(size)] for problem in problems]
    # All before the first replay: results of the same tokens, just left by an eager call, would hide a replay that does
    # not wait.
    wanted = [on_every_rank(worlds, gpu_ranks.forward, parts) for parts in others]
    synchronize(worlds)
    graphs, outs = [], []
    for world in worlds:  # one graph each: branches of one graph need not run at the same time
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=world.stream):
            outs.append(gpu_ranks.forward(world, inputs))
    for problem, parts, eager in zip(problems, others, wanted, strict=True):
        for own, part in zip(inputs, parts, strict=True):
            own.x.copy_(part.x)
            own.ids.copy_(part.ids)
            own.weights.copy_(part.weights)
            own.w_gate_up.copy_(part.w_gate_up)
            own.w_down.copy_(part.w_down)
        replay(worlds, graphs, outs)
        assert all(torch.equal(a, b) for a, b in zip(outs, eager, strict=True))
        gpu_ranks.check_forward(problem, outs, problem.expected())
    again = on_every_rank(worlds, gpu_ranks.forward, others[0])  # eager calls go on where replays have left epochs
    synchronize(worlds)
    assert all(torch.equal(a, b) for a, b in zip(again, wanted[0], strict=True))


def test_cuda_graphs_of_ranks_without_experts(dispatch, monkeypatch):
    """They bring no tokens, or the capture could not end: nothing would wait for their side streams."""
    monkeypatch.setattr("tilecrew.moe.workspace.DispatchLoad", gpu_ranks.far_load(3))
    worlds = emulate(3)
    case = Case([40, 130, 9], 2, 2, 136, 64, dtype=BF16, device="cuda")
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case, dispatch)
    wanted = case.expected()
    eager = on_every_rank(worlds, gpu_ranks.forward, inputs)
    synchronize(worlds)
    gpu_ranks.check_forward(case, eager, wanted)
    graphs, outs = [], []
    for world in worlds:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=world.stream):
            outs.append(gpu_ranks.forward(world, inputs))
    for _ in range(3):
        replay(worlds, graphs, outs)
        assert all(torch.equal(a, b) for a, b in zip(outs, eager, strict=True))


@pytest.mark.parametrize("combine", ["push", "pull"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_that_stalls_ends_in_an_error_on_all(size, combine):
    """The last one. All others end at one deadline, and not each wait at its own."""
    worlds = emulate(size, timeout_seconds=2.0)
    case = Case([40] * size, 2, 2 * size, 136, 64, place="remote", dtype=BF16, device="cuda")
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case, None, combine)
    on_every_rank(worlds, gpu_ranks.forward, inputs)
    synchronize(worlds)
    start = time.monotonic()
    outs = on_every_rank(worlds[:-1], gpu_ranks.forward, inputs)

    def shares_and_stays_away(world):
        own = inputs[world.rank]
        world.workspaces[case.sizes].share_tokens(own.x, own.ids, own.weights)

    on_every_rank(worlds[-1:], shares_and_stays_away)
    launched = time.monotonic()
    torch.cuda.synchronize()
    end = time.monotonic()
    assert end - start > 1.9
    assert end - launched < 3 * 2.0  # other processes may have the GPU meanwhile
    records = []
    for world in worlds:
        with pytest.raises(WaitError) as error:
            world.synchronize()
        records.append((error.value.rank, error.value.record))
    assert len({rank for rank, _ in records}) == 1 and records[0][0] < size - 1
    for _, record in records:  # of several waits of that rank; which slot's is the last to be told may differ
        assert record.writer == size - 1
        assert record.slot == BARRIER_SLOT if combine == "push" else record.slot >= 0
        assert record.expected == record.seen + 1
    for rank, out in enumerate(outs):
        own = inputs[rank].ids
        assert (own >= 2 * size - 2).any() and out.isnan().any()  # it had routes to the last rank


def test_errors():
    worlds = emulate(2)
    case = Case([5, 5], 2, 4, 136, 64, dtype=BF16, device="cuda")
    own = gpu_ranks.Inputs(case, 0)
    with pytest.raises(ValueError, match="must have a workspace on every emulated rank before the first call"):
        own.forward(worlds[0])
    with pytest.raises(TypeError, match="x must be bfloat16 or float16 where ranks address"):
        MoEWorkspace(worlds[0], MoESizes(5, 2, 4, 136, 64, torch.float32))
    with pytest.raises(ValueError, match="x must be on the device of the world"):
        tilecrew.moe_forward(
            *(t.cpu() for t in (own.x, own.ids, own.weights, own.w_gate_up, own.w_down)), world=worlds[0], capacity=5
        )
    with pytest.raises(ValueError, match="dispatch must be None or one of warps, blocks, gather"):
        MoEWorkspace(worlds[0], case.sizes, dispatch="pigeons")
    with pytest.raises(ValueError, match="combine must be None or one of push, pull"):
        MoEWorkspace(worlds[0], case.sizes, combine="pigeons")
    for number in (0, worlds[0].num_sms):
        with pytest.raises(ValueError, match="num_comm_blocks must be at least 1 and less than"):
            MoEWorkspace(worlds[0], case.sizes, num_comm_blocks=number)
