"""The epilogue that tells owners, in the simulator: whom it tells of which row block, and that it tells all."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from tests.grouped_gemm.problems import assert_close, expected, make
from tests.grouped_gemm.test_simulator import WIDE, sizes_of
from tilecrew.device.compat import gl, gluon
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.parallel import fusion, kernel_notify
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
    total, rank = size * num_rows, max(size - 2, 0)
    num_blocks = -(-total // 128)
    slots = torch.zeros(size, num_blocks, size, dtype=torch.int32)
    offsets = torch.arange(size) * num_blocks * size * 4
    signals = SimpleNamespace(
        world=SimpleNamespace(rank=rank, size=size), cells=SimpleNamespace(local=slots, offsets=offsets)
    )
    arrivals, epoch = torch.zeros(num_blocks, dtype=torch.int32), torch.full((1,), EPOCH, dtype=torch.int32)
    x, w, offs = make([total], 0, 72, 272)
    out = torch.full((total, 272), float("nan"), dtype=x.dtype)
    launches = []
    for part in fusion.segments((rank + 1) % size, size, num_rows, x.device):
        epilogue = NotifyOwners(arrivals, epoch, signals, num_rows, part.first_block)
        hooks = kernel_grouped_gemm.hooks_of(None, epilogue)
        matrices = (x[part.rows], w, part.offs, out[part.rows])
        launches.append(kernel_grouped_gemm.launch(*matrices, sizes_of(WIDE, 1), 2, hooks))
    assert len(launches) == (2 if num_rows == 128 else 1)
    programs = [run.compile_program(launch) for launch in launches]
    wanted = torch.zeros_like(slots)
    for row in range(total):
        wanted[row // num_rows, row // 128, rank] = EPOCH
    for seed in range(2):
        slots.zero_()
        out.fill_(float("nan"))
        for launch, program in zip(launches, programs, strict=True):
            run.simulate(launch, seed, [program])
        assert_close(out, expected(x, w, offs), offs)
        assert torch.equal(slots, wanted)
        assert not arrivals.any()


@pytest.mark.parametrize(
    ("first_rank", "size", "num_rows"), [(0, 3, 128), (2, 3, 128), (1, 2, 64), (1, 2, 256), (2, 4, 64)]
)
def test_segments(first_rank, size, num_rows):
    """All rows once, those of first_rank first where row blocks are whole."""
    parts = fusion.segments(first_rank, size, num_rows, torch.device("cpu"))
    rows = [row for part in parts for row in range(part.rows.start, part.rows.stop)]
    assert sorted(rows) == list(range(size * num_rows))
    assert all(part.offs.tolist() == [part.num_rows] and part.first_row == 128 * part.first_block for part in parts)
    is_whole = first_rank * num_rows % 128 == 0
    assert rows[0] == (first_rank * num_rows if is_whole else 0)
    assert len(parts) == (2 if is_whole and first_rank > 0 else 1)
