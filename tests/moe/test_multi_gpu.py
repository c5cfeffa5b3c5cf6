"""The expert-parallel layer by processes with a GPU each."""

import pytest
import torch
import torch.distributed as dist

from tests import watchdog
from tests.moe import gpu_ranks, world_cases
from tests.moe.world_cases import Case

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
from tilecrew.moe.schedule import copies_tokens
from tilecrew.parallel import run_processes

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow, pytest.mark.xdist_group("several GPUs")]
BF16 = torch.bfloat16
NAMES = [name for name, case in world_cases.cases(2).items() if not case.shared]
OPTIONS = {"device": "cuda", "timeout_seconds": gpu_ranks.TIMEOUT_SECONDS, "limit_seconds": 600.0}


def processes_steps(world):
    case = world_cases.cases(world.size, BF16, world.device)["uniform"]
    wanted = case.expected()
    inputs = {world.rank: gpu_ranks.prepare(world, case)}
    for name, step in gpu_ranks.steps([world], case, inputs).items():
        with watchdog.watch([world], f"step {name!r} of rank {world.rank}"):
            out = step(world)
            world.synchronize()
    world_cases.check_forward(case, world.rank, out, wanted)
    return True


def test_steps_of_a_call():
    assert run_processes(processes_steps, 2, **OPTIONS) == [True, True]


def processes_check(world, names, dispatch, combine):
    cases = world_cases.cases(world.size, BF16, world.device)
    for name in names:
        case = cases[name]
        print(f"rank {world.rank}: {name}", flush=True)  # shown where the test fails
        wanted = case.expected()
        inputs = {world.rank: gpu_ranks.prepare(world, case, dispatch, combine)}
        with watchdog.watch([world], f"{name!r} of rank {world.rank}"):
            compare(world, case, inputs, wanted)
    return True


def compare(world, case, inputs, wanted):
    first = None
    for _ in range(5):
        out = gpu_ranks.forward(world, inputs)
        world.synchronize()
        world_cases.check_forward(case, world.rank, out, wanted)
        first = out if first is None else first
        assert torch.equal(out, first)
    outs = {world.rank: gpu_ranks.forward_with_gradients(world, inputs)}
    gradients = gpu_ranks.backward(world, inputs, outs)
    world.synchronize()
    gpu_ranks.check_gradients(case, world.rank, gradients, wanted)


@pytest.mark.parametrize("names", [NAMES[start::4] for start in range(4)], ids=lambda names: names[0])
def test_two_processes(names):
    """Some cases in each: their kernels are compiled first, which takes longer than they run."""
    assert run_processes(processes_check, 2, names, None, None, **OPTIONS) == [True, True]


def test_two_processes_that_move_rows_and_pull_results():
    assert run_processes(processes_check, 2, NAMES[::4], "blocks", "pull", **OPTIONS) == [True, True]


def processes_copy(world):
    """As many tokens as copy engines bring, and on one rank fewer than that."""
    case = Case([2048, 300], 4, 9, 264, 64, dtype=BF16, device=world.device)
    inputs = {world.rank: gpu_ranks.prepare(world, case)}
    assert world.workspaces[case.sizes].near is not None
    assert copies_tokens(case.lengths[world.rank], case.sizes.capacity) == (world.rank == 0)
    with watchdog.watch([world], f"copies of rank {world.rank}"):
        compare(world, case, inputs, case.expected())
    return True


def test_two_processes_that_copy_tokens():
    assert run_processes(processes_copy, 2, **OPTIONS) == [True, True]


def processes_inference(world):
    case = world_cases.cases(world.size, BF16, world.device)["uniform"]
    wanted = case.expected()
    with torch.inference_mode():
        own = {world.rank: gpu_ranks.prepare(world, case)}
    inputs = {world.rank: gpu_ranks.prepare(world, case)}
    for _ in range(2):
        with torch.inference_mode():
            out = gpu_ranks.forward(world, own)
            world.synchronize()
        world_cases.check_forward(case, world.rank, out, wanted)
        outs = {world.rank: gpu_ranks.forward_with_gradients(world, inputs)}
        gradients = gpu_ranks.backward(world, inputs, outs)
        world.synchronize()
        gpu_ranks.check_gradients(case, world.rank, gradients, wanted)
    return True


def test_two_processes_whose_workspace_is_made_under_inference():
    assert run_processes(processes_inference, 2, **OPTIONS) == [True, True]


def processes_graph(world, num_tokens):
    """Replays with other tokens, routes and weights, so that what the one before has left is wrong."""
    shape = ([num_tokens] * world.size, 4, 9, 264, 64)
    cases = [Case(*shape, dtype=BF16, device=world.device, seed=seed) for seed in range(4)]
    inputs = {world.rank: gpu_ranks.prepare(world, cases[0])}
    others, wanted = [gpu_ranks.Inputs(case, world.rank) for case in cases], []
    for case, other in zip(cases, others, strict=True):
        wanted.append(gpu_ranks.forward(world, {world.rank: other}))
        world.synchronize()
        world_cases.check_forward(case, world.rank, wanted[-1], case.expected())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu_ranks.forward(world, inputs)
    own = inputs[world.rank]
    for turn in range(20):
        other = others[turn % len(others)]
        for name in ("x", "ids", "weights", "w_gate_up", "w_down"):
            getattr(own, name).copy_(getattr(other, name))
        out.fill_(float("nan"))
        graph.replay()
        world.synchronize()
        assert torch.equal(out, wanted[turn % len(others)])
    return True


@pytest.mark.parametrize("num_tokens", [60, 1100], ids=["kernel", "copied"])
def test_graphs_of_two_processes(num_tokens):
    assert run_processes(processes_graph, 2, num_tokens, **OPTIONS) == [True, True]
