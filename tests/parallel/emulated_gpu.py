"""Emulated ranks on one GPU: the same kernels, flags and scopes as between GPUs, with ranks delayed at random.

Whatever CUDA does once (making streams, loading kernels) may wait for running kernels. Worlds, tensors and operators
are therefore made for all ranks, and each operation used is run once, before anything waits.

Run by test_gpu.py, in a process with enough hardware queues.
"""

import random
import time

import pytest
import torch

from tests.delays import LONGEST_CYCLES, delay
from tests.parallel.cases import content, input_of, relative_error, weights_of
from tilecrew._hardware import hardware_of
from tilecrew.parallel import (
    AllGatherGemm,
    GemmReduceScatter,
    ParallelTensor,
    Signals,
    WaitError,
    World,
    on_every_rank,
)

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
SIZES = [1, 2, 3, 4, 8]
NEAR_WRAP = 2**32 - 4


@pytest.fixture
def make_worlds():
    made = []

    def make(size, **options):
        worlds = World.emulated(size, device="cuda", **{"timeout_seconds": 20, **options})
        made.append(worlds)
        with worlds[0].use():
            torch.cuda._sleep(1)
        torch.cuda.synchronize()
        return worlds

    yield make
    torch.cuda.synchronize()


def synchronize(worlds):
    for world in worlds:
        world.synchronize()


def assert_all_arrived(found, sources):
    """In every turn, every rank has found what each rank had."""
    for rank, turns in enumerate(found):
        for turn, parts in enumerate(turns):
            for peer, part in enumerate(parts):
                assert torch.equal(part, sources[peer][turn]), (rank, turn, peer)


def requires_gates():
    if hardware_of("cuda").tma_limit():
        pytest.skip("needs a GPU whose grouped GEMM has gates")


@pytest.mark.parametrize("first_epoch", [0, 2**31 - 3, NEAR_WRAP])
@pytest.mark.parametrize("size", SIZES)
def test_barriers_order_what_peers_read(size, first_epoch, make_worlds):
    worlds = make_worlds(size, first_epoch=first_epoch)
    shape, num_turns, generator = (33, 65), 12, random.Random(size)
    tensors = [ParallelTensor(shape, torch.int32, world) for world in worlds]
    sources = [[content(rank, shape, "cuda") + turn for turn in range(num_turns)] for rank in range(size)]
    found = [torch.zeros(num_turns, size, *shape, dtype=torch.int32, device="cuda") for _ in worlds]

    def turn_of(world, turn):
        if turn % 3 == world.rank % 3:
            delay(generator)
        tensors[world.rank].local.copy_(sources[world.rank][turn])
        world.barrier()
        for peer in range(size):
            found[world.rank][turn, peer].copy_(tensors[world.rank].peer(peer))
        world.barrier()

    found[0][0, 0].copy_(sources[0][0])
    torch.cuda.synchronize()
    for turn in range(num_turns):
        on_every_rank(worlds, turn_of, turn)
    synchronize(worlds)
    assert_all_arrived(found, sources)


def test_without_barriers_a_peer_reads_too_early(make_worlds):
    """What the test above would see if barriers did nothing."""
    worlds = make_worlds(2)
    tensors = [ParallelTensor((8,), torch.int32, world) for world in worlds]
    found = torch.zeros(8, dtype=torch.int32, device="cuda")
    tensors[1].local.fill_(0)
    torch.cuda.synchronize()
    with worlds[1].use():
        torch.cuda._sleep(LONGEST_CYCLES)
        tensors[1].local.fill_(5)
    with worlds[0].use():
        found.copy_(tensors[0].peer(1))
    synchronize(worlds)
    assert found.tolist() == [0] * 8


@pytest.mark.parametrize("size", SIZES)
def test_signals_order_what_peers_write(size, make_worlds):
    worlds, generator = make_worlds(size), random.Random(size)
    tensors = [ParallelTensor((size, 1000), torch.int32, world) for world in worlds]
    signals = [Signals(world, 2, first_epoch=NEAR_WRAP) for world in worlds]
    num_turns = 8
    sources = [[content(rank, (1000,), "cuda") + turn for turn in range(num_turns)] for rank in range(size)]
    found = [torch.zeros(num_turns, size, 1000, dtype=torch.int32, device="cuda") for _ in worlds]

    def turn_of(world, turn):
        delay(generator)
        for peer in range(size):
            tensors[world.rank].peer(peer)[world.rank].copy_(sources[world.rank][turn])
            signals[world.rank].put(1, peer, NEAR_WRAP + turn + 1)
        for writer in range(size):
            signals[world.rank].wait(1, writer, NEAR_WRAP + turn + 1)
        found[world.rank][turn].copy_(tensors[world.rank].local)
        world.barrier()

    found[0][0].copy_(tensors[0].local)
    torch.cuda.synchronize()
    for turn in range(num_turns):
        on_every_rank(worlds, turn_of, turn)
    synchronize(worlds)
    assert_all_arrived(found, sources)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_does_not_come_ends_the_wait_of_all(size, make_worlds):
    worlds = make_worlds(size, timeout_seconds=0.5)
    start = time.monotonic()
    for world in worlds[:-1]:
        world.barrier()
    for world in worlds:
        world._wait_for_device()
    assert time.monotonic() - start < 10
    for world in worlds:
        with pytest.raises(WaitError, match=f"at the barrier: rank {size - 1} should have written epoch 1 or later"):
            world.check()
    worlds[-1].barrier()  # ends at once
    worlds[-1]._wait_for_device()
    assert time.monotonic() - start < 10


def test_a_missing_signal_names_slot_and_epochs(make_worlds):
    worlds = make_worlds(2, timeout_seconds=0.5)
    signals = [Signals(world, 3) for world in worlds]
    signals[1].put(2, 0, 4)
    signals[0].wait(2, 1, 5)
    message = "rank 0 waited too long for slot 2: rank 1 should have written epoch 5 or later, seen 4"
    for world in worlds:
        worlds[0]._wait_for_device()
        with pytest.raises(WaitError, match=message):
            world.synchronize()


def outputs(num_turns, size, num_rows, num_columns, dtype):
    """[turn][rank], NaN, made before anything waits."""
    options = {"dtype": dtype, "device": "cuda"}
    return [
        [torch.full((num_rows, num_columns), float("nan"), **options) for _ in range(size)] for _ in range(num_turns)
    ]


def gather_operators(worlds, num_rows, num_inner, num_columns, dtype, transposed=False, **options):
    weights = [weights_of(world.rank, num_inner, num_columns, dtype).cuda() for world in worlds]
    if transposed:
        weights = [w.T.contiguous().T for w in weights]
    pairs = zip(worlds, weights, strict=True)
    return weights, [AllGatherGemm(world, w, num_rows, **options) for world, w in pairs]


@pytest.mark.parametrize(
    ("num_rows", "num_inner", "num_columns", "dtype", "transposed"),
    [
        (1, 64, 128, BF16, False),
        (5, 72, 136, FP16, True),
        (128, 512, 768, BF16, True),
        (130, 264, 520, BF16, False),
        (1000, 1032, 1536, BF16, False),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_gemm(size, num_rows, num_inner, num_columns, dtype, transposed, make_worlds):
    requires_gates()
    worlds, generator = make_worlds(size), random.Random(num_rows + size)
    weights, operators = gather_operators(worlds, num_rows, num_inner, num_columns, dtype, transposed)
    num_turns = 4
    inputs = [
        [input_of(r, turn, (num_rows, num_inner), dtype).cuda() for r in range(size)] for turn in range(num_turns)
    ]
    found = outputs(num_turns, size, size * num_rows, num_columns, dtype)
    torch.cuda.synchronize()
    for turn in range(num_turns):

        def call(world, turn=turn):
            delay(generator)
            operators[world.rank](inputs[turn][world.rank], out=found[turn][world.rank])

        on_every_rank(worlds, call)
    synchronize(worlds)
    for turn in range(num_turns):
        x = torch.cat(inputs[turn])
        for rank, out in enumerate(found[turn]):
            wanted = x.double() @ weights[rank].double()
            assert relative_error(out, wanted) <= 2 * relative_error(x @ weights[rank], wanted), (turn, rank)


@pytest.mark.parametrize("num_comm_blocks", [1, 3, 15])
def test_any_number_of_communication_blocks(num_comm_blocks, make_worlds):
    requires_gates()
    worlds = make_worlds(2)
    weights, operators = gather_operators(worlds, 300, 264, 520, BF16, num_comm_blocks=num_comm_blocks)
    inputs = [input_of(rank, 0, (300, 264), BF16).cuda() for rank in range(2)]
    (found,) = outputs(1, 2, 600, 520, BF16)
    torch.cuda.synchronize()
    on_every_rank(worlds, lambda world: operators[world.rank](inputs[world.rank], out=found[world.rank]))
    synchronize(worlds)
    for out, w in zip(found, weights, strict=True):
        assert relative_error(out, torch.cat(inputs).double() @ w.double()) < 4e-3


@pytest.mark.parametrize("operator", [AllGatherGemm, GemmReduceScatter])
def test_the_rule_against_deadlock(operator, make_worlds):
    (world,) = make_worlds(1)
    w = torch.zeros(64, 64, dtype=BF16, device="cuda")
    for number in (0, world.num_sms, world.num_sms + 1):
        with pytest.raises(ValueError, match="num_comm_blocks must be at least 1 and less than"):
            operator(world, w, 128, num_comm_blocks=number)


@pytest.mark.parametrize(
    ("num_rows", "num_inner", "num_columns", "dtype"),
    [(1, 64, 128, BF16), (5, 72, 136, FP16), (128, 512, 768, BF16), (130, 264, 520, BF16), (1000, 512, 1536, BF16)],
)
@pytest.mark.parametrize("size", SIZES)
def test_gemm_reduce_scatter(size, num_rows, num_inner, num_columns, dtype, make_worlds):
    worlds, generator = make_worlds(size), random.Random(num_rows + size)
    weights = [weights_of(rank, num_inner, num_columns, dtype).cuda() for rank in range(size)]
    operators = [GemmReduceScatter(world, w, num_rows) for world, w in zip(worlds, weights, strict=True)]
    assert operators[0].is_fused == (hardware_of("cuda").tma_limit() is None)
    num_turns, shape = 4, (size * num_rows, num_inner)
    inputs = [[input_of(rank, turn, shape, dtype).cuda() for rank in range(size)] for turn in range(num_turns)]
    found = outputs(2 * num_turns, size, num_rows, num_columns, dtype)
    torch.cuda.synchronize()
    for turn in range(2 * num_turns):

        def call(world, turn=turn):
            delay(generator)
            operators[world.rank](inputs[turn % num_turns][world.rank], out=found[turn][world.rank])

        on_every_rank(worlds, call)
    synchronize(worlds)
    for turn in range(num_turns):
        pairs = list(zip(inputs[turn], weights, strict=True))
        wanted = sum(x.double() @ w.double() for x, w in pairs).chunk(size)
        same = sum((x @ w).float() for x, w in pairs).to(dtype).chunk(size)
        for rank in range(size):
            assert relative_error(found[turn][rank], wanted[rank]) <= 2 * relative_error(same[rank], wanted[rank])
            assert torch.equal(found[turn][rank], found[turn + num_turns][rank]), "another order of the sum"


@pytest.mark.parametrize("size", [2, 3])
def test_a_missing_rank_makes_no_result_that_passes_for_one(size, make_worlds):
    """NaN where rows did not come, and WaitError on every rank."""
    requires_gates()
    worlds = make_worlds(size, timeout_seconds=0.5)
    _, gathers = gather_operators(worlds, 130, 264, 520, BF16)
    w = weights_of(0, 264, 520, BF16).cuda()
    reduces = [GemmReduceScatter(world, w, 130) for world in worlds]
    x = input_of(0, 0, (130, 264), BF16).cuda()
    y = input_of(0, 0, (size * 130, 264), BF16).cuda()
    torch.cuda.synchronize()
    out = gathers[0](x)
    summed = reduces[0](y)
    worlds[0]._wait_for_device()
    assert out.isnan().all()
    assert summed.isnan().all()
    for world in worlds:
        with pytest.raises(WaitError, match="at the barrier"):
            world.synchronize()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cuda_graphs_replay_with_other_inputs(size, make_worlds):
    """One graph for each rank. Epochs live in device memory, so that each replay has its own."""
    requires_gates()
    worlds, generator = make_worlds(size, first_epoch=NEAR_WRAP), random.Random(size)
    weights, gathers = gather_operators(worlds, 130, 264, 520, BF16)
    pairs = zip(worlds, [w.T.contiguous() for w in weights], strict=True)
    reduces = [GemmReduceScatter(world, w, 130) for world, w in pairs]
    inputs = [torch.zeros(130, 264, dtype=BF16, device="cuda") for _ in worlds]

    (gathered,), (reduced,) = outputs(1, size, size * 130, 520, BF16), outputs(1, size, 130, 264, BF16)
    torch.cuda.synchronize()

    def layer(world):
        rank = world.rank
        return reduces[rank](gathers[rank](inputs[rank], out=gathered[rank]), out=reduced[rank])

    on_every_rank(worlds, layer)
    synchronize(worlds)
    graphs, found = [], []
    for world in worlds:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=world.stream):
            found.append(layer(world))
        graphs.append(graph)
    for turn in range(12):
        for rank in range(size):
            inputs[rank].copy_(input_of(rank, turn, (130, 264), BF16))
        torch.cuda.synchronize()

        def replay(world):
            delay(generator)
            graphs[world.rank].replay()

        on_every_rank(worlds, replay)
        synchronize(worlds)
        x = torch.cat(inputs).double()
        wanted = sum(((x @ w.double()).to(BF16).double() @ w.double().T) for w in weights).chunk(size)
        for rank in range(size):
            assert relative_error(found[rank], wanted[rank]) < 8e-3, (turn, rank)


def test_results_do_not_change_from_run_to_run(make_worlds):
    requires_gates()
    worlds, generator = make_worlds(4), random.Random(0)
    weights, gathers = gather_operators(worlds, 200, 264, 520, BF16)
    pairs = zip(worlds, [w.T.contiguous() for w in weights], strict=True)
    reduces = [GemmReduceScatter(world, w, 200) for world, w in pairs]
    inputs = [input_of(rank, 0, (200, 264), BF16).cuda() for rank in range(4)]
    (gathered,), (reduced,) = outputs(1, 4, 800, 520, BF16), outputs(1, 4, 200, 264, BF16)
    torch.cuda.synchronize()

    def layer(world):
        delay(generator, 2_000_000)
        rank = world.rank
        return reduces[rank](gathers[rank](inputs[rank], out=gathered[rank]), out=reduced[rank])

    on_every_rank(worlds, layer)
    synchronize(worlds)
    first = [out.clone() for out in (*gathered, *reduced)]
    assert not any(out.isnan().any() for out in first)
    for _ in range(100):
        on_every_rank(worlds, layer)
        synchronize(worlds)
        for wanted, out in zip(first, (*gathered, *reduced), strict=True):
            assert torch.equal(out, wanted)
