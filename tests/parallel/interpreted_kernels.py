"""The kernels of tilecrew.parallel under Triton's interpreter: run by test_device.py.

The interpreter runs one block after the other on the host and knows no PTX: flags are loaded and stored plainly, and
what is not there when a wait begins counts as a wait that timed out. Indices, counters, the order of sums, and who
writes which flag are what is tested.
"""

import pytest
import torch
import triton
import triton.language as tl

from tests import interpreter
from tests.parallel.cases import content, input_of
from tilecrew.parallel import ParallelTensor, Signals, WaitError, World, kernel_exchange, kernel_signal
from tilecrew.parallel.control import EPOCH, as_int32

interpreter.allow_loop_bounds()
PIECE = {"ROWS": 8, "COLUMNS": 32}
SIZES = [1, 3]
SECOND = 10**9


@triton.jit
def load_flag(pointer, SCOPE: tl.constexpr):
    return tl.load(pointer)


@triton.jit
def store_flag(pointer, value, SCOPE: tl.constexpr):
    tl.store(pointer, value)


@triton.jit
def add_flag(pointer, value, SCOPE: tl.constexpr):
    tl.atomic_add(pointer, value)


@triton.jit
def no_fence():
    pass


@triton.jit
def no_scoped_fence(SCOPE: tl.constexpr):
    pass


@triton.jit
def look_once(pointer, target, abort, timeout, SCOPE: tl.constexpr):
    seen = tl.load(pointer)
    status = tl.where(seen - target >= 0, 0, 1)
    return tl.where(tl.load(abort) != 0, 2, status), seen


@pytest.fixture(autouse=True)
def plain_flags(monkeypatch):
    monkeypatch.setattr(kernel_exchange, "load_acquire", load_flag)
    monkeypatch.setattr(kernel_exchange, "add_release", add_flag)
    monkeypatch.setattr(kernel_exchange, "fence_proxy_async", no_fence)
    monkeypatch.setattr(kernel_signal, "store_release", store_flag)
    monkeypatch.setattr(kernel_signal, "fence", no_scoped_fence)
    monkeypatch.setattr(kernel_signal, "wait_until_reached", look_once)


def pull(world, shards, gathered, counters, num_programs):
    num_rows, num_columns = shards.shape
    kernel_exchange.pull_kernel[(num_programs,)](
        shards.local,
        shards.offsets,
        gathered,
        counters,
        world.control.local,
        world.rank,
        world.size,
        num_rows,
        num_columns,
        **PIECE,
    )


@pytest.mark.parametrize("num_programs", [1, 3])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(7, 40), (130, 8)])
@pytest.mark.parametrize("size", SIZES)
def test_pull(size, num_rows, num_columns, num_programs):
    worlds = World.emulated(size, device="cpu")
    shards = [ParallelTensor((num_rows, num_columns), torch.float32, world) for world in worlds]
    for rank, shard in enumerate(shards):
        shard.local.copy_(content(rank, shard.shape))
    total = size * num_rows
    wanted = torch.cat([shard.local for shard in shards])
    rows = torch.bincount(torch.arange(total) // 128)
    for world, shard in zip(worlds, shards, strict=True):
        gathered = torch.full((total + 1, num_columns), float("nan"))
        counters = torch.zeros(len(rows) + 1, dtype=torch.int32)
        pull(world, shard, gathered, counters, num_programs)
        assert torch.equal(gathered[:-1], wanted)
        assert gathered[-1].isnan().all()
        assert counters.tolist() == [*rows.tolist(), 0]


def test_pull_after_a_failed_wait_brings_nan_and_counts():
    (world,) = World.emulated(1, device="cpu")
    shard = ParallelTensor((130, 8), torch.float32, world)
    world.control.local[0] = 1
    gathered, counters = torch.zeros(130, 8), torch.zeros(2, dtype=torch.int32)
    pull(world, shard, gathered, counters, 2)
    assert gathered.isnan().all()
    assert counters.tolist() == [128, 2]


def reduce(world, partials, epoch, signals, out, num_programs=3, tickets=None):
    kernel_exchange.reduce_kernel[(num_programs,)](
        (partials.local, partials.offsets, out),
        (
            torch.zeros(1, dtype=torch.int32) if tickets is None else tickets,
            torch.tensor([epoch], dtype=torch.int32),
            signals.cells.local,
            world.control.local,
            world.control.offsets,
        ),
        world.rank,
        world.size,
        *out.shape,
        SECOND,
        **PIECE,
    )


def problem(size, num_rows, num_columns, first_epoch):
    worlds = World.emulated(size, device="cpu")
    shape = (size * num_rows, num_columns)
    num_blocks = -(-shape[0] // 128)
    partials = [ParallelTensor(shape, torch.float16, world) for world in worlds]
    for rank, partial in enumerate(partials):
        partial.local.copy_(input_of(rank, 0, shape, torch.float16) * 100)
    signals = [Signals(world, num_blocks, first_epoch=first_epoch) for world in worlds]
    return worlds, partials, signals


@pytest.mark.parametrize("first_epoch", [0, 2**32 - 1])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(7, 40), (130, 8)])
@pytest.mark.parametrize("size", SIZES)
def test_notify_and_reduce(size, num_rows, num_columns, first_epoch):
    worlds, partials, signals = problem(size, num_rows, num_columns, first_epoch)
    epoch = torch.tensor([as_int32(first_epoch + 1)], dtype=torch.int32)
    for world, signal in zip(worlds, signals, strict=True):
        cells = signal.cells
        kernel_signal.notify_kernel[(1,)](
            epoch, cells.local, cells.offsets, world.rank, size, signal.num_slots, num_warps=1
        )
    for signal in signals:
        assert (signal.cells.local == epoch).all()
    for rank, world in enumerate(worlds):
        out = torch.full((num_rows, num_columns), float("nan"), dtype=torch.float16)
        reduce(world, partials[rank], int(epoch), signals[rank], out)
        total = torch.zeros(num_rows, num_columns)
        for partial in partials:
            total += partial.local[rank * num_rows : (rank + 1) * num_rows].float()
        assert torch.equal(out, total.half())
        world.check()


def test_launches_share_their_pieces():
    """What tickets say has been taken is left alone; whoever comes last finds nothing left."""
    worlds, partials, signals = problem(2, 130, 8, 0)
    for signal in signals:
        signal.cells.local.fill_(1)
    out = torch.full((130, 8), float("nan"), dtype=torch.float16)
    tickets = torch.ones(1, dtype=torch.int32)
    reduce(worlds[0], partials[0], 1, signals[0], out, num_programs=2, tickets=tickets)
    assert out[: PIECE["ROWS"]].isnan().all()
    assert not out[PIECE["ROWS"] :].isnan().any()
    tickets.zero_()
    reduce(worlds[0], partials[0], 1, signals[0], out, num_programs=2, tickets=tickets)
    wanted = (partials[0].local[:130].float() + partials[1].local[:130].float()).half()
    assert torch.equal(out, wanted)
    out.fill_(float("nan"))
    reduce(worlds[0], partials[0], 1, signals[0], out, num_programs=3, tickets=tickets)
    assert out.isnan().all()


def test_reduce_without_a_signal_brings_nan_and_tells_all():
    """Rows of the block whose signal is missing, and what the same blocks do later; every rank learns why."""
    worlds, partials, signals = problem(2, 130, 8, 0)
    for signal in signals:
        signal.cells.local.fill_(1)
    signals[1].cells.local[2, 0] = 0  # rank 0 has not told rank 1 of rows 256 to 259
    out = torch.zeros(130, 8, dtype=torch.float16)
    reduce(worlds[1], partials[1], 1, signals[1], out, num_programs=1)
    assert not out[:120].isnan().any()
    assert out[126:].isnan().all()
    for world in worlds:
        message = "rank 1 waited too long for slot 2: rank 0 should have written epoch 1 or later, seen 0"
        with pytest.raises(WaitError, match=message):
            world.check()


@pytest.mark.parametrize("first_epoch", [0, 2**32 - 1])
def test_barrier_writes_its_slot_everywhere(first_epoch):
    """One rank after the other: all but the last find somebody missing, which is what they tell."""
    worlds = World.emulated(3, device="cpu", first_epoch=first_epoch)
    for world in worlds[:2]:
        world.control.local[0] = 1  # nobody waits
    arguments = [(w.control.local, w.control.offsets, w.rank, w.size, SECOND) for w in worlds]
    for argument in arguments:
        kernel_signal.barrier_kernel[(1,)](*argument, num_warps=1)
    for world in worlds:
        slots = world.control.local[64 + 3 * 32 :: 32]
        assert slots.tolist() == [as_int32(first_epoch + 1)] * 3
        assert world.control.local[EPOCH] == as_int32(first_epoch + 1)
        world.check()


def test_put_and_wait():
    worlds = World.emulated(3, device="cpu")
    signals = [Signals(world, 4) for world in worlds]
    cells = signals[1].cells
    kernel_signal.put_kernel[(1,)](cells.local, cells.offsets, 3, 2, 1, 3, 9, num_warps=1)
    wanted = torch.zeros(4, 3, dtype=torch.int32)
    wanted[3, 1] = 9
    assert torch.equal(signals[2].cells.local, wanted)
    assert not signals[0].cells.local.any()
    assert not cells.local.any()
    control = worlds[2].control
    tail = (control.local, control.offsets, 2, 3, SECOND)
    kernel_signal.wait_kernel[(1,)](signals[2].cells.local, 3, 1, 9, *tail, num_warps=1)
    worlds[0].check()
    kernel_signal.wait_kernel[(1,)](signals[2].cells.local, 3, 1, 10, *tail, num_warps=1)
    for world in worlds:
        with pytest.raises(WaitError, match=r"rank 2 waited too long for slot 3: rank 1 .* epoch 10 or later, seen 9"):
            world.check()
