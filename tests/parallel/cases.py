"""What ranks do in tests: functions of a World, for new processes and for emulated ranks alike."""

import os
import random
import signal
import time

import torch

from tilecrew.parallel import AllGatherGemm, GemmReduceScatter, ParallelTensor, Signals, WaitError


def pause(seed: int, longest_seconds: float = 0.02) -> None:
    time.sleep(random.Random(seed).uniform(0, longest_seconds))


def content(rank: int, shape: tuple[int, ...], device="cpu") -> torch.Tensor:
    """Every element tells its rank and place."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=device)
    return numbers.view(shape) * 64 + rank


def read_all_peers(world, num_rounds=3):
    """Everybody writes, everybody reads everybody, with delays; barriers in between."""
    shape = (5, 7)
    tensor = ParallelTensor(shape, torch.int32, world)
    for turn in range(num_rounds):
        pause(100 * turn + world.rank)
        tensor.local.copy_(content(world.rank, shape) + turn)
        world.barrier()
        for peer in range(world.size):
            assert torch.equal(tensor.peer(peer), content(peer, shape) + turn), (world.rank, peer, turn)
        world.barrier()
    tensor.destroy()
    return world.rank


def write_all_peers(world):
    """Everybody writes a row of everybody, through `peer`, and says so with a signal whose epochs pass 2^32."""
    first = 2**32 - 3
    tensor = ParallelTensor((world.size, 9), torch.int32, world)
    signals = Signals(world, 2, first_epoch=first)
    for turn in range(1, 7):
        pause(10 * turn + world.rank)
        for peer in range(world.size):
            tensor.peer(peer)[world.rank] = content(world.rank, (9,)) + turn
            signals.put(1, peer, first + turn)
        for writer in range(world.size):
            signals.wait(1, writer, first + turn)
            assert torch.equal(tensor.local[writer], content(writer, (9,)) + turn), (world.rank, writer, turn)
        world.barrier()  # everybody has read
    world.synchronize()
    signals.destroy()
    return int(world.control.local[32])


def dies(world, rank):
    """One rank is killed; the others wait for it."""
    world.barrier()
    if world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        world.barrier()
    except WaitError:
        assert time.monotonic() - start < world.timeout_seconds + 5
        raise


def stays_away(world, rank):
    """One rank does not come to a barrier; all get to know."""
    try:
        if world.rank == rank:
            while True:
                world.check()
                time.sleep(0.01)
        world.barrier()
    except WaitError as error:
        return error.rank, tuple(error.record)
    return None


def waits_for_signal(world):
    """Nobody writes slot 1; rank 0 waits for it, all others for a barrier that rank 0 does not reach."""
    signals = Signals(world, 2)
    try:
        if world.rank == 0:
            signals.wait(1, world.size - 1, 5)
        else:
            while True:
                world.check()
                time.sleep(0.01)
    except WaitError as error:
        return error.rank, tuple(error.record)
    return None


def disagrees(world, what):
    if what == "shape":
        ParallelTensor((3 + (world.rank == 1),), torch.int32, world)
    elif what == "dtype":
        ParallelTensor((3,), torch.int32 if world.rank == 1 else torch.float32, world)
    elif what == "slots":
        Signals(world, 1 + world.rank)
    elif what == "inner size":
        AllGatherGemm(world, torch.zeros(8 * (1 + world.rank), 8), 4)
    elif what == "rows":
        GemmReduceScatter(world, torch.zeros(8, 8), 4 + world.rank)


def keeps_views(world):
    """A view outlives the tensor that it was taken of."""
    tensor = ParallelTensor((4,), torch.float32, world)
    tensor.local.fill_(world.rank + 1)
    world.barrier()
    view = tensor.peer((world.rank + 1) % world.size)[1:]
    tensor.destroy()
    del tensor
    ParallelTensor((2**16,), torch.float32, world).local.fill_(-1)
    assert view.tolist() == [(world.rank + 1) % world.size + 1] * 3
    return view.sum().item()


def uses_after_teardown(world):
    tensor = ParallelTensor((4,), torch.float32, world)
    other = ParallelTensor((4,), torch.float32, world)
    tensor.destroy()
    tensor.destroy()  # nothing more
    messages = []
    for use in (lambda: tensor.local, lambda: tensor.peer(0), lambda: tensor.offsets):
        try:
            use()
        except RuntimeError as error:
            messages.append(str(error))
    world.close()
    for use in (lambda: other.local, world.barrier, world.check, lambda: ParallelTensor((1,), torch.int32, world)):
        try:
            use()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def weights_of(rank, num_inner, num_columns, dtype):
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(num_inner, num_columns, generator=generator, dtype=torch.float64) / num_inner**0.5).to(dtype)


def input_of(rank, turn, shape, dtype):
    generator = torch.Generator().manual_seed(17 * turn + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def relative_error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def gathers(world, num_rows, dtype, num_rounds=3):
    """AllGatherGemm against float64, beside the same products in torch; the largest ratio of errors."""
    w = weights_of(world.rank, 24, 40, dtype)
    operator, worst = AllGatherGemm(world, w, num_rows), 0.0
    for turn in range(num_rounds):
        inputs = [input_of(rank, turn, (num_rows, 24), dtype) for rank in range(world.size)]
        pause(7 * turn + world.rank)
        out = operator(inputs[world.rank])
        x = torch.cat(inputs)
        wanted = x.double() @ w.double()
        worst = max(worst, relative_error(out, wanted) / max(relative_error(x @ w, wanted), 1e-16))
        assert relative_error(out, wanted) < 0.02
    operator.destroy()
    return worst


def reduces(world, num_rows, dtype, num_rounds=3):
    """GemmReduceScatter against float64, and against the sum in the order of ranks, bit by bit."""
    w = weights_of(world.rank, 16, 40, dtype)
    operator = GemmReduceScatter(world, w, num_rows)
    own = slice(world.rank * num_rows, (world.rank + 1) * num_rows)
    for turn in range(num_rounds):
        shape = (world.size * num_rows, 16)
        pairs = [(input_of(r, turn, shape, dtype), weights_of(r, 16, 40, dtype)) for r in range(world.size)]
        pause(5 * turn + world.rank)
        out = operator(pairs[world.rank][0])
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros(num_rows, 40, dtype=wide)
        for x, weights in pairs:
            total += (x @ weights)[own]
        assert torch.equal(out, total.to(dtype))
        assert relative_error(out, sum(x.double() @ weights.double() for x, weights in pairs)[own]) < 0.02
    operator.destroy()
    return float(out.double().sum())
