"""Problems for the tests of the grouped GEMM, and the bounds that results are held to."""

import torch

from tilecrew._hardware import Hardware
from tilecrew.grouped_gemm import reference

H200 = Hardware("cuda", "cuda", (9, 0), 132, 232448, "NVIDIA H200")
# One group, many, empty ones at every place, sizes around a row block, and rows behind the last group.
GROUPS = {
    "one group": ([300], 0),
    "sizes around a block": ([0, 1, 127, 128, 129], 0),
    "rows behind": ([10, 120, 0, 128, 32], 75),
    "empty at both ends": ([0, 0, 200, 0, 65, 0], 1),
    "all empty": ([0, 0, 0], 130),
    "no rows at all": ([0, 0], 0),
}


def make(lengths, tail, num_inner, num_columns, *, dtype=torch.bfloat16, device="cpu", transposed=False, seed=0):
    """x [M, K], w [E, K, N] (a view of [E, N, K] where transposed), offs [E]. Rows behind the last group are NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_groups = sum(lengths) + tail, len(lengths)
    x = torch.randn(num_rows, num_inner, generator=generator)
    x[num_rows - tail :] = float("nan")
    w = torch.randn(num_groups, num_inner, num_columns, generator=generator) / num_inner**0.5
    offs = torch.tensor(lengths).cumsum(0).to(torch.int32)
    x, w, offs = x.to(device, dtype), w.to(device, dtype), offs.to(device)
    if transposed:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    return x, w, offs


def expected(x, w, offs, epilogue=None):
    return reference.grouped_gemm(x.double(), w.double(), offs, epilogue)


def assert_close(actual, wanted, offs, bound=None):
    """Every row by itself, so that no row hides behind the others; rows behind the last offset are exactly 0."""
    if bound is None:
        bound = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6, torch.float64: 1e-14}[actual.dtype]
    actual, end = actual.double(), int(offs[-1])
    assert actual.shape == wanted.shape
    assert not actual[end:].any()
    error = (actual[:end] - wanted[:end]).norm(dim=1)
    size = wanted[:end].norm(dim=1)
    assert (error <= bound * size + 1e-30).all(), f"largest error of a row {float((error / size).max()):.2e}"
