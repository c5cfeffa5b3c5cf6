"""The public function on the CPU: values against float64, gradients, operators, torch.compile."""

import pytest
import torch

import tilecrew
from tests.grouped_gemm.problems import GROUPS, assert_close, expected, make
from tilecrew.grouped_gemm import (
    GELU,
    BandGate,
    Bias,
    CountGate,
    Identity,
    NoGate,
    NotifyRowBlock,
    RouteWeight,
    SiLU,
    SwiGLU,
    max_row_blocks,
    reference,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def epilogues(num_groups, num_rows, num_columns, dtype=torch.float32):
    return [
        Identity(),
        Bias(torch.randn(num_groups, num_columns, dtype=dtype)),
        SiLU(),
        GELU(),
        GELU("tanh"),
        SwiGLU(),
        SwiGLU(8),
        RouteWeight(torch.rand(num_rows, dtype=dtype)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_values(name, transposed, dtype):
    x, w, offs = make(*GROUPS[name], 40, 24, dtype=dtype, transposed=transposed)
    assert_close(tilecrew.grouped_gemm(x, w, offs), expected(x, w, offs), offs)


def test_agrees_with_torch():
    x, w, offs = make([16, 0, 32, 48], 0, 64, 32)
    assert_close(tilecrew.grouped_gemm(x, w, offs), torch.nn.functional.grouped_mm(x, w, offs=offs).double(), offs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogues(dtype):
    x, w, offs = make([10, 0, 120, 33], 20, 40, 48, dtype=dtype)
    x = torch.where(x.isnan(), 0, x)
    for hook in epilogues(4, x.shape[0], 48):
        wanted = expected(x, w, offs, hook)
        assert_close(
            tilecrew.grouped_gemm(x, w, offs, epilogue=hook), wanted, offs, bound=None if dtype != DTYPES[3] else 1e-6
        )


def test_swiglu_of_interleaved_weights_is_swiglu():
    x, _, offs = make([10, 7], 0, 16, 32, dtype=torch.float64)
    gate, up = torch.randn(2, 16, 32, dtype=torch.float64), torch.randn(2, 16, 32, dtype=torch.float64)
    wanted = torch.nn.functional.silu(reference.grouped_gemm(x, gate, offs)) * reference.grouped_gemm(x, up, offs)
    for run in (1, 8, 16, 32):
        hook = SwiGLU(run)
        torch.testing.assert_close(tilecrew.grouped_gemm(x, hook.interleave(gate, up), offs, epilogue=hook), wanted)


def test_out_is_written_and_returned():
    x, w, offs = make([10, 20], 5, 16, 32)
    wide = torch.full((35, 48), float("nan"), dtype=x.dtype)
    out = wide[:, 8:40]
    assert tilecrew.grouped_gemm(x, w, offs, out=out) is out
    assert torch.equal(out, tilecrew.grouped_gemm(x, w, offs))
    assert wide[:, :8].isnan().all()
    assert wide[:, 40:].isnan().all()
    half = torch.empty(35, 16, dtype=x.dtype)
    assert tilecrew.grouped_gemm(x, w, offs, epilogue=SwiGLU(), out=half) is half
    assert torch.equal(half, tilecrew.grouped_gemm(x, w, offs, epilogue=SwiGLU()))


def test_gates():
    x, w, offs = make([130, 0, 20], 0, 16, 8)
    plain = tilecrew.grouped_gemm(x, w, offs)
    assert torch.equal(tilecrew.grouped_gemm(x, w, offs, gate=NoGate()), plain)
    counters = torch.tensor([128, 2, 20], dtype=torch.int32)
    assert torch.equal(tilecrew.grouped_gemm(x, w, offs, gate=CountGate(counters)), plain)
    counters[1] = 1
    with pytest.raises(RuntimeError, match="row block 1 has 1 of 2 rows"):
        tilecrew.grouped_gemm(x, w, offs, gate=CountGate(counters))


def test_a_gate_of_bands():
    x, w, offs = make([256, 0, 130], 0, 16, 8)
    counters = torch.tensor([128, 128, 128, 2], dtype=torch.int32)
    plain = tilecrew.grouped_gemm(x, w, offs)
    assert torch.equal(tilecrew.grouped_gemm(x, w, offs, gate=BandGate(counters, offs)), plain)
    counters[3] = 1
    with pytest.raises(RuntimeError, match="row block 3 has 1 of 2 rows"):
        tilecrew.grouped_gemm(x, w, offs, gate=BandGate(counters, offs))


def test_notifications_open_the_gate_of_the_next_product():
    x, w, offs = make([130, 0, 20], 3, 16, 64)
    x = torch.where(x.isnan(), 0, x)
    rows = torch.zeros(max_row_blocks(153, 3), dtype=torch.int32)
    second_w = torch.randn(3, 32, 8).to(x.dtype)
    with pytest.raises(RuntimeError, match="row block 0 has 0 of 128 rows"):
        tilecrew.grouped_gemm(x, w, offs, gate=CountGate(rows))
    h = tilecrew.grouped_gemm(x, w, offs, epilogue=NotifyRowBlock(rows, epilogue=SwiGLU(8)))
    assert rows.tolist() == [128, 2, 20, 0]
    assert torch.equal(h, tilecrew.grouped_gemm(x, w, offs, epilogue=SwiGLU(8)))
    out = tilecrew.grouped_gemm(h, second_w, offs, gate=CountGate(rows))
    assert torch.equal(out, tilecrew.grouped_gemm(h, second_w, offs))


@pytest.mark.parametrize(("lengths", "most"), [([1, 255], 3), ([128, 128], 3), ([0, 0], 0), ([1, 0, 0], 1), ([5], 1)])
def test_max_row_blocks(lengths, most):
    """No distribution of the rows over the groups has more, and one has as many."""
    num_rows, num_groups = sum(lengths), len(lengths)
    assert max_row_blocks(num_rows, num_groups) == most
    ones = min(num_rows, num_groups)
    worst = [1] * (ones - 1) + [num_rows - max(ones - 1, 0)]
    assert sum(-(-length // 128) for length in worst) == most
    assert sum(-(-length // 128) for length in lengths) <= most


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed):
    x, w, offs = make([3, 0, 2], 2, 8, 16, dtype=torch.float64, transposed=transposed)
    x = torch.where(x.isnan(), 0, x).requires_grad_()
    w.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: tilecrew.grouped_gemm(x, w, offs), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: tilecrew.grouped_gemm(x, w, offs), (x, w))


def test_gradients_through_epilogues():
    x, w, offs = make([3, 0, 2], 2, 8, 16, dtype=torch.float64)
    x = torch.where(x.isnan(), 0, x).requires_grad_()
    w.requires_grad_()
    for hook in epilogues(3, 7, 16, torch.float64):
        tensors = [value.requires_grad_() for value in vars(hook).values() if torch.is_tensor(value)]
        assert torch.autograd.gradcheck(
            lambda x, w, *_, h=hook: tilecrew.grouped_gemm(x, w, offs, epilogue=h), (x, w, *tensors)
        )


def test_empty_groups_and_rows_behind_get_gradients_of_exactly_zero():
    x, w, offs = make([10, 0, 30], 7, 16, 24)
    x = torch.where(x.isnan(), 0, x).requires_grad_()
    w.requires_grad_()
    tilecrew.grouped_gemm(x, w, offs).float().square().sum().backward()
    assert not w.grad[1].any()
    assert not x.grad[40:].any()
    assert w.grad[0].any()
    assert x.grad[:40].any(1).all()


def test_operators_are_registered_rightly():
    x, w, offs = make([3, 0, 2], 2, 8, 16, dtype=torch.float64)
    x = torch.where(x.isnan(), 0, x).requires_grad_()
    w.requires_grad_()
    torch.library.opcheck(torch.ops.tilecrew.grouped_gemm, (x, w, offs, None))
    torch.library.opcheck(torch.ops.tilecrew.grouped_gemm_out, (x.detach(), w.detach(), offs, x.new_zeros(7, 16), None))
    dy = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.tilecrew.grouped_gemm_weight_gradient, (x, dy, offs))


def test_torch_compile_traces_through():
    x, w, offs = make([3, 0, 20], 2, 16, 32, dtype=torch.float32)
    x = torch.where(x.isnan(), 0, x).requires_grad_()
    w.requires_grad_()
    compiled = torch.compile(lambda x, w: tilecrew.grouped_gemm(x, w, offs).relu(), fullgraph=True, backend="aot_eager")
    compiled(x, w).sum().backward()
    gradients = x.grad, w.grad
    x.grad = w.grad = None
    tilecrew.grouped_gemm(x, w, offs).relu().sum().backward()
    assert torch.equal(x.grad, gradients[0])
    assert torch.equal(w.grad, gradients[1])


def test_explain():
    schedule = tilecrew.explain_grouped_gemm(*make([3], 0, 16, 32))
    assert schedule.implementation == "torch"
    assert "compute capability 9.0" in str(schedule)
