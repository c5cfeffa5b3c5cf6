"""The grouped GEMM with K split over blocks, in the simulator: both kernels, one after the other, as on a stream."""

import pytest
import torch

pytest.importorskip("triton")
from tests.grouped_gemm.problems import assert_close, expected, make
from tests.grouped_gemm.test_simulator import SMALL, sizes_of
from tests.simulator.conftest import run_under_seeds
from tilecrew.grouped_gemm import kernel_grouped_gemm, kernel_split_sum
from tilecrew.grouped_gemm.hooks import GELU, Bias, RouteWeight, SwiGLU
from tilecrew.grouped_gemm.schedule import Schedule

FP16 = torch.float16
WIDE = (64, 256, 4, 1)


def simulate(x, w, offs, splits, epilogue=None, tile=SMALL, num_programs=3, num_seeds=2):
    """What both kernels give; run_under_seeds fills the workspace and out with NaN before every run."""
    schedule = Schedule("hopper", sizes_of(tile, w.shape[0]), num_programs, "", splits)
    out = torch.empty(x.shape[0], w.shape[2] // (1 if epilogue is None else epilogue.shrink), dtype=x.dtype)
    hooks = kernel_grouped_gemm.hooks_of(None, epilogue)
    products, total = kernel_split_sum.launches(x, w, offs, out, schedule, hooks)
    partials = total.args[0]
    assert partials.shape == (splits, x.shape[0], w.shape[2])
    run_under_seeds(products, [partials], num_seeds)
    assert partials[:, int(offs[-1]) :].isnan().all()  # rows that do not exist are not written
    run_under_seeds(total, [out], 1)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "tail", "splits", "tile", "transposed", "dtype"),
    [
        ([0, 3, 0, 1, 0], 2, 2, SMALL, False, torch.bfloat16),
        ([70, 0, 5], 0, 4, SMALL, True, FP16),
        ([2, 0], 1, 8, WIDE, False, FP16),
        ([130], 3, 2, WIDE, True, torch.bfloat16),
        ([0, 0], 5, 2, SMALL, False, torch.bfloat16),
        ([1], 0, 2, SMALL, False, torch.bfloat16),
    ],
)
def test_groups(lengths, tail, splits, tile, transposed, dtype):
    """K = 264 + 256 has nine steps, the last of eight columns: parts of unlike lengths. N ends within a tile."""
    x, w, offs = make(lengths, tail, 520, 136, transposed=transposed, dtype=dtype)
    assert_close(simulate(x, w, offs, splits, tile=tile), expected(x, w, offs), offs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "epilogue",
    [
        Bias(torch.randn(3, 144, generator=torch.Generator().manual_seed(1))),
        GELU("tanh"),
        SwiGLU(),
        SwiGLU(8),
        RouteWeight(torch.tensor([0.5, 2.0, 3.0, -1.0, torch.nan, torch.nan])),
    ],
    ids=lambda hook: type(hook).__name__,
)
def test_epilogues_are_applied_once_to_the_whole_sum(epilogue):
    x, w, offs = make([3, 0, 1], 2, 520, 144)
    x = torch.where(x.isnan(), 0, x)
    assert_close(simulate(x, w, offs, 2, epilogue, num_seeds=1), expected(x, w, offs, epilogue), offs, bound=6e-3)


@pytest.mark.slow
def test_wrong_offsets_stay_inside_of_the_tensors():
    """What comes out is undefined, but the simulator would report an access outside."""
    x, w, _ = make([20], 0, 128, 8)
    w = w.expand(4, -1, -1).contiguous()
    offs = torch.tensor([15, 2, 99, -5], dtype=torch.int32)
    out = torch.empty(20, 8, dtype=x.dtype)
    schedule = Schedule("hopper", sizes_of(SMALL, 4), 2, "", 2)
    for launch in kernel_split_sum.launches(x, w, offs, out, schedule, kernel_grouped_gemm.Hooks()):
        run_under_seeds(launch, [], 1)
