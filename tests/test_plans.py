"""Plans: what is recorded, what makes no plan, what is repeated, and how long signatures are remembered."""

import ctypes
import functools
import gc
import subprocess
import sys
import weakref

import pytest
import torch

from tilecrew._plans import NotRepeatable, PlainCall, PlanCache, Recording, active_recording

KNOBS = {"device": 0}


class CopyLaunch:
    """A "kernel" on the CPU: copies bytes from one address to another."""

    def __init__(self, source, target, locate):
        self.slots, self.num_bytes = (locate(source), locate(target)), target.nbytes

    @staticmethod
    def circumstances():
        return KNOBS["device"]

    @staticmethod
    def surroundings():
        return None

    def run(self, addresses, surroundings):
        source, target = (addresses[slot] for slot in self.slots)
        ctypes.memmove(target, source, self.num_bytes)


def copy(source, target):
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    if active_recording() is not None:
        active_recording().add_launch(functools.partial(CopyLaunch, source, target))


def copy_twice(x):
    """x by way of a workspace."""
    workspace = torch.empty(x.shape)
    y = x.new_empty(x.shape)
    copy(x, workspace)
    copy(workspace.view(-1), y)
    return y, None


def call_of(*tensors, options=()):
    signature = (options, *[None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
    return PlainCall(signature, hash(signature), tensors, [0 if x is None else x.data_ptr() for x in tensors])


def plan_of(function, *tensors):
    with Recording(tensors) as recording:
        results = function(*tensors)
    assert active_recording() is None
    return recording.plan(results)


def run_plan(plan, *tensors):
    call = call_of(*tensors)
    return plan.run(call.tensors, call.addresses)


def test_a_plan_computes_from_the_new_inputs():
    plan = plan_of(copy_twice, torch.randn(3, 4))
    x = torch.randn(3, 4)
    y, absent = run_plan(plan, x)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()
    assert absent is None
    assert run_plan(plan, x)[0].data_ptr() != y.data_ptr()


def test_an_input_that_is_a_result_is_returned_itself():
    def update(state, x):
        copy(x, state)
        return (state,)

    plan = plan_of(update, torch.zeros(4), torch.ones(4))
    state, x = torch.zeros(4), torch.randn(4)
    (result,) = run_plan(plan, state, x)
    assert result is state
    assert torch.equal(state, x)


def test_what_nobody_sees_is_one_allocation(monkeypatch):
    """Each tensor of it in memory of its own, aligned, whatever sizes the others have."""

    def function(x, y):
        first, filled, second = torch.empty(3), torch.zeros(5), torch.empty(130, dtype=torch.float64)
        out = torch.empty(3), torch.empty(130, dtype=torch.float64), torch.empty(5)
        copy(x, first)
        copy(y, second)  # behind what is in the first, or it would be overwritten
        for source, target in zip((first, second, filled), out, strict=True):
            copy(source, target)
        return out

    def inputs():
        return torch.randn(3), torch.randn(130, dtype=torch.float64)

    plan = plan_of(function, *inputs())
    made = []
    for name in ("empty", "empty_strided"):
        function = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, f=function, **k: made.append(f(*a, **k)) or made[-1])
    x, y = inputs()
    results = run_plan(plan, x, y)
    assert [tensor.nbytes for tensor in made] == [20, 12, 1040, 20, 512 + 1536]
    assert plan.workspace.offsets == (0, 512)
    assert all(torch.equal(*pair) for pair in zip(results, (x, y, torch.zeros(5)), strict=True))


@pytest.mark.parametrize("make", [lambda x: x.new_zeros(8), lambda x: torch.empty(8).detach().fill_(2.5)])
def test_fresh_tensors_are_filled_again(make):
    def function(x):
        y, z = make(x), torch.empty(8)
        copy(x, z)
        return y, z

    (expected, _) = function(torch.ones(8))
    y, _ = run_plan(plan_of(function, torch.ones(8)), torch.ones(8))
    assert torch.equal(y, expected)


def with_copy(before=lambda x: x, after=lambda y: y):
    def function(x):
        x = before(x)
        y = torch.empty(x.shape)
        copy(x, y)
        return (after(y),)

    return function


OUTSIDE = torch.ones(8)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (with_copy(before=lambda x: x * 2), "aten.mul.Tensor is neither an allocation nor a view"),
        (with_copy(after=lambda y: y.zero_()), "something is filled that is not a fresh allocation"),
        (with_copy(before=lambda x: x.zero_()), "something is filled that is not a fresh allocation"),
        (with_copy(after=lambda y: y.view(2, 4)), "a result is a view of an allocation"),
        (with_copy(before=lambda x: OUTSIDE), r"a tensor of shape \(8,\) is no input and no allocation"),
        (with_copy(before=lambda x: x.as_strided((4,), (1,), 4)), r"shape \(4,\) is no input and no allocation"),
        (lambda x: (torch.empty(8),), "nothing was launched"),
    ],
    ids=["computes", "fills late", "fills input", "view", "other tensor", "offset", "no launch"],
)
def test_what_makes_no_plan(function, message):
    with pytest.raises(NotRepeatable, match=message):
        plan_of(function, torch.ones(8))


def test_inputs_at_one_address_make_no_plan():
    x = torch.ones(8)
    with pytest.raises(NotRepeatable, match="two tensors are at one address"):
        plan_of(lambda x, y: copy_twice(x), x, x)


def test_other_circumstances_end_a_plan(monkeypatch):
    plan = plan_of(copy_twice, torch.ones(8))
    monkeypatch.setitem(KNOBS, "device", 1)
    assert run_plan(plan, torch.ones(8)) is None


def test_an_error_inside_a_recording_ends_it():
    with pytest.raises(ZeroDivisionError), Recording(()):
        _ = 1 // 0
    assert active_recording() is None


def test_a_recording_does_not_load_torchs_compiler():
    program = """
import sys, torch, tilecrew._plans
with tilecrew._plans.Recording([]):
    torch.empty(3)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_second_call_is_recorded():
    plans, x = PlanCache(), torch.randn(8)
    recordings = []

    def function():
        recordings.append(active_recording() is not None)
        return copy_twice(x)

    for _ in range(2):
        assert plans.find(call_of(x)) is None
        assert torch.equal(plans.run(call_of(x), function)[0], x)
    assert recordings == [False, True]
    assert plans.find(call_of(torch.randn(8))) is not None
    assert plans.find(call_of(torch.randn(9))) is None
    assert plans.find(None) is None


def test_a_call_without_a_plan_is_not_recorded_again():
    plans, x = PlanCache(), torch.randn(8)
    recordings = []

    def function():
        recordings.append(active_recording() is not None)
        return (x * 2,)

    for _ in range(4):
        plans.run(call_of(x), function)
    assert recordings == [False, True, False, False]


def test_inputs_at_one_address_are_recorded_when_they_part():
    plans, x, y = PlanCache(), torch.randn(8), torch.randn(8)
    for _ in range(3):
        plans.run(call_of(x, x), lambda: copy_twice(x))
    assert plans.find(call_of(x, y)) is None
    plans.run(call_of(x, y), lambda: copy_twice(x))
    assert torch.equal(run_plan(plans.find(call_of(x, y)), y, x)[0], y)


def test_the_least_recently_used_signature_is_dropped():
    plans = PlanCache(max_signatures=2)
    x = {size: torch.randn(size) for size in (8, 9, 10)}

    def run(size):
        plans.run(call_of(x[size]), lambda: copy_twice(x[size]))

    for size in (8, 8, 9, 9):
        run(size)
    assert plans.find(call_of(x[8])) is not None  # now the one used last
    run(10)
    assert len(plans) == 2
    assert plans.find(call_of(x[8])) is not None
    assert plans.find(call_of(x[9])) is None


def test_signatures_with_one_hash_are_told_apart():
    plans, x, y = PlanCache(), torch.randn(8), torch.randn(8)
    first = PlainCall(("a",), 1, (x,), [x.data_ptr()])
    second = PlainCall(("b",), 1, (y,), [y.data_ptr()])
    for _ in range(2):
        plans.run(first, lambda: copy_twice(x))
    assert plans.find(first) is not None
    assert plans.find(second) is None


def test_no_tensor_is_kept_alive():
    plans, references = PlanCache(), []
    for _ in range(3):
        x = torch.randn(8)
        plan = plans.find(call_of(x))
        results = plans.run(call_of(x), functools.partial(copy_twice, x)) if plan is None else run_plan(plan, x)
        references += [weakref.ref(x), weakref.ref(results[0])]
        del x, results
    gc.collect()
    assert plans.num_plans == 1
    assert [reference() for reference in references] == [None] * 6
