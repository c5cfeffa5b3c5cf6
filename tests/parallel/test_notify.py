"""The epilogue that tells owners, in the simulator: whom it tells of which row block, and that it tells all."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from tests.grouped_gemm.problems import assert_close, expected, make
from tests.grouped_gemm.test_simulator import WIDE, sizes_of
from tilecrew.device.compat import gl, gluon
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.parallel import kernel_notify
from tilecrew.parallel.gemm_reduce_scatter import NotifyOwners
from tilecrew.simulator import run

EPOCH = 7


@gluon.jit
def store_flag(pointer, value, SCOPE: gl.constexpr):
    gl.store(pointer, value)


@gluon.jit
def no_fence(SCOPE: gl.constexpr):
    pass


@gluon.jit
def part_of_one_vector(pointer, offsets, rank):
    return pointer + (gl.load(offsets + rank) // 4).to(gl.int32)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_rows"), [(1, 130), (2, 100), (3, 128), (4, 50)])
def test_owners_are_told_of_their_row_blocks(size, num_rows, monkeypatch):
    """The simulator knows no release stores and one address space for each tensor: flags are stored plainly, and the
    slots of all ranks are one vector."""
    monkeypatch.setattr(kernel_notify, "store_release", store_flag)
    monkeypatch.setattr(kernel_notify, "fence", no_fence)
    monkeypatch.setattr(kernel_notify, "peer_pointer", part_of_one_vector)
    total, rank = size * num_rows, size - 1
    num_blocks = -(-total // 128)
    slots = torch.zeros(size, num_blocks, size, dtype=torch.int32)
    offsets = torch.arange(size) * num_blocks * size * 4
    signals = SimpleNamespace(
        world=SimpleNamespace(rank=rank, size=size), cells=SimpleNamespace(local=slots, offsets=offsets)
    )
    arrivals = torch.zeros(num_blocks, dtype=torch.int32)
    epilogue = NotifyOwners(arrivals, torch.full((1,), EPOCH, dtype=torch.int32), signals, num_rows)
    x, w, offs = make([total], 0, 72, 272)
    out = torch.full((total, 272), float("nan"), dtype=x.dtype)
    hooks = kernel_grouped_gemm.hooks_of(None, epilogue)
    launch = kernel_grouped_gemm.launch(x, w, offs, out, sizes_of(WIDE, 1), 2, hooks)
    program = run.compile_program(launch)
    wanted = torch.zeros_like(slots)
    for row in range(total):
        wanted[row // num_rows, row // 128, rank] = EPOCH
    for seed in range(2):
        slots.zero_()
        out.fill_(float("nan"))
        run.simulate(launch, seed, [program])
        assert_close(out, expected(x, w, offs), offs)
        assert torch.equal(slots, wanted)
        assert not arrivals.any()
