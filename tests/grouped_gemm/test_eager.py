"""Eager calls of a repeated shape by plans: which calls share one, and that nothing else changes. On the CPU a stand-in
for the kernel copies x to out; tests/device/test_direct.py compares the bytes of launches, test_gpu.py runs them."""

import ctypes
import functools
from types import SimpleNamespace

import pytest
import torch

import tilecrew
from tests.grouped_gemm.problems import H200, make
from tilecrew import _eager
from tilecrew._plans import active_recording
from tilecrew.grouped_gemm import GELU, Bias, CountGate, Epilogue, NotifyRowBlock, RouteWeight, SiLU, operators


class CopyLaunch:
    def __init__(self, source, target, counts, locate):
        self.slots, self.num_bytes, self.counts = (locate(source), locate(target)), target.nbytes, counts

    @staticmethod
    def circumstances():
        return None

    @staticmethod
    def surroundings():
        return None

    def run(self, addresses, surroundings):
        source, target = (addresses[slot] for slot in self.slots)
        ctypes.memmove(target, source, self.num_bytes)
        self.counts.repeated += 1


@pytest.fixture
def counts(monkeypatch):
    """computed: calls that went through checks and schedule; repeated: launches by plans."""
    counts = SimpleNamespace(computed=0, repeated=0)

    def copy(x, w, offs, out, schedule, gate, epilogue):
        ctypes.memmove(out.data_ptr(), x.data_ptr(), out.nbytes)
        counts.computed += 1
        if active_recording() is not None:
            active_recording().add_launch(functools.partial(CopyLaunch, x, out, counts))

    monkeypatch.setattr(_eager, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(operators, "hardware_of", lambda device: H200)
    monkeypatch.setattr(operators, "_crew", copy)
    operators.PLANS.clear()
    yield counts
    operators.PLANS.clear()


def problem(seed=0, lengths=(10, 0, 20)):
    return make(list(lengths), 0, 32, 32, seed=seed)


def hooks(*values):
    gate = CountGate(torch.full((4,), 128, dtype=torch.int32))
    return {"gate": gate, "epilogue": NotifyRowBlock(torch.zeros(4, dtype=torch.int32), epilogue=RouteWeight(*values))}


@pytest.mark.parametrize("with_hooks", [False, True])
@pytest.mark.parametrize("with_out", [False, True])
def test_the_third_call_repeats_the_second(with_out, with_hooks, counts):
    results = []
    for seed in range(4):
        x, w, offs = problem(seed)
        options = hooks(torch.rand(30)) if with_hooks else {}
        out = torch.full((30, 32), float("nan"), dtype=x.dtype) if with_out else None
        results.append(tilecrew.grouped_gemm(x, w, offs, out=out, **options))
        assert torch.equal(results[-1], x)
        assert out is None or results[-1] is out
    assert (counts.computed, counts.repeated) == (2, 2)
    assert len({result.data_ptr() for result in results}) == 4


def run_three_times(*arguments, **options):
    for _ in range(3):
        tilecrew.grouped_gemm(*arguments, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, offs: ((x[:20], w, offs.clamp(max=20)), {}),
        lambda x, w, offs: ((x, w.transpose(1, 2), offs), {}),
        lambda x, w, offs: ((x.half(), w.half(), offs), {}),
        lambda x, w, offs: ((x, w, offs), {"out": torch.empty_like(x)}),
        lambda x, w, offs: ((x, w, offs), {"implementation": "mma_sync"}),
        lambda x, w, offs: ((x, w, offs), {"epilogue": SiLU()}),
        lambda x, w, offs: ((x, w, offs), {"gate": CountGate(torch.full((4,), 128, dtype=torch.int32))}),
    ],
)
def test_calls_that_differ_share_no_plan(change, counts):
    x, w, offs = problem()
    run_three_times(x, w, offs)
    computed = counts.computed
    arguments, options = change(x, w, offs)
    tilecrew.grouped_gemm(*arguments, **options)
    assert counts.computed == computed + 1


def test_hooks_of_other_functions_constants_or_timeouts_share_no_plan(counts):
    counters = torch.full((4,), 128, dtype=torch.int32)
    variants = [
        {"epilogue": SiLU()},
        {"epilogue": Bias(torch.zeros(3, 32))},
        {"epilogue": Bias(torch.zeros(32, 3).t())},
        {"epilogue": GELU("none")},
        {"epilogue": GELU("tanh")},
        {"gate": CountGate(counters)},
        {"gate": CountGate(counters, 5.0)},
        {"epilogue": NotifyRowBlock(torch.zeros(4, dtype=torch.int32), epilogue=SiLU())},
    ]
    arguments = problem()
    for number, options in enumerate(variants):
        tilecrew.grouped_gemm(*arguments, **options)
        assert counts.computed == 2 * number + 1, options
        tilecrew.grouped_gemm(*arguments, **options)
        tilecrew.grouped_gemm(*arguments, **options)
        assert counts.computed == 2 * number + 2, options


class Picky(SiLU):
    is_content = True

    def check(self, x, w):
        if not self.is_content:
            raise ValueError("not today")


def test_hooks_are_checked_each_time(counts):
    hook = Picky()
    run_three_times(*problem(), epilogue=hook)
    hook.is_content = False
    with pytest.raises(ValueError, match="not today"):
        tilecrew.grouped_gemm(*problem(), epilogue=hook)


def test_calls_with_gradients_and_tracing_go_the_long_way(counts):
    x, w, offs = problem()
    run_three_times(x, w, offs)
    assert counts.repeated == 1
    weight = torch.rand(30, requires_grad=True)

    class Hidden(Epilogue):
        """Its tensors are made anew, and carry a gradient that only the attribute shows."""

        apply = SiLU().apply

        def __init__(self):
            self.weight = weight

        def reference(self, accumulator, groups):
            return accumulator * self.weight[:, None]

    for options in ({"epilogue": RouteWeight(weight)}, {"epilogue": Hidden()}):
        assert tilecrew.grouped_gemm(x, w, offs, **options).requires_grad
    assert tilecrew.grouped_gemm(x.clone().requires_grad_(), w, offs).requires_grad
    assert counts.repeated == 1
    compiled = torch.compile(lambda x: tilecrew.grouped_gemm(x, w, offs), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x)
    assert counts.repeated == 1


def test_bad_input_is_refused_behind_a_plan(counts):
    x, w, offs = problem()
    run_three_times(x, w, offs)
    for changes, message in (
        ({"offs": offs.long()}, "offs must be int32"),
        ({"x": x[:, :24]}, "w must have shape"),
        ({"epilogue": SiLU}, "got the class SiLU"),
        ({"epilogue": Bias(torch.zeros(3, 8))}, "bias must have shape"),
        ({"implementation": "fast"}, "implementation must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            tilecrew.grouped_gemm(**{"x": x, "w": w, "offs": offs, **changes})
