"""The portable grouped GEMM under Triton's interpreter: run by test_portable.py. float16 and float32: the interpreter
computes products of bfloat16 wrongly."""

import pytest
import torch

from tests import interpreter
from tests.grouped_gemm.problems import GROUPS, assert_close, expected, make
from tilecrew.grouped_gemm import kernel_portable, reference

interpreter.allow_loop_bounds()


def run(x, w, offs, dtype=None):
    out = torch.full((x.shape[0], w.shape[2]), float("nan"), dtype=dtype or x.dtype)
    kernel_portable.launch(x, w, offs, out).run()
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", [name for name, (lengths, tail) in GROUPS.items() if sum(lengths) + tail])
def test_groups(name, transposed, dtype):
    x, w, offs = make(*GROUPS[name], 40, 72, dtype=dtype, transposed=transposed)
    assert_close(run(x, w, offs), expected(x, w, offs), offs)


@pytest.mark.parametrize(("num_inner", "num_columns"), [(8, 8), (64, 64), (136, 200)])
def test_sizes(num_inner, num_columns):
    x, w, offs = make([70, 3], 2, num_inner, num_columns, dtype=torch.float16)
    assert_close(run(x, w, offs), expected(x, w, offs), offs)


def test_many_small_groups():
    x, w, offs = make([1, 0, 2] * 30, 3, 16, 8, dtype=torch.float32)
    assert_close(run(x, w, offs), expected(x, w, offs), offs)


def test_float32_accumulators_of_float16():
    x, w, offs = make([70, 3], 2, 40, 24, dtype=torch.float16)
    assert_close(run(x, w, offs, torch.float32), expected(x, w, offs), offs)


def test_a_bad_group_spoils_no_other():
    x, w, offs = make([50, 20, 50], 0, 16, 8, dtype=torch.float32)
    wanted = expected(x, w, offs)
    x[50:70] = float("nan")
    out = run(x, w, offs)
    assert out[50:70].isnan().all()
    for rows in (slice(0, 50), slice(70, 120)):
        assert_close(out[rows], wanted[rows], torch.tensor([50]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", [name for name, (lengths, _) in GROUPS.items() if sum(lengths)])
def test_weight_gradient(name, dtype):
    x, _, offs = make(*GROUPS[name], 72, 8, dtype=dtype)
    dy = torch.randn(x.shape[0], 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    dy[offs[-1] :] = float("nan")
    dw = torch.full((offs.shape[0], 72, 40), float("nan"), dtype=dtype)
    kernel_portable.weight_gradient_launch(x, dy, offs, dw).run()
    wanted = reference.weight_gradient(x.double(), dy.double(), offs)
    flat = torch.tensor([offs.shape[0]])
    assert_close(dw.flatten(1), wanted.flatten(1), flat)
    for group, (begin, end) in enumerate(reference.bounds(offs)):
        assert begin < end or not dw[group].any()
