"""Small kernels, right and wrong, in the simulator: several programs and ranks, atomics, bounds, what is reported."""

import pytest
import torch

pytest.importorskip("triton")
from tilecrew.device.compat import gl, gluon, mbarrier
from tilecrew.device.launch import Launch
from tilecrew.simulator import FaultError, simulate


def launch(kernel, num_programs, *args):
    return Launch(kernel, num_programs, args, {"num_warps": 4})


@gluon.jit
def exchange_kernel(mine, other, my_flag, other_flag, out, value, num_warps: gl.constexpr):
    """Writes into the other rank's memory, signals, and waits for its signal."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, 128, layout)
    gl.store(other + index, index + value)
    gl.atomic_add(other_flag, 1, sem="release")
    seen = gl.atomic_add(my_flag, 0, sem="acquire")
    while seen == 0:
        seen = gl.atomic_add(my_flag, 0, sem="acquire")
    gl.store(out + index, gl.load(mine + index))


@pytest.mark.parametrize("seed", range(5))
def test_ranks_run_at_the_same_time(seed):
    buffers, flags, outputs = ([torch.zeros(128, dtype=torch.int32) for _ in range(2)] for _ in range(3))
    launches = [
        launch(exchange_kernel, 1, buffers[r], buffers[1 - r], flags[r], flags[1 - r], outputs[r], 1000 * (r + 2))
        for r in range(2)
    ]
    simulate(launches, seed)
    for rank, value in ((0, 3000), (1, 2000)):
        assert torch.equal(outputs[rank], torch.arange(128, dtype=torch.int32) + value)


@gluon.jit
def rendezvous_kernel(count, num_programs, num_warps: gl.constexpr):
    """Every program waits until all have come."""
    seen = gl.atomic_add(count, 1) + 1
    while seen < num_programs:
        seen = gl.atomic_add(count, 0)


def test_programs_run_at_the_same_time_where_they_are_resident():
    count = torch.zeros(1, dtype=torch.int32)
    simulate(launch(rendezvous_kernel, 3, count, 3), resident=3)
    assert int(count) == 3


@gluon.jit
def store_kernel(out, size, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, 128, layout)
    gl.store(out + index, index, mask=index < size)


def test_elements_never_written_are_counted():
    out = torch.full((128,), -1, dtype=torch.int32)
    run = simulate(launch(store_kernel, 1, out, 100))
    assert run.num_unwritten(out) == 28
    assert run.num_unwritten(out[:100]) == 0
    assert out.tolist() == [*range(100), *[-1] * 28]


def test_a_store_out_of_bounds_is_a_fault():
    with pytest.raises(FaultError, match=r"test_machine.py:\d+: a store out of bounds of out: elements 0 to 127"):
        simulate(launch(store_kernel, 1, torch.zeros(100, dtype=torch.int32), 128))


@gluon.jit
def read_kernel(out, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.store(out + gl.arange(0, 128, layout), tile.load(layout))


def test_reading_what_nobody_wrote_is_a_fault():
    with pytest.raises(FaultError, match=r"read_kernel reads shared memory that nobody wrote"):
        simulate(launch(read_kernel, 1, torch.zeros(128, dtype=torch.int32)))


@gluon.jit
def deadlock_kernel(out, num_warps: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=2)
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)


def test_a_deadlock_says_who_waits_for_what():
    with pytest.raises(FaultError, match=r"deadlock: program 0: deadlock_kernel waits for parity 0.*1 of 2 arrivals"):
        simulate(launch(deadlock_kernel, 1, torch.zeros(1, dtype=torch.int32)))


@gluon.jit
def overrun_kernel(out, num_warps: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=2)
    mbarrier.arrive(barrier, count=3)


def test_more_arrivals_than_a_phase_has_are_a_fault():
    with pytest.raises(FaultError, match=r"arrival 3 at a barrier of 2"):
        simulate(launch(overrun_kernel, 1, torch.zeros(1, dtype=torch.int32)))
