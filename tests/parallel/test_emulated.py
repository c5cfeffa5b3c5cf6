"""Ranks of one process on the CPU, as threads: the same protocol without starting processes; epochs; bad arguments."""

import os

import pytest
import torch

from tests.parallel import cases
from tilecrew.parallel import (
    AllGatherGemm,
    GemmReduceScatter,
    ParallelTensor,
    Signals,
    WaitError,
    World,
    control,
    on_every_rank,
)
from tilecrew.parallel.control import as_int32, is_reached
from tilecrew.parallel.world import CONNECTIONS, _check_connections, _check_devices, check_num_comm_blocks

BF16, FP64 = torch.bfloat16, torch.float64
SIZES = [1, 2, 3, 4, 8]


def run(size, function, *arguments, **options):
    options = {"timeout_seconds": 20, **options}
    return on_every_rank(World.emulated(size, device="cpu", **options), function, *arguments)


@pytest.fixture
def world():
    (world,) = World.emulated(1, device="cpu")
    return world


@pytest.mark.parametrize(
    ("seen", "expected", "reached"),
    [
        (0, 0, True),
        (1, 0, True),
        (0, 1, False),
        (-1, 0, False),
        (0, -1, True),
        (2**31 - 1, -(2**31), False),
        (-(2**31), 2**31 - 1, True),
        (3, -5, True),
        (-5, 3, False),
    ],
)
def test_epochs_compare_across_the_wrap(seen, expected, reached):
    assert is_reached(seen, expected) is reached


@pytest.mark.parametrize(("epoch", "held"), [(0, 0), (2**31 - 1, 2**31 - 1), (2**31, -(2**31)), (2**32, 0), (-1, -1)])
def test_epochs_as_int32(epoch, held):
    assert as_int32(epoch) == held


@pytest.mark.parametrize("first_epoch", [0, 2**31 - 3, 2**32 - 3])
@pytest.mark.parametrize("size", SIZES)
def test_barriers_order_what_peers_read(size, first_epoch):
    assert run(size, cases.read_all_peers, 8, first_epoch=first_epoch) == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_signals_order_what_peers_write(size):
    assert run(size, cases.write_all_peers) == [6] * size


def test_without_the_barrier_a_peer_reads_too_early():
    """What the tests above would see if barriers did nothing."""

    def read_without(world):
        world.barrier = lambda: None
        return cases.read_all_peers(world, 30)

    with pytest.raises(AssertionError):
        run(4, read_without)


@pytest.mark.parametrize("dtype", [FP64, BF16])
@pytest.mark.parametrize("num_rows", [1, 5, 128, 130])
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_gemm(size, num_rows, dtype):
    # The product of a few rows may be summed in another order than that of all.
    assert max(run(size, cases.gathers, num_rows, dtype)) <= 3


@pytest.mark.parametrize("dtype", [FP64, torch.float32, BF16])
@pytest.mark.parametrize("num_rows", [1, 5, 128, 130])
@pytest.mark.parametrize("size", SIZES)
def test_gemm_reduce_scatter(size, num_rows, dtype):
    run(size, cases.reduces, num_rows, dtype)


def test_the_timeout_is_fixed():
    """Launches that are remembered would go on with the one before."""
    (world,) = World.emulated(1, device="cpu", timeout_seconds=7)
    with pytest.raises(AttributeError, match="timeout_seconds"):
        world.timeout_seconds = 8
    assert world.timeout_seconds == 7


def in_every_mode(world, made_in):
    with made_in():
        signals = Signals(world, 1)
        tensor = ParallelTensor((4,), torch.float32, world, lambda part: part.fill_(1))
        gather = AllGatherGemm(world, torch.eye(8), 4)
        scatter = GemmReduceScatter(world, torch.eye(8), 4)
    for turn, mode in enumerate([torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode]):
        with mode():
            for peer in range(world.size):
                signals.put(0, peer, turn + 1)
            for peer in range(world.size):
                signals.wait(0, peer, turn + 1)
            tensor.local.add_(1)
            x = torch.full((4, 8), float(turn))
            y = scatter(gather(x))
        assert x.is_inference() == y.is_inference() == (mode is torch.inference_mode)
        assert torch.equal(y, world.size * x)
    assert tensor.local.tolist() == [5.0] * 4
    signals.destroy()
    return True


@pytest.mark.parametrize("made_in", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("worlds_made_in", [torch.enable_grad, torch.inference_mode])
def test_what_is_made_under_inference_serves_outside_too(made_in, worlds_made_in):
    with worlds_made_in():
        worlds = World.emulated(2, device="cpu", timeout_seconds=20)
    assert on_every_rank(worlds, in_every_mode, made_in) == [True, True]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_making_a_tensor_changes_no_mode(mode, world):
    found = []

    def look(part):
        found.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    with mode():
        before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        ParallelTensor((4,), torch.float32, world, look)
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == before
    assert set(found) == {(False, before[1])}


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_does_not_come_ends_the_wait_of_all(size):
    found = run(size, cases.stays_away, size - 1, timeout_seconds=0.3)
    assert len(set(found)) == 1 or size > 2
    for rank, record in found:
        assert rank < size - 1
        assert record == (control.BARRIER_SLOT, size - 1, 1, 0)


def test_a_missing_signal_ends_the_wait_of_all():
    assert run(3, cases.waits_for_signal, timeout_seconds=0.3) == [(0, (1, 2, 5, 0))] * 3


def test_after_a_failed_wait_everything_raises_at_once():
    worlds = World.emulated(2, device="cpu", timeout_seconds=0.2)
    message = "rank 0 waited too long at the barrier: rank 1 should have written epoch 1 or later, seen 0"
    with pytest.raises(WaitError, match=message):
        worlds[0].barrier()
    for world in worlds:
        with pytest.raises(WaitError, match=message):
            world.synchronize()
    with pytest.raises(WaitError, match=message):
        worlds[0].barrier()


def test_wait_error_survives_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(WaitError(2, control.Record(3, 1, 7, 6))))
    assert (error.rank, error.record.expected) == (2, 7)
    assert "rank 2 waited too long for slot 3: rank 1 should have written epoch 7 or later, seen 6" in str(error)


@pytest.mark.parametrize("what", ["shape", "dtype", "slots", "inner size", "rows"])
def test_ranks_that_disagree(what):
    """The rank that differs raises, and all raise from then on."""
    worlds = World.emulated(2, device="cpu")
    errors = []
    for world in worlds:
        try:
            cases.disagrees(world, what)
        except ValueError as error:
            errors.append(str(error))
    assert errors
    for world in worlds:
        with pytest.raises(ValueError, match="ranks disagree: rank 0 has"):
            world.barrier()


def test_views_keep_their_memory():
    assert run(3, cases.keeps_views) == [6.0, 9.0, 3.0]


def test_use_after_teardown():
    for messages in run(2, cases.uses_after_teardown):
        assert messages[:3] == ["this ParallelTensor has been destroyed"] * 3
        assert messages[3:] == ["this World has been closed"] * 4


def test_a_world_closes_itself(world):
    with world:
        ParallelTensor((3,), torch.int32, world)
    with pytest.raises(RuntimeError, match="closed"):
        world.barrier()
    world.close()  # nothing more


def test_address_table(world):
    worlds = World.emulated(3, device="cpu")
    tensors = [ParallelTensor((4, 2), torch.float64, world) for world in worlds]
    for tensor in tensors:
        assert tensor.offsets.dtype == torch.int64
        for rank, offset in enumerate(tensor.offsets.tolist()):
            assert tensor.local.data_ptr() + offset == tensors[rank].local.data_ptr() == tensor.peer(rank).data_ptr()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda world: World.emulated(0), ValueError, "size must be an integer of at least 1, got 0"),
        (lambda world: World.emulated(2.0), ValueError, "size must be an integer of at least 1, got 2.0"),
        (lambda world: World.emulated(1, timeout_seconds=0), ValueError, "timeout_seconds must be above 0"),
        (lambda world: World.from_group(device="cpu"), ValueError, "group must be one of an initialised"),
        (lambda world: ParallelTensor((-1,), BF16, world), ValueError, "shape must have no negative sizes"),
        (lambda world: ParallelTensor((1.5,), BF16, world), TypeError, "shape must be integers"),
        (lambda world: ParallelTensor((1,), "bfloat16", world), TypeError, "dtype must be a torch.dtype, got str"),
        (lambda world: ParallelTensor((1,), BF16, world).peer(1), ValueError, "rank must be from 0 to 0, got 1"),
        (lambda world: Signals(world, 0), ValueError, "num_slots must be an integer of at least 1, got 0"),
        (lambda world: Signals(world, 2).put(2, 0, 1), ValueError, "slot must be from 0 to 1, got 2"),
        (lambda world: Signals(world, 2).put(0, -1, 1), ValueError, "peer must be from 0 to 0, got -1"),
        (lambda world: Signals(world, 2).wait(0, 1, 1), ValueError, "writer must be from 0 to 0, got 1"),
        (lambda world: check_num_comm_blocks(0, 132), ValueError, "num_comm_blocks must be at least 1 and less than"),
        (lambda world: check_num_comm_blocks(132, 132), ValueError, "less than the 132 blocks .* got 132"),
        (lambda world: check_num_comm_blocks(2.0, 132), TypeError, "num_comm_blocks must be an integer, got float"),
    ],
)
def test_bad_arguments(make, error, message, world):
    with pytest.raises(error, match=message):
        make(world)


@pytest.mark.parametrize("operator", [AllGatherGemm, GemmReduceScatter])
@pytest.mark.parametrize(
    ("w", "num_rows", "options", "error", "message"),
    [
        ([1.0], 4, {}, TypeError, "w must be a torch.Tensor, got list"),
        (torch.zeros(8, 8, dtype=torch.int32), 4, {}, TypeError, "w must be bfloat16 or float16 or"),
        (torch.zeros(1, 8, 8), 4, {}, ValueError, "w must be .K, N., both positive multiples of 8"),
        (torch.zeros(8, 12), 4, {}, ValueError, "w must be .K, N., both positive multiples of 8"),
        (torch.zeros(0, 8), 4, {}, ValueError, "w must be .K, N., both positive multiples of 8"),
        (torch.zeros(16, 16)[::2, ::2], 4, {}, ValueError, "w must be contiguous in K or in N"),
        (torch.zeros(8, 18)[:, :16], 4, {}, ValueError, "w must have rows 16 bytes or a multiple apart"),
        (torch.zeros(72)[1:65].view(8, 8), 4, {}, ValueError, "w must start at an address"),
        (torch.zeros(8, 8, requires_grad=True), 4, {}, ValueError, "w must not require a gradient"),
        (torch.zeros(8, 8), 0, {}, ValueError, "num_rows must be from 1 to"),
        (torch.zeros(8, 8), 2**31, {}, ValueError, "num_rows must be from 1 to"),
        (torch.zeros(8, 8), 4.0, {}, TypeError, "num_rows must be an integer, got float"),
        (torch.zeros(8, 8), 4, {"num_comm_blocks": 2}, ValueError, "num_comm_blocks must be None on the CPU"),
    ],
)
def test_bad_operators(w, num_rows, options, error, message, operator, world):
    with pytest.raises(error, match=message):
        operator(world, w, num_rows, **options)


@pytest.mark.parametrize("operator", [AllGatherGemm, GemmReduceScatter])
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (None, TypeError, "x must be a torch.Tensor, got NoneType"),
        (torch.zeros(4, 8, dtype=BF16), TypeError, "x must be float32, the dtype of w, got bfloat16"),
        (torch.zeros(5, 8), ValueError, r"x must have shape \(4, 8\), got \(5, 8\)"),
        (torch.zeros(4, 8, device="meta"), ValueError, "x must be on the device of the world, cpu, got meta"),
        (torch.zeros(8, 4).T, ValueError, "x must be contiguous in its last dimension"),
        (torch.zeros(4, 9)[:, :8], ValueError, "x must have rows 16 bytes or a multiple apart"),
        (torch.zeros(40)[1:33].view(4, 8), ValueError, "x must start at an address"),
        (torch.zeros(4, 8, requires_grad=True), ValueError, "x must not require a gradient"),
    ],
)
def test_bad_input(x, error, message, operator, world):
    with pytest.raises(error, match=message):
        operator(world, torch.zeros(8, 8), 4)(x)


@pytest.mark.parametrize("operator", [AllGatherGemm, GemmReduceScatter])
@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ([0.0], TypeError, "out must be a torch.Tensor, got list"),
        (torch.zeros(4, 16, dtype=BF16), TypeError, "out must be float32, the dtype of x, got bfloat16"),
        (torch.zeros(4, 8), ValueError, r"out must be contiguous, of shape \(4, 16\), on cpu, got \(4, 8\)"),
        (torch.zeros(72)[1:65].view(4, 16), ValueError, "out must start at an address"),
        (torch.zeros(16, 4).T, ValueError, r"got \(4, 16\) with strides \(1, 4\)"),
    ],
)
def test_bad_output(out, error, message, operator, world):
    with pytest.raises(error, match=message):
        operator(world, torch.zeros(8, 16), 4)(torch.zeros(4, 8), out=out)


@pytest.mark.parametrize("operator", [AllGatherGemm, GemmReduceScatter])
def test_output_is_written_and_returned(operator, world):
    x, w, out = torch.randn(4, 8), torch.randn(8, 16), torch.full((4, 16), float("nan"))
    assert operator(world, w, 4)(x, out=out) is out
    assert torch.allclose(out, x @ w)


def test_emulated_ranks_need_hardware_queues(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv(CONNECTIONS, "17")
    _check_connections(7)
    with pytest.raises(
        ValueError, match=f"size 8 needs {CONNECTIONS}=18 or more in the environment before CUDA starts"
    ):
        _check_connections(8)


def test_emulated_ranks_ask_for_hardware_queues_in_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv(CONNECTIONS, "")  # restored behind the test
    monkeypatch.delenv(CONNECTIONS)
    _check_connections(8)
    assert os.environ[CONNECTIONS] == "18"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            [("cpu", "a", ""), ("cuda", "a", "")],
            "one kind, on one host, for all ranks: rank 0 has cpu on a; rank 1 has cuda",
        ),
        (
            [("cpu", "a", ""), ("cpu", "b", "")],
            "one kind, on one host, for all ranks: rank 0 has cpu on a; rank 1 has cpu on b",
        ),
        (
            [("cuda", "a", "x"), ("cuda", "a", "y"), ("cuda", "a", "x")],
            "another GPU on every rank: ranks 0 and 2 share x",
        ),
    ],
)
def test_worlds_of_unlike_ranks(found, message):
    class Provider:
        def gather(self, value):
            return found

    with pytest.raises(ValueError, match=message):
        _check_devices(Provider(), torch.device("cpu"))


def test_worlds_of_like_ranks():
    class Provider:
        def gather(self, value):
            return [value, value]

    _check_devices(Provider(), torch.device("cpu"))
