"""The expert-parallel layer over a World on the CPU: processes that share memory, and threads."""

import random
import time

import pytest
import torch
import torch.distributed as dist

import tilecrew
from tests.moe import gpu_ranks, world_cases
from tests.moe.world_cases import Case
from tilecrew.moe import reference
from tilecrew.moe.workspace import MoESizes, MoEWorkspace

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
from tilecrew.parallel import ProcessesError, WaitError, World, on_every_rank, run_processes


def matrix(world):
    """Every case, and which of them have failed; one set of processes for all."""
    for name, case in world_cases.cases(world.size).items():
        try:
            world_cases.check(world, case)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    for dtype in (torch.float64, torch.bfloat16):
        world_cases.check(world, Case([40] * world.size, 2, 6, 64, 32, dtype=dtype))
    disagreements(world)
    return len(world.workspaces)


def disagreements(world):
    """Errors of one rank are errors of all, and the world goes on."""
    last = world.rank == world.size - 1
    case = Case([5] * world.size, 2, 4, 16, 8)
    wide = Case([5] * world.size, 2, 4, 24, 8)

    def run(own, match):
        with pytest.raises(ValueError, match=match):
            world_cases.forward(world, own)

    if world.size > 1:
        run(wide if last else case, "ranks disagree.*H = 16.*H = 24")
        small = Case([5] * world.size, 2, 4, 16, 8)
        small.capacity = 4 if last else 5
        run(small, "5 tokens, more than its capacity of 4")
        other = Case([5] * world.size, 2, 4, 16, 8, layout="halves" if last else "interleaved")
        run(other, "ranks disagree.*interleaved.*halves")
        bad = Case([5] * world.size, 2, 4, 16, 8)
        if last:
            bad.problem.topk_ids[:] = 4
        run(bad, "topk_ids must be -1")
        with pytest.raises(ValueError, match="top_k must be at most num_experts = 4" if last else "ranks disagree"):
            MoEWorkspace(world, MoESizes(5, 5 if last else 2, 4, 16, 8, torch.float32))
    world_cases.check_forward(case, world.rank, world_cases.forward(world, case), case.expected())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_processes(size):
    found = run_processes(matrix, size, first_epoch=2**32 - 4)
    assert len(set(found)) == 1 and found[0] > 15


LARGE = {"many tokens": ([4096, 127], 2, 5, 128, 64), "wide": ([9, 40], 6, 64, 2880, 64)}


def large(world, name):
    """Forward only: the loop's gradients would take longer than all else."""
    case = Case(*LARGE[name])
    p = case.problem
    wanted = reference.moe(p.x.double(), p.topk_ids, *(t.double() for t in (p.topk_weights, p.gate, p.up, p.down)))
    first = world_cases.forward(world, case)
    world_cases.check_forward(case, world.rank, first, (wanted,))
    assert torch.equal(world_cases.forward(world, case), first)
    return len(world.workspaces[case.sizes].experts)


@pytest.mark.parametrize("name", LARGE)
def test_large_forward_by_threads(name):
    found = on_every_rank(World.emulated(2, device="cpu"), large, name)
    assert sum(found) == LARGE[name][2]


@pytest.mark.slow
def test_large_forward_by_processes():
    found = run_processes(large_of_both, 2)
    assert [sum(of_ranks) for of_ranks in zip(*found, strict=True)] == [5, 64]


def large_of_both(world):
    return [large(world, name) for name in LARGE]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_of_missing_routes_may_be_nan(size):
    case = world_cases.with_nan_weights(Case([17, 30, 4][:size], 3, 7, 16, 8, kind="some missing"))
    on_every_rank(World.emulated(size, device="cpu"), world_cases.check, case)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads(size):
    """Epochs that pass 2^32 and 2^31, and ranks that are late now and then."""
    worlds = World.emulated(size, device="cpu", first_epoch=2**31 - 4)
    case = Case([17, 0, 30, 4, 9][:size], 2, 7, 16, 8)
    wanted = case.expected()

    def run(world):
        delays = random.Random(world.rank)
        for turn in range(8):
            time.sleep(delays.uniform(0, 0.01))
            out, gradients = world_cases.forward_and_backward(world, case)
            world_cases.check_forward(case, world.rank, out, wanted)
            world_cases.check_gradients(case, world.rank, gradients, wanted)
            if turn == 0:
                first = out
            assert torch.equal(out, first)

    on_every_rank(worlds, run)


def stalls(world):
    """The last rank takes part in the exchange of tokens, then stays away; all others must say whom they miss."""
    case = Case([20] * world.size, 2, 2 * world.size, 16, 8, place="remote")
    workspace = MoEWorkspace(world, case.sizes)
    world_cases.forward(world, case)
    start = time.monotonic()
    try:
        if world.rank == world.size - 1:
            world.agree(f"a call of {case.sizes}, gate_up_layout 'interleaved', without gradients")
            p, tokens = case.problem, case.tokens(world.rank)
            workspace.share_tokens(p.x[tokens], p.topk_ids[tokens], p.topk_weights[tokens])
            while True:
                world.check()
                time.sleep(0.01)
        world_cases.forward(world, case)
    except WaitError as error:
        assert time.monotonic() - start < 30
        return error.rank, tuple(error.record), str(error)
    return None


def test_a_rank_that_stalls_ends_in_an_error_on_all():
    with pytest.raises(ProcessesError) as error:
        run_processes(stalls_and_raises, 3, timeout_seconds=4.0)
    assert set(error.value.errors) == {0, 1, 2}
    for text in error.value.errors.values():
        assert "WaitError" in text
        assert "rank 2 should have written epoch 2 or later, seen 1" in text


def stalls_and_raises(world):
    found = stalls(world)
    raise RuntimeError(f"WaitError: {found}")


def test_gradients_of_inputs_that_some_ranks_do_not_want():
    """Every rank sends in backward, whatever its own inputs require."""
    worlds = World.emulated(2, device="cpu")
    case = Case([6, 9], 2, 4, 16, 8)
    wanted = case.expected()

    def run(world):
        leaves = case.leaves(world.rank, requires_grad=False)
        leaf = leaves[2 * world.rank].requires_grad_()  # x on rank 0, gate on rank 1
        (gradient,) = torch.autograd.grad(case.run(world, leaves), leaf, case.d_out()[case.tokens(world.rank)])
        part = wanted[1][0][case.tokens(0)] if world.rank == 0 else wanted[1][2][case.experts(1)]
        torch.testing.assert_close(gradient.double(), part, rtol=1e-4, atol=1e-5)

    on_every_rank(worlds, run)


def in_every_mode(world, made_in):
    """A workspace made under `made_in` serves calls under inference, on its tensors too, and with gradients."""
    case = Case([6, 9], 2, 5, 16, 8)
    wanted = case.expected()
    with made_in():
        MoEWorkspace(world, case.sizes)
    for _ in range(2):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                leaves = case.leaves(world.rank, requires_grad=False)
                out = case.run(world, leaves)
            assert leaves[0].is_inference() == out.is_inference() == (mode is torch.inference_mode)
            world_cases.check_forward(case, world.rank, out, wanted)
        out, gradients = world_cases.forward_and_backward(world, case)
        world_cases.check_forward(case, world.rank, out, wanted)
        world_cases.check_gradients(case, world.rank, gradients, wanted)
    return len(world.workspaces)


@pytest.mark.parametrize("made_in", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("worlds_made_in", [torch.enable_grad, torch.inference_mode])
def test_calls_in_every_mode_whatever_the_workspace_was_made_in(made_in, worlds_made_in):
    with worlds_made_in():
        worlds = World.emulated(2, device="cpu")
    assert on_every_rank(worlds, in_every_mode, made_in) == [1, 1]


@pytest.mark.slow
def test_processes_in_every_mode():
    assert run_processes(in_every_mode, 2, torch.inference_mode) == [1, 1]


def test_module():
    worlds = World.emulated(2, device="cpu")
    case = Case([6, 9], 2, 5, 16, 8)
    wanted = case.expected()

    def run(world):
        p, tokens = case.problem, case.tokens(world.rank)
        layer = tilecrew.ExpertParallelMoE(5, 16, 8, world=world, capacity=9)
        layer.prepare(2)
        layer.load_experts(p.gate, p.up, p.down)
        out = layer(p.x[tokens], p.topk_ids[tokens], p.topk_weights[tokens])
        world_cases.check_forward(case, world.rank, out, wanted)
        out.sum().backward()
        assert all(parameter.grad.any() for parameter in layer.parameters())
        assert len(world.workspaces) == 1
        return tuple(layer.w_gate_up.shape)

    assert on_every_rank(worlds, run) == [(3, 16, 16), (2, 16, 16)]


SIZES = MoESizes(8, 2, 4, 16, 8, torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"capacity": True}, TypeError, "capacity must be an int, got bool"),
        ({"top_k": 5}, ValueError, "top_k must be at most num_experts = 4, got 5"),
        ({"hidden_size": 12}, ValueError, "hidden_size must be a positive multiple of 8, got 12"),
        ({"intermediate_size": 12}, ValueError, "intermediate_size must be a positive multiple of 8, got 12"),
        ({"dtype": torch.int32}, TypeError, "x must be .* where ranks address each other's memory, got int32"),
        ({"capacity": 2**30}, ValueError, "capacity must be such that the rows of a rank"),
    ],
)
def test_sizes_that_do_not_fit(change, error, message):
    (world,) = World.emulated(1, device="cpu")
    with pytest.raises(error, match=message):
        MoEWorkspace(world, SIZES._replace(**change))


def test_calls_that_do_not_fit():
    (world,) = World.emulated(1, device="cpu")
    case = Case([5], 2, 4, 16, 8)
    leaves = case.leaves(0)
    for change, message in (
        ({"capacity": None}, "capacity must be the most tokens of a rank"),
        ({"capacity": 4}, "x of rank 0 has 5 tokens, more than its capacity of 4"),
        ({"num_experts": 5}, "w_gate_up of rank 0 must have 5 of E = 5 experts"),
    ):
        p = case.problem
        options = {"world": world, "capacity": 5, "num_experts": 4, **change}
        with pytest.raises(ValueError, match=message):
            tilecrew.moe_forward(p.x, p.topk_ids, p.topk_weights, p.w_gate_up, p.down, **options)
    with pytest.raises(ValueError, match="dispatch must be None on the CPU"):
        MoEWorkspace(world, SIZES, dispatch="blocks")
    with pytest.raises(ValueError, match="num_comm_blocks must be None on the CPU"):
        MoEWorkspace(world, SIZES, num_comm_blocks=2)
    with pytest.raises(TypeError, match="world must be"):
        MoEWorkspace(None, SIZES)
    p = case.problem
    with pytest.raises(ValueError, match="num_experts must be None without"):
        tilecrew.moe_forward(p.x, p.topk_ids, p.topk_weights, p.w_gate_up, p.down, num_experts=5)
    world_cases.check_forward(case, 0, case.run(world, leaves).detach(), case.expected())
    world.close()
    with pytest.raises(RuntimeError, match="closed"):
        case.run(world, leaves)


def test_output_of_shared_experts_is_added():
    worlds = World.emulated(2, device="cpu")
    case = Case([6, 9], 2, 5, 16, 8)
    wanted = case.expected()[0]

    def run(world):
        p, tokens = case.problem, case.tokens(world.rank)
        own = case.experts(world.rank)
        more = torch.randn(p.x[tokens].shape).t().contiguous().t().requires_grad_()
        options = {"world": world, "capacity": 9, "num_experts": 5, "shared": more}
        inputs = (p.x[tokens], p.topk_ids[tokens], p.topk_weights[tokens], p.w_gate_up[own], p.down[own])
        out = tilecrew.moe_forward(*inputs, **options)
        world_cases.assert_rows_close(out.detach(), wanted[tokens] + more.detach().double(), world_cases.bound_of(case))
        d_out = torch.randn_like(out)
        assert torch.equal(torch.autograd.grad(out, more, d_out)[0], d_out)

    on_every_rank(worlds, run)


def test_steps_of_a_call_are_the_call():
    """What GPU tests do step by step."""
    case = Case([17, 33], 2, 5, 64, 32)
    worlds = World.emulated(2, device="cpu")
    inputs = on_every_rank(worlds, gpu_ranks.prepare, case)
    wanted = on_every_rank(worlds, gpu_ranks.forward, inputs)
    for step in gpu_ranks.steps(worlds, case, inputs).values():
        found = on_every_rank(worlds, step)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
