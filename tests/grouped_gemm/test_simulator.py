"""The Hopper grouped GEMM in the simulator: right values, no race, no deadlock, the same bits under several seeds."""

import pytest
import torch

import tilecrew

pytest.importorskip("triton")
from tests.grouped_gemm.hook_examples import OneAfterTheOther, Record, SimulatedCountGate, Trace
from tests.grouped_gemm.problems import GROUPS, assert_close, expected, make
from tests.simulator.conftest import run_under_seeds
from tests.simulator.mutations import mutate, names_of_places
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.grouped_gemm.hooks import GELU, Bias, CountGate, Epilogue, NotifyRowBlock, RouteWeight, SiLU, SwiGLU
from tilecrew.grouped_gemm.schedule import Problem, TileSizes, max_row_blocks, mma_sync_tiles, table_length
from tilecrew.simulator import FaultError, run

BF16, FP16 = torch.bfloat16, torch.float16
# Rows and columns of a tile, stages, staging tiles of a consumer.
SMALL = (64, 128, 4, 2)
WIDE = (128, 256, 3, 1)
MMA_SYNC = "mma.sync"
TILES = [SMALL, WIDE, MMA_SYNC]


def sizes_of(tile, num_groups):
    if tile == MMA_SYNC:
        return mma_sync_tiles(Problem(1, num_groups, 8, 8, "bfloat16"))
    block_m, block_n, num_stages, num_buffers = tile
    return TileSizes(block_m, block_n, 64, num_stages, num_buffers, 4, table_length(num_groups), 40, 232, 168)


def simulate(x, w, offs, tile, epilogue: Epilogue | None = None, num_programs: int = 2, num_seeds: int = 2, gate=None):
    """What the kernel gives for x, w, offs."""
    out = torch.empty(x.shape[0], w.shape[2] // (1 if epilogue is None else epilogue.shrink), dtype=x.dtype)
    hooks = kernel_grouped_gemm.hooks_of(gate, epilogue)
    launch = kernel_grouped_gemm.launch(x, w, offs, out, sizes_of(tile, w.shape[0]), num_programs, hooks)
    run_under_seeds(launch, [out], num_seeds)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", [name for name, (lengths, tail) in GROUPS.items() if sum(lengths) + tail])
def test_groups(name, tile):
    lengths, tail = GROUPS[name]
    x, w, offs = make(lengths, tail, 72, 136, transposed=tile == WIDE)
    assert_close(simulate(x, w, offs, tile), expected(x, w, offs), offs)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [WIDE, MMA_SYNC])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("num_inner", "num_columns"), [(8, 8), (64, 256), (328, 520)])
def test_sizes(num_inner, num_columns, transposed, tile):
    """K and N that fill their last tile, or hardly; more steps than stages."""
    x, w, offs = make([130, 70], 0, num_inner, num_columns, dtype=FP16, transposed=transposed)
    assert_close(simulate(x, w, offs, tile, num_programs=3), expected(x, w, offs), offs)


@pytest.mark.slow
def test_more_groups_than_a_search_reads_at_once():
    x, w, offs = make([1, 0, 2] * 50, 3, 16, 8)
    assert_close(simulate(x, w, offs, SMALL, num_seeds=1), expected(x, w, offs), offs)


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "epilogue",
    [
        Bias(torch.randn(3, 272, generator=torch.Generator().manual_seed(1))),
        SiLU(),
        GELU("tanh"),
        SwiGLU(),
        SwiGLU(8),
        RouteWeight(
            torch.cat([torch.rand(150, generator=torch.Generator().manual_seed(2)), torch.full((9,), torch.nan)])
        ),
    ],
    ids=lambda hook: type(hook).__name__,
)
def test_epilogues(epilogue, tile):
    """The device half of each hook agrees with its torch twin, and rows behind the last offset stay zeros."""
    x, w, offs = make([65, 0, 85], 9, 72, 272)
    x = torch.where(x.isnan(), 0, x)  # the twin of a route weight that is NaN would spread it
    assert_close(simulate(x, w, offs, tile, epilogue), expected(x, w, offs, epilogue), offs, bound=6e-3)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [WIDE, MMA_SYNC])
def test_a_bad_group_spoils_no_other(tile):
    x, w, offs = make([100, 60, 100], 0, 72, 136)
    wanted = expected(x, w, offs)
    x[100:160] = float("nan")
    out = simulate(x, w, offs, tile)
    assert out[100:160].isnan().all()
    for rows in (slice(0, 100), slice(160, 260)):
        assert_close(out[rows], wanted[rows], torch.tensor([100]))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [WIDE, MMA_SYNC])
def test_rows_and_columns_stay_where_they_are(tile):
    """Every element of the output tells its row and column: no permutation of them can cancel."""
    lengths, num_columns = [70, 0, 129], 264
    num_rows = sum(lengths)
    x = torch.zeros(num_rows, 8, dtype=FP16)
    x[:, 0], x[:, 1] = torch.arange(num_rows), 1
    w = torch.zeros(3, 8, num_columns, dtype=FP16)
    w[:, 0], w[:, 1] = 1, torch.arange(num_columns) / 512
    offs = torch.tensor(lengths).cumsum(0).to(torch.int32)
    out = simulate(x, w, offs, tile)
    wanted = torch.arange(num_rows)[:, None] + torch.arange(num_columns)[None, :] / 512
    assert torch.equal(out, wanted.to(FP16))


@pytest.mark.slow
def test_wrong_offsets_stay_inside_of_the_tensors():
    """Offsets that decrease or pass the end: what comes out is undefined, but the simulator would report an access
    outside."""
    x, w, _ = make([200], 0, 16, 8)
    w = w.expand(4, -1, -1).contiguous()
    simulate(x, w, torch.tensor([150, 20, 999, -5], dtype=torch.int32), SMALL, num_seeds=1)


@pytest.mark.slow
def test_a_gate_is_asked_for_every_row_block():
    """On the device and by the torch twin: 128-row blocks, numbered group after group, none behind the last."""
    x, w, offs = make([130, 0, 1, 256], 5, 8, 8)
    seen, twin = torch.full((7,), -1, dtype=torch.int32), torch.full((7,), -1, dtype=torch.int32)
    out = simulate(x, w, offs, WIDE, gate=Record(seen), num_seeds=1)
    assert_close(out, expected(x, w, offs), offs)
    assert seen.tolist() == [128, 2, 1, 128, 128, -1, -1]
    tilecrew.grouped_gemm(x, w, offs, gate=Record(twin))
    assert twin.tolist() == [128, 2, 1, 128, 128, -1, -1]


LENGTHS, TAIL = [130, 0, 1, 64, 256], 5  # row blocks of 128, 2, 1, 64, 128 and 128 rows
NUM_ROWS_OF_BLOCKS = [128, 2, 1, 64, 128, 128]


@pytest.mark.slow
@pytest.mark.parametrize("tile", [WIDE, MMA_SYNC])
@pytest.mark.parametrize("epilogue", [None, SwiGLU(8)])
def test_row_blocks_are_notified_once_whole(epilogue, tile):
    """Values are those of the inner epilogue, every row block is published, and the arrivals are 0 again."""
    x, w, offs = make(LENGTHS, TAIL, 72, 272)
    x = torch.where(x.isnan(), 0, x)
    num_blocks = max_row_blocks(x.shape[0], len(LENGTHS))
    rows = torch.zeros(num_blocks, dtype=torch.int32)
    hook = NotifyRowBlock(rows, epilogue=epilogue)
    out = simulate(x, w, offs, tile, hook, num_programs=3)
    assert_close(out, expected(x, w, offs, epilogue), offs, bound=6e-3)
    assert rows.tolist() == NUM_ROWS_OF_BLOCKS + [0] * (num_blocks - 6)
    assert not hook.arrivals.any()
    twin = NotifyRowBlock(torch.zeros_like(rows), epilogue=epilogue)
    tilecrew.grouped_gemm(x, w, offs, epilogue=twin)
    assert torch.equal(twin.rows, rows)
    assert CountGate(rows).check(NUM_ROWS_OF_BLOCKS) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "num_programs"), [(SMALL, 3), (WIDE, 1), (WIDE, 2), (WIDE, 3), (MMA_SYNC, 1), (MMA_SYNC, 3)]
)
def test_what_is_notified_has_landed(tile, num_programs):
    """Every call of `landed` finds its rows of the output stored, and there are as many calls as it is told: one a
    tile. A block has up to 21 tiles, and hands over four before the first is notified."""
    x, w, offs = make(LENGTHS, TAIL, 72, 272)
    out = torch.empty(x.shape[0], 272, dtype=x.dtype)
    block_m = sizes_of(tile, len(LENGTHS)).block_m
    num_blocks = sum(-(-length // block_m) for length in LENGTHS)
    hook = Trace(out, offs, num_blocks, block_m)
    sizes = sizes_of(tile, len(LENGTHS))
    launch = kernel_grouped_gemm.launch(x, w, offs, out, sizes, num_programs, kernel_grouped_gemm.hooks_of(None, hook))
    run_under_seeds(launch, [out, hook.calls, hook.expected_calls, hook.missing], 3)
    # run_under_seeds starts counters at -1
    assert torch.equal(hook.calls + 1, hook.expected_calls)
    assert hook.expected_calls.tolist() == [-(-272 // sizes.block_n)] * num_blocks
    assert hook.missing.tolist() == [-1]


@pytest.mark.slow
def test_a_notification_that_does_not_wait_for_its_stores_is_found():
    """The wait before the first consumer hands over its first tile of two left out: under some seeds elements are
    missing then. Behind a gate, where it does so at once, and not when the next products are there.

    Waits for stores of a consumer: at the begin of a tile, in front of its four pieces, here, and at the end.
    """
    x, w, offs = make([256], 0, 512, 256)
    out = torch.empty(256, 256, dtype=x.dtype)
    hook, gate = Trace(out, offs, 2, 128), Record(torch.zeros(2, dtype=torch.int32))
    launch = kernel_grouped_gemm.launch(x, w, offs, out, sizes_of(WIDE, 1), 1, kernel_grouped_gemm.hooks_of(gate, hook))
    program = run.compile_program(launch)
    named = names_of_places(program, "drop store wait", run.role_names(launch))
    assert len(named) == 14
    mutated = mutate(program, "drop store wait", named["consumer_role", 5])
    missing = []
    for seed in range(16):
        out.fill_(float("nan"))
        for tensor in (hook.calls, hook.expected_calls, hook.missing):
            tensor.fill_(-1)
        run.simulate(launch, seed, [mutated])
        missing.append(int(hook.missing) + 1)
    assert any(missing)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drop wait", "flip parity", "drop arrive"])
def test_a_notify_role_that_does_not_keep_step_is_found(kind):
    """Its wait for the consumers left out or for another phase; or it never frees what they hand over."""
    x, w, offs = make([256, 200], 0, 8, 512)
    out = torch.empty(456, 512, dtype=x.dtype)
    hook = Trace(out, offs, 4, 128)
    launch = kernel_grouped_gemm.launch(x, w, offs, out, sizes_of(WIDE, 2), 1, kernel_grouped_gemm.hooks_of(None, hook))
    program = run.compile_program(launch)
    named = names_of_places(program, kind, ["consumer 0", "consumer 1", "load", "notify"])
    assert [key for key in named if key[0] == "notify"] == [("notify", 0)]
    mutated = mutate(program, kind, named["notify", 0])
    found = []
    for seed in range(3):
        for tensor in (out, hook.calls, hook.expected_calls, hook.missing):
            tensor.fill_(float("nan") if tensor is out else -1)
        try:
            run.simulate(launch, seed, [mutated])
            found.append(int(hook.missing) != -1)
        except FaultError:
            found.append(True)
    assert any(found)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [WIDE, MMA_SYNC])
def test_a_gate_may_wait_for_the_tile_before_of_the_same_block(tile):
    """Behind a gate a tile is notified at once, and not when the products of the next one are done."""
    x, w, offs = make([256, 130], 5, 72, 128)
    rows = torch.zeros(max_row_blocks(x.shape[0], 2), dtype=torch.int32)
    out = torch.empty(x.shape[0], 128, dtype=x.dtype)
    hooks = kernel_grouped_gemm.hooks_of(OneAfterTheOther(rows), NotifyRowBlock(rows))
    launch = kernel_grouped_gemm.launch(x, w, offs, out, sizes_of(tile, 2), 1, hooks)
    program = run.compile_program(launch)
    for seed in range(2):
        out.fill_(float("nan"))
        rows.zero_()
        run.simulate(launch, seed, [program])
        assert_close(out, expected(x, w, offs), offs)
        assert rows.tolist()[:4] == [128, 128, 128, 2]


@pytest.mark.slow
@pytest.mark.parametrize("tile", [WIDE, MMA_SYNC])
def test_a_second_product_follows_row_block_by_row_block(tile):
    """Two launches at the same time: the gate of the second waits for what the first one says has landed."""
    x, w, offs = make([130, 0, 60], 0, 72, 144)
    _, second_w, _ = make([130, 0, 60], 0, 72, 136, seed=1)
    rows = torch.zeros(max_row_blocks(190, 3), dtype=torch.int32)
    hidden, out = torch.empty(190, 72, dtype=x.dtype), torch.empty(190, 136, dtype=x.dtype)
    sizes = sizes_of(tile, 3)
    notify = kernel_grouped_gemm.hooks_of(None, NotifyRowBlock(rows, epilogue=SwiGLU(8)))
    gated = kernel_grouped_gemm.hooks_of(SimulatedCountGate(rows), None)
    first = kernel_grouped_gemm.launch(x, w, offs, hidden, sizes, 2, notify)
    second = kernel_grouped_gemm.launch(hidden, second_w, offs, out, sizes, 2, gated)
    programs = [run.compile_program(launch) for launch in (second, first)]
    for seed in range(2):
        for tensor in (hidden, out):
            tensor.fill_(float("nan"))
        rows.zero_()
        run.simulate([second, first], seed, programs)
        assert_close(hidden, expected(x, w, offs, SwiGLU(8)), offs, bound=6e-3)
        assert_close(out, expected(hidden, second_w, offs), offs)
