"""Ranks on the CPU write nowhere beside their parallel tensors; test_gpu.py has the same for kernels."""

import pytest
import torch
import torch.distributed as dist

from tests.moe import world_cases

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
from tests.moe import canaries
from tilecrew.parallel import ParallelTensor, World, on_every_rank, run_processes


def guarded_cases(world, names):
    """Forward and backward of these cases, and the signatures of what was guarded."""
    with pytest.MonkeyPatch.context() as patch, canaries.around_parallel_tensors(patch) as found:
        for name in names:
            world_cases.check(world, world_cases.cases(world.size)[name])
        world.barrier()
        canaries.check(found)
        return [canary.signature for canary in found]


@pytest.mark.slow
def test_processes_write_into_their_buffers_only():
    first, second = run_processes(guarded_cases, 2, world_cases.FEW_NAMES)
    assert first == second
    assert len(first) >= 6 * len(world_cases.FEW_NAMES)  # tokens, ids, weights, row values, results, slots


@pytest.mark.parametrize("size", [1, 3])
def test_threads_write_into_their_buffers_only(size, monkeypatch):
    with canaries.around_parallel_tensors(monkeypatch) as found:
        worlds = World.emulated(size, device="cpu")
        case = world_cases.cases(size)["some missing"]
        on_every_rank(worlds, world_cases.check, case)
    canaries.check(found)
    assert {canary.rank for canary in found} == set(range(size))


@pytest.mark.parametrize(("place", "name"), [(-1, "in front of"), (15, "behind")])
@pytest.mark.parametrize("writer", [0, 1])
def test_a_write_beside_a_buffer_is_found(place, name, writer, monkeypatch):
    """By its own rank or another one, one element off."""
    with canaries.around_parallel_tensors(monkeypatch) as found:
        worlds = World.emulated(2, device="cpu")
        tensors = [ParallelTensor((3, 5), torch.int32, world) for world in worlds]
        tensors[1].local.fill_(-1)
        canaries.check(found)
        there = tensors[writer].peer(1)
        there.as_strided((1,), (1,), there.storage_offset() + place).fill_(7)
        with pytest.raises(AssertionError, match=rf"4 bytes {name} a tensor of shape \(3, 5\).* of rank 1 were"):
            canaries.check(found)
