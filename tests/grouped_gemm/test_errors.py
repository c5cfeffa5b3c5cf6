"""Bad input of the grouped GEMM: the error's type, and that its message names the argument and what was expected."""

import pytest
import torch

import tilecrew
from tests.grouped_gemm.problems import make
from tilecrew.grouped_gemm import (
    GELU,
    BandGate,
    Bias,
    CountGate,
    Epilogue,
    Gate,
    NotifyRowBlock,
    RouteWeight,
    SiLU,
    SwiGLU,
)


def call(**changes):
    x, w, offs = make([3, 0, 4], 1, 16, 32)
    tilecrew.grouped_gemm(**{"x": x, "w": w, "offs": offs, **changes})


class NoReference(Epilogue):
    apply = None


class NoTwinOfLanded(SiLU):
    landed = "a device function"


class Halves(SiLU):
    shrink = 2


class Thirds(SiLU):
    shrink = 3


class NoWait(Gate):
    def check(self, num_rows_of_blocks):
        return None


BF16 = {"dtype": torch.bfloat16}
ROWS = torch.zeros(4, dtype=torch.int32)
OFFS = torch.tensor([3, 3, 7], dtype=torch.int32)
CASES = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    ({"x": torch.zeros(8, **BF16)}, ValueError, r"x must have 2 dimensions \[M, K\]"),
    ({"w": torch.zeros(16, 32, **BF16)}, ValueError, r"w must have 3 dimensions \[E, K, N\]"),
    ({"w": torch.zeros(3, 24, 32, **BF16)}, ValueError, r"w must have shape \[E, K, N\] with K = 16 \(from x"),
    ({"w": torch.zeros(2, 16, 32, **BF16)}, ValueError, r"offs must have shape \[E\] with E = 2 \(from w"),
    ({"w": torch.zeros(3, 16, 32)}, TypeError, "w must have the dtype of x, torch.bfloat16, got torch.float32"),
    ({"x": torch.zeros(8, 16, dtype=torch.int32)}, TypeError, "x must be bfloat16 or .*, got int32"),
    ({"w": torch.zeros(3, 16, 20, **BF16)}, ValueError, "w must have N a positive multiple of 8, got 20"),
    ({"x": torch.zeros(8, 12, **BF16), "w": torch.zeros(3, 12, 32, **BF16)}, ValueError, "x must have K .* got 12"),
    ({"w": torch.zeros(0, 16, 32, **BF16)}, ValueError, "w must have at least one group"),
    ({"offs": OFFS.long()}, TypeError, "offs must be int32, got int64"),
    ({"offs": OFFS[:2]}, ValueError, r"offs must have shape \[E\] with E = 3"),
    ({"offs": OFFS[None]}, ValueError, "offs must have 1 dimensions"),
    ({"offs": None}, TypeError, "offs must be a torch.Tensor, got NoneType"),
    ({"offs": OFFS.flip(0)}, ValueError, r"offs must start at 0 or above and never decrease, got \[7, 3, 3\]"),
    ({"offs": OFFS - 4}, ValueError, "offs must start at 0 or above"),
    ({"offs": OFFS + 2}, ValueError, "offs must end at M = 8 or before, got 9"),
    ({"x": torch.zeros(16, 8, **BF16).t()}, ValueError, "x: its last dimension must be contiguous"),
    ({"x": torch.zeros(1, 16, **BF16).expand(8, -1)}, ValueError, "x must have strides of multiples of 16 bytes"),
    ({"x": torch.zeros(8, 20, **BF16)[:, :16]}, ValueError, r"x must have strides .* got \(20, 1\)"),
    ({"w": torch.zeros(16, 32, 3, **BF16).permute(2, 0, 1)}, ValueError, "w: N or K must be contiguous"),
    ({"x": torch.zeros(8, 24, **BF16)[:, 1:17]}, ValueError, "x must start at an address that is a multiple of 16"),
    ({"w": torch.zeros(3 * 16 * 32 + 1, **BF16)[1:].view(3, 16, 32)}, ValueError, "w must start at an address"),
    ({"out": torch.zeros(8, 31, **BF16)}, ValueError, r"out must have shape \(8, 32\), got \(8, 31\)"),
    ({"out": torch.zeros(8, 32)}, TypeError, "out must have the dtype of x"),
    ({"out": torch.zeros(8, 32, **BF16), "epilogue": SwiGLU()}, ValueError, r"out must have shape \(8, 16\)"),
    ({"out": torch.zeros(8, 40, **BF16)[:, 4:36]}, ValueError, "out must start at an address"),
    ({"out": 3}, TypeError, "out must be a torch.Tensor, got int"),
    ({"epilogue": SiLU}, TypeError, r"epilogue must be an instance, got the class SiLU: pass SiLU\(...\)"),
    ({"epilogue": torch.relu}, TypeError, "epilogue must be an instance of tilecrew.grouped_gemm.hooks.Epilogue"),
    ({"epilogue": NoReference()}, TypeError, "epilogue must have apply, which NoReference lacks"),
    ({"epilogue": Epilogue()}, TypeError, "epilogue must have apply, which Epilogue lacks"),
    ({"epilogue": Thirds()}, ValueError, "epilogue must have a shrink of 1 or 2, got 3"),
    (
        {"epilogue": Halves(), "w": torch.zeros(3, 16, 24, **BF16)},
        ValueError,
        "w must have N a multiple of 16 for an epilogue with shrink 2, got 24",
    ),
    ({"epilogue": NoTwinOfLanded()}, TypeError, "epilogue must have landed_reference, which NoTwinOfLanded lacks"),
    (
        {"epilogue": NotifyRowBlock(torch.zeros(1, dtype=torch.int32))},
        ValueError,
        r"rows must have at least max_row_blocks\(M, E\) = 3 elements, got 1",
    ),
    (
        {"epilogue": NotifyRowBlock(torch.zeros(3, dtype=torch.int32, device="meta"))},
        ValueError,
        "rows must be on the device of x, cpu, got meta",
    ),
    (
        {"epilogue": NotifyRowBlock(torch.zeros(3, dtype=torch.int32), epilogue=SwiGLU(32))},
        ValueError,
        r"N a multiple of 64 for SwiGLU\(run=32\), got N = 32",
    ),
    ({"gate": CountGate}, TypeError, "gate must be an instance, got the class CountGate"),
    ({"gate": NoWait()}, TypeError, "gate must have wait, which NoWait lacks"),
    ({"gate": SiLU()}, TypeError, "gate must be an instance of tilecrew.grouped_gemm.hooks.Gate"),
    ({"epilogue": Bias(torch.zeros(3, 16))}, ValueError, r"bias must have shape \[E, N\] = \(3, 32\), got \(3, 16\)"),
    ({"epilogue": RouteWeight(torch.zeros(7))}, ValueError, r"weight must have shape \[M\] = \(8,\), got \(7,\)"),
    ({"epilogue": SwiGLU(32)}, ValueError, r"N a multiple of 64 for SwiGLU\(run=32\), got N = 32"),
    (
        {"implementation": "fast"},
        ValueError,
        "implementation must be None or one of hopper, mma_sync, portable, torch, got 'fast'",
    ),
    ({"implementation": "hopper"}, ValueError, "'hopper' cannot run: it needs compute capability 9.0"),
    ({"implementation": "mma_sync"}, ValueError, "'mma_sync' cannot run: it needs compute capability 9.0 or 12.x"),
    ({"implementation": "portable"}, ValueError, "'portable' cannot run: Triton has no compiler for cpu tensors"),
]


@pytest.mark.parametrize(("changes", "error", "message"), CASES, ids=[message[:40] for _, _, message in CASES])
def test_bad_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_gradients_exclude_out_and_gates():
    x, w, offs = make([3, 0, 4], 1, 16, 32)
    x.requires_grad_()
    with pytest.raises(ValueError, match="out must be None where an input requires a gradient"):
        tilecrew.grouped_gemm(x, w, offs, out=torch.zeros(8, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="gate must be None where an input requires a gradient"):
        tilecrew.grouped_gemm(x, w, offs, gate=CountGate(torch.zeros(1, dtype=torch.int32)))
    with pytest.raises(ValueError, match="epilogue must have no landed where an input requires a gradient"):
        tilecrew.grouped_gemm(x, w, offs, epilogue=NotifyRowBlock(torch.zeros(3, dtype=torch.int32)))
    # The tensors of an inner epilogue count too.
    notify = NotifyRowBlock(torch.zeros(3, dtype=torch.int32), epilogue=RouteWeight(torch.ones(8, requires_grad=True)))
    with pytest.raises(ValueError, match="epilogue must have no landed where an input requires a gradient"):
        tilecrew.grouped_gemm(x.detach(), w, offs, epilogue=notify)


@pytest.mark.parametrize(
    ("make_hook", "error", "message"),
    [
        (lambda: Bias([1.0]), TypeError, "bias must be a torch.Tensor"),
        (lambda: Bias(torch.zeros(3, dtype=torch.int32)), TypeError, "bias must be bfloat16"),
        (lambda: GELU("erf"), ValueError, "approximate must be 'none' or 'tanh', got 'erf'"),
        (lambda: SwiGLU(4), ValueError, "run must be 1, 8, 16 or 32, got 4"),
        (lambda: CountGate(torch.zeros(3)), TypeError, "counters must be int32"),
        (
            lambda: CountGate(torch.zeros(2, dtype=torch.int32)).check_inputs(torch.empty(257, 8)),
            ValueError,
            "counters must have an element for each row block, at least 3 for 257 rows of x, got 2",
        ),
        (lambda: BandGate(torch.zeros(3, dtype=torch.int32), torch.zeros(1)), TypeError, "offs must be int32"),
        (
            lambda: BandGate(torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device="meta")),
            ValueError,
            "offs must be on the device of counters",
        ),
        (lambda: CountGate(torch.zeros(3, 2, dtype=torch.int32)), ValueError, "counters must be a contiguous vector"),
        (lambda: CountGate(torch.zeros(3, dtype=torch.int32), 0), ValueError, "timeout_seconds must be above 0"),
        (lambda: NotifyRowBlock([1]), TypeError, "rows must be a torch.Tensor"),
        (lambda: NotifyRowBlock(ROWS, ROWS.long()), TypeError, "arrivals must be int32, got int64"),
        (lambda: NotifyRowBlock(ROWS, ROWS), ValueError, "arrivals must be another tensor than rows"),
        (lambda: NotifyRowBlock(ROWS[::2]), ValueError, "rows must be a contiguous vector"),
        (lambda: NotifyRowBlock(ROWS, epilogue=SiLU), TypeError, "epilogue must be None or an instance"),
        (lambda: NotifyRowBlock(ROWS, epilogue=NotifyRowBlock(ROWS)), ValueError, "no landed of its own"),
    ],
)
def test_bad_hooks(make_hook, error, message):
    with pytest.raises(error, match=message):
        make_hook()
