"""The Hopper grouped GEMM in the simulator: right values, no race, no deadlock, the same bits under several seeds."""

import pytest
import torch

import tilecrew

pytest.importorskip("triton")
from tests.grouped_gemm.hook_examples import Record
from tests.grouped_gemm.problems import GROUPS, assert_close, expected, make
from tests.simulator.conftest import run_under_seeds
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.grouped_gemm.hooks import GELU, Bias, Epilogue, RouteWeight, SiLU, SwiGLU
from tilecrew.grouped_gemm.schedule import TileSizes, table_length

BF16, FP16 = torch.bfloat16, torch.float16
# Rows and columns of a tile, stages, staging tiles of a consumer.
SMALL = (64, 128, 4, 2)
WIDE = (128, 256, 3, 1)


def simulate(x, w, offs, tile, epilogue: Epilogue | None = None, num_programs: int = 2, num_seeds: int = 2, gate=None):
    """What the kernel gives for x, w, offs."""
    block_m, block_n, num_stages, num_buffers = tile
    sizes = TileSizes(block_m, block_n, 64, num_stages, num_buffers, 4, table_length(w.shape[0]), 40, 232, 168)
    out = torch.empty(x.shape[0], w.shape[2] // (1 if epilogue is None else epilogue.shrink), dtype=x.dtype)
    hooks = kernel_grouped_gemm.hooks_of(gate, epilogue)
    launch = kernel_grouped_gemm.launch(x, w, offs, out, sizes, num_programs, hooks)
    run_under_seeds(launch, [out], num_seeds)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("tile", [SMALL, WIDE])
@pytest.mark.parametrize("name", [name for name, (lengths, tail) in GROUPS.items() if sum(lengths) + tail])
def test_groups(name, tile):
    lengths, tail = GROUPS[name]
    x, w, offs = make(lengths, tail, 72, 136, transposed=tile == WIDE)
    assert_close(simulate(x, w, offs, tile), expected(x, w, offs), offs)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("num_inner", "num_columns"), [(8, 8), (64, 256), (328, 520)])
def test_sizes(num_inner, num_columns, transposed):
    """K and N that fill their last tile, or hardly; more steps than stages."""
    x, w, offs = make([130, 70], 0, num_inner, num_columns, dtype=FP16, transposed=transposed)
    assert_close(simulate(x, w, offs, WIDE, num_programs=3), expected(x, w, offs), offs)


@pytest.mark.slow
def test_more_groups_than_a_search_reads_at_once():
    x, w, offs = make([1, 0, 2] * 50, 3, 16, 8)
    assert_close(simulate(x, w, offs, SMALL, num_seeds=1), expected(x, w, offs), offs)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [SMALL, WIDE])
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
def test_a_bad_group_spoils_no_other():
    x, w, offs = make([100, 60, 100], 0, 72, 136)
    wanted = expected(x, w, offs)
    x[100:160] = float("nan")
    out = simulate(x, w, offs, WIDE)
    assert out[100:160].isnan().all()
    for rows in (slice(0, 100), slice(160, 260)):
        assert_close(out[rows], wanted[rows], torch.tensor([100]))


@pytest.mark.slow
def test_rows_and_columns_stay_where_they_are():
    """Every element of the output tells its row and column: no permutation of them can cancel."""
    lengths, num_columns = [70, 0, 129], 264
    num_rows = sum(lengths)
    x = torch.zeros(num_rows, 8, dtype=FP16)
    x[:, 0], x[:, 1] = torch.arange(num_rows), 1
    w = torch.zeros(3, 8, num_columns, dtype=FP16)
    w[:, 0], w[:, 1] = 1, torch.arange(num_columns) / 512
    offs = torch.tensor(lengths).cumsum(0).to(torch.int32)
    out = simulate(x, w, offs, WIDE)
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
