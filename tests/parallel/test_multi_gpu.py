"""Ranks as processes with a GPU each, on torch's symmetric memory: contents, signals, both fused operators, failure."""

import random

import pytest
import torch

from tests.delays import delay
from tests.parallel import cases
from tilecrew.parallel import (
    AllGatherGemm,
    GemmReduceScatter,
    ParallelTensor,
    ProcessesError,
    WaitError,
    preflight,
    run_processes,
)

pytestmark = [pytest.mark.multi_gpu, pytest.mark.xdist_group("several GPUs")]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_multicast(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def exchange(world):
    """Barriers order what peers read, through views and through the address table, over the wrap of epochs."""
    shape, generator = (33, 65), random.Random(world.rank)
    tensor = ParallelTensor(shape, torch.int32, world)
    assert tensor.local.device == tensor.peer(world.size - 1).device == world.device
    for turn in range(12):
        delay(generator)
        tensor.local.copy_(cases.content(world.rank, shape, world.device) + turn)
        world.barrier()
        for peer in range(world.size):
            wanted = cases.content(peer, shape, world.device) + turn
            assert torch.equal(tensor.peer(peer), wanted), (world.rank, peer, turn)
        world.barrier()
    world.synchronize()
    view = tensor.peer((world.rank + 1) % world.size)[1:]
    tensor.destroy()
    del tensor
    world.barrier()
    world.synchronize()
    assert torch.equal(view, cases.content((world.rank + 1) % world.size, shape, world.device)[1:] + 11)
    return preflight.exchange(world)


def layer(world, num_rows, num_inner, num_columns):
    """Both operators against float64, with ranks delayed; the largest ratios of errors, and whether runs agree."""
    up = cases.weights_of(world.rank, num_inner, num_columns, BF16).to(world.device)
    downs = [cases.weights_of(50 + r, num_columns, num_inner, BF16).to(world.device) for r in range(world.size)]
    gathers = AllGatherGemm(world, up, num_rows)
    reduces = GemmReduceScatter(world, downs[world.rank], num_rows)
    assert reduces.is_fused
    own = slice(world.rank * num_rows, (world.rank + 1) * num_rows)
    ratios, first, generator = [0.0, 0.0], None, random.Random(world.rank)
    for turn in range(6):
        x = torch.cat([cases.input_of(r, turn % 3, (num_rows, num_inner), BF16) for r in range(world.size)])
        x = x.to(world.device)
        hidden = [
            cases.input_of(90 + r, turn % 3, (world.size * num_rows, num_columns), BF16).to(world.device)
            for r in range(world.size)
        ]
        delay(generator)
        out = gathers(x[own])
        delay(generator)
        summed = reduces(hidden[world.rank])
        world.synchronize()
        wanted = x.double() @ up.double()
        ratios[0] = max(ratios[0], cases.relative_error(out, wanted) / cases.relative_error(x @ up, wanted))
        pairs = list(zip(hidden, downs, strict=True))
        wanted = sum(a.double() @ b.double() for a, b in pairs)[own]
        same = sum((a @ b).float() for a, b in pairs)[own].to(BF16)
        ratios[1] = max(ratios[1], cases.relative_error(summed, wanted) / cases.relative_error(same, wanted))
        if turn == 0:
            first = (out, summed)
    assert first is not None
    x = torch.cat([cases.input_of(r, 0, (num_rows, num_inner), BF16) for r in range(world.size)]).to(world.device)
    again = gathers(x[own])
    world.synchronize()
    same_bits = torch.equal(first[0], again)
    gathers.destroy()
    reduces.destroy()
    return ratios, same_bits


def one_stays_away(world):
    """The last rank does not come to the barrier; it gets to know, too."""
    try:
        if world.rank < world.size - 1:
            world.barrier()
            world.synchronize()
        else:
            while True:
                world.check()
                cases.pause(0)
    except WaitError as error:
        return error.rank, tuple(error.record)
    return None


def test_exchange():
    for found in run_processes(exchange, 2, device="cuda", first_epoch=2**32 - 5):
        assert found == [1000, 2000] * 2


@pytest.mark.parametrize("sizes", [(130, 264, 520), (1024, 2048, 1536)])
def test_layer(sizes):
    for ratios, same_bits in run_processes(layer, 2, *sizes, device="cuda"):
        assert max(ratios) <= 2
        assert same_bits


def test_who_waits_in_vain_is_known_to_all():
    found = run_processes(one_stays_away, 2, device="cuda", timeout_seconds=2, limit_seconds=120)
    assert found == [(0, (-1, 1, 1, 0))] * 2


def test_a_killed_rank_ends_the_others():
    with pytest.raises(ProcessesError) as error:
        run_processes(dies, 2, device="cuda", timeout_seconds=3, limit_seconds=120)
    assert "ended with code -9" in error.value.errors[1]
    assert "WaitError" in error.value.errors[0]


def dies(world):
    world.barrier()
    world.synchronize()
    if world.rank == 1:
        cases.os.kill(cases.os.getpid(), cases.signal.SIGKILL)
    world.barrier()
    world.synchronize()
