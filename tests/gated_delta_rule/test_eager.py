"""Eager calls past torch's dispatcher: which may, what tells them apart, and that nothing else changes.

On the CPU a stand-in for the kernels, which multiplies v by a factor of the options; on a GPU the kernels.
"""

import ctypes
import dataclasses
import functools
import gc
import sys
import types
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilecrew import _eager as eager
from tilecrew import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tilecrew._hardware import Hardware
from tilecrew._plans import NotRepeatable, Recording, active_recording
from tilecrew.gated_delta_rule import operators, recurrent_operators
from tilecrew.gated_delta_rule.arguments import ForwardResult
from tilecrew.gated_delta_rule.schedule import Schedule
from tilecrew.testing import random_arguments

B, T, H, HV, K, V = 2, 6, 2, 4, 16, 24


class CopyLaunch:
    def __init__(self, source, target, locate):
        self.slots, self.num_bytes = (locate(source), locate(target)), target.nbytes

    @staticmethod
    def circumstances():
        return None

    @staticmethod
    def surroundings():
        return None

    def run(self, addresses, surroundings):
        source, target = (addresses[slot] for slot in self.slots)
        ctypes.memmove(target, source, self.num_bytes)
        STAND_IN.repeated += 1


class StandIn:
    """o is v: what every kernel gives here. Counts calls that computed, and launches that were repeated."""

    def reset(self):
        self.calls, self.repeated, self.schedules = 0, 0, []

    def copy(self, source):
        target = torch.empty_like(source)
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        self.calls += 1
        if active_recording() is not None:
            active_recording().add_launch(functools.partial(CopyLaunch, source, target))
        return target

    def chunk(self, arguments, schedule):
        self.schedules.append(schedule.implementation)
        final_state = torch.empty(B, HV, K, V) if arguments.output_final_state else None
        return ForwardResult(self.copy(arguments.v), final_state)

    def recurrent(self, arguments, implementation):
        return self.copy(arguments.v), None


STAND_IN = StandIn()


@pytest.fixture
def stand_in(monkeypatch):
    """Calls with CPU tensors as if they were on a Hopper GPU."""
    hopper = Hardware("cuda", "cuda", (9, 0), 132, 232448, "Hopper")
    monkeypatch.setattr(eager, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(operators, "_run", STAND_IN.chunk)
    monkeypatch.setattr(operators, "hardware_of", lambda device: hopper)
    monkeypatch.setattr(recurrent_operators, "_checked_forward", STAND_IN.recurrent)
    STAND_IN.reset()
    clear_plans()
    yield STAND_IN
    clear_plans()


def clear_plans():
    operators.PLANS.clear()
    recurrent_operators.PLANS.clear()


def inputs(**changes):
    call = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, HV, V),
        "g": -torch.rand(B, T, HV),
        "beta": torch.rand(B, T, HV),
    }
    return {**call, **changes}


def plain(call):
    return eager.plain_call(tuple(call[name] for name in ("q", "k", "v", "g", "beta")), ())


def warm(call, times=2):
    for _ in range(times):
        chunk_gated_delta_rule(**call)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_plans_know_all_that_makes_launches(mode):
    """Under inference_mode torch takes fewer functions apart, `flatten` for one, and a recording meets them whole."""
    pytest.importorskip("triton")
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare, kernel_states

    arguments = random_arguments(1, 130, 1, 2, dtype=torch.bfloat16, with_initial_state=True, output_final_state=True)
    pieces = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    with mode(), Recording([]) as recording:
        result = kernel_forward_roles.allocate_result(arguments)
        plain, prepared = kernel_prepare.allocate(arguments), kernel_prepare.allocate_gated(arguments)
        for workspace in (plain, prepared):
            kernel_prepare.launch(arguments, workspace, result.o)
        kernel_forward_roles.launch(arguments, plain, result, 64)
        for block_v in (64, 128):
            kernel_forward_scan.launch(arguments, prepared, result, block_v)
        kernel_states.launch(arguments, prepared, pieces, kernel_states.allocate(arguments, 1))
    with pytest.raises(NotRepeatable, match="nothing was launched"):
        recording.plan([])


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_third_call_is_repeated(function, mode, stand_in):
    with mode():
        for _ in range(4):
            call = inputs()
            o, final_state = function(**call)
            assert torch.equal(o, call["v"])
            assert final_state is None
            assert o.is_inference() == torch.is_inference_mode_enabled()
    assert (stand_in.calls, stand_in.repeated) == (2, 2)


def test_outputs_that_were_not_asked_for_stay_away(stand_in):
    warm(inputs(output_final_state=True))
    warm(inputs())
    assert chunk_gated_delta_rule(**inputs(output_final_state=True))[1].shape == (B, HV, K, V)
    assert chunk_gated_delta_rule(**inputs())[1] is None
    assert len(chunk_gated_delta_rule(**inputs())) == 2
    assert stand_in.repeated == 3


def test_a_state_in_place_is_returned_itself(stand_in):
    for _ in range(3):
        state = torch.zeros(B, HV, K, V)
        assert fused_recurrent_gated_delta_rule(**inputs(), initial_state=state, inplace_state=True)[1] is state
    assert stand_in.repeated == 1


@pytest.mark.parametrize(
    "changes",
    [
        {name: torch.randn(shape).bfloat16() for name, shape in (("q", (B, T, H, K)), ("k", (B, T, H, K)))}
        | {"v": torch.randn(B, T, HV, V).bfloat16()},
        {"g": -torch.rand(B, T, HV).double()},
        {"v": torch.randn(B, T, 2 * HV, V)[:, :, ::2]},
        {"q": torch.randn(B, T, 1, K), "k": torch.randn(B, T, 1, K)},
        {"scale": 0.5},
        {"output_final_state": True},
        {"state_v_first": True},
        {"use_qk_l2norm_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True},
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)},
        {"initial_state": torch.zeros(B, HV, K, V)},
        {"chunk_size": 32},
        {"implementation": "chunked"},
        {"output_h": True},
        {"history_tolerance": 1e-4},
        {"batch_invariant": True},
        {"v": torch.randn(B * T * HV * V + 1)[1:].view(B, T, HV, V)},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_other_calls_do_not_share_a_plan(changes, stand_in):
    warm(inputs())
    chunk_gated_delta_rule(**inputs(**changes))
    assert stand_in.repeated == 0
    chunk_gated_delta_rule(**inputs())
    assert stand_in.repeated == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(B, T, H, 4)}, ValueError, r"k must .* K = 16 .* got shape \(2, 6, 2, 4\)"),
        ({"v": torch.zeros(B, T, HV, 2 * V)[..., ::2]}, ValueError, "v must be contiguous in its last dimension"),
        ({"g": torch.zeros(B, T, HV).int()}, TypeError, "g must be .* got int32"),
        ({"g": torch.zeros(B, T, HV, device="meta")}, ValueError, "g must be on the device of q, cpu, got meta"),
        ({"beta": None}, TypeError, "beta must be a torch.Tensor, got NoneType"),
        ({"scale": True}, TypeError, "scale must be a float or None, got bool"),
        ({"scale": [1.0]}, TypeError, "scale must be a float or None, got list"),
        ({"cp_context": "group"}, ValueError, "cp_context must be None"),
        ({"chunk_size": True}, ValueError, "chunk_size must be one of"),
        ({"implementation": "fast"}, ValueError, "implementation must be None or one of"),
        ({"history_tolerance": False}, TypeError, "history_tolerance must be a float, got bool"),
        ({"batch_invariant": 0}, TypeError, "batch_invariant must be a bool, got int"),
        ({"A_log": torch.zeros(HV)}, ValueError, "A_log is used only with use_gate_in_kernel=True"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_errors_are_the_same_behind_a_plan(changes, error, message, stand_in):
    # scale 1.0 and chunk_size 64 equal values that are refused.
    warm(inputs(scale=1.0, chunk_size=64), times=3)
    assert stand_in.repeated == 1
    for _ in range(3):
        with pytest.raises(error, match=message):
            chunk_gated_delta_rule(**inputs(**{"scale": 1.0, **changes}))
    assert stand_in.repeated == 1


def test_offsets_on_the_host_are_checked_each_time(stand_in):
    def call(*offsets):
        tensors = {name: x[:1] if x.shape[0] == B else x for name, x in inputs().items()}
        return chunk_gated_delta_rule(
            **tensors, cu_seqlens=torch.tensor(offsets), cu_seqlens_cpu=torch.tensor(offsets).clone()
        )

    for offsets in ((0, 2, 6), (0, 3, 6), (0, 4, 5)):
        call(*offsets)
    assert stand_in.repeated == 1
    with pytest.raises(ValueError, match="cu_seqlens must not decrease, got 5 then 4"):
        call(0, 5, 4)
    assert stand_in.repeated == 1


def test_kernels_do_not_get_offsets_on_the_host(monkeypatch):
    given = []
    kernel = types.SimpleNamespace(forward=lambda arguments, schedule: given.append(arguments))
    monkeypatch.setitem(sys.modules, "tilecrew.gated_delta_rule.kernel_portable", kernel)
    arguments = random_arguments(lengths=[3, 4])
    arguments = dataclasses.replace(arguments, cu_seqlens_cpu=arguments.cu_seqlens)
    operators._run(arguments, Schedule("portable", 64, 64, ""))
    assert given[0].cu_seqlens_cpu is None
    assert given[0].cu_seqlens is arguments.cu_seqlens


def test_a_misaligned_address_gets_its_own_schedule(stand_in):
    def call(offset):
        tensors = {
            name: torch.randn(1 * 64 * heads * 128 + 8).bfloat16()[offset : offset + 64 * heads * 128]
            for name, heads in (("q", 1), ("k", 1), ("v", 2))
        }
        tensors = {name: x.view(1, 64, -1, 128) for name, x in tensors.items()}
        gates = {"g": -torch.rand(1, 64, 2), "beta": torch.rand(1, 64, 2)}
        chunk_gated_delta_rule(**tensors, **gates)

    for _ in range(3):
        call(0)
    call(1)
    assert stand_in.schedules[0] in ("scan", "roles")
    assert stand_in.schedules[2:] == ["portable"]
    assert stand_in.repeated == 1


class Subclass(torch.Tensor):
    pass


class Watcher(TorchDispatchMode):
    seen = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = (*self.seen, str(func))
        return func(*args, **(kwargs or {}))


def test_what_the_dispatcher_must_see(stand_in):
    assert plain(inputs()) is not None
    with torch.no_grad():
        assert plain(inputs(q=torch.randn(B, T, H, K, requires_grad=True))) is not None
    assert plain(inputs(q=torch.nn.Parameter(torch.randn(B, T, H, K), requires_grad=False))) is not None
    for name, x in inputs().items():
        assert plain(inputs(**{name: x.clone().requires_grad_()})) is None
        assert plain(inputs(**{name: x.as_subclass(Subclass)})) is None
        assert plain(inputs(**{name: torch._neg_view(x)})) is None
        assert plain(inputs(**{name: 1.0})) is None
    assert plain({name: x.to("meta") for name, x in inputs().items()}) is None
    assert plain(inputs(g=torch.zeros(B, T, HV).to_sparse())) is None
    with Watcher():
        assert plain(inputs()) is None
    with torch.device("cpu"):
        assert plain(inputs()) is None
    with torch.autograd.forward_ad.dual_level():
        assert plain(inputs()) is None
    with torch.autocast("cpu"):
        assert plain(inputs()) is None
    assert plain(inputs()) is not None


def test_fake_tensors_stay_with_the_operator(stand_in):
    warm(inputs(), times=3)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in inputs().items()}
        o, _ = chunk_gated_delta_rule(**fake)
    assert isinstance(o, torch._subclasses.FakeTensor)
    o, _ = chunk_gated_delta_rule(**fake)  # outside the mode, which the tensors bring with them
    assert isinstance(o, torch._subclasses.FakeTensor)
    assert stand_in.repeated == 1


def test_modes_see_the_operator_behind_a_plan(stand_in):
    warm(inputs(), times=3)
    with Watcher() as watcher:
        chunk_gated_delta_rule(**inputs())
    assert "tilecrew.chunk_gated_delta_rule_forward.default" in watcher.seen
    assert stand_in.repeated == 1


def test_gradients_behind_a_plan(stand_in, monkeypatch):
    warm(inputs(), times=3)
    monkeypatch.undo()
    call = inputs(v=torch.randn(B, T, HV, V, requires_grad=True))
    o, _ = chunk_gated_delta_rule(**call)
    o.sum().backward()
    assert call["v"].grad.abs().sum() > 0


def test_vmap_stays_with_the_operator(stand_in):
    warm(inputs(), times=3)
    call, v = inputs(), torch.randn(3, B, T, HV, V)
    # torch has no batching rule for the operator and says that its loop over the batch is slow.
    o = torch.vmap(lambda v: chunk_gated_delta_rule(**{**call, "v": v})[0])(v)
    assert torch.equal(o, v)
    assert stand_in.repeated == 1


def test_a_compiled_function_has_the_operator(stand_in):
    warm(inputs(), times=3)
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend=backend)
    call = inputs()
    assert torch.equal(compiled(**call)[0], call["v"])
    assert "tilecrew.chunk_gated_delta_rule_forward" in graphs[0]
    assert stand_in.repeated == 1


def test_a_traced_function_has_the_operator(stand_in):
    warm(inputs(), times=3)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *call: chunk_gated_delta_rule(*call)[0])(
        *inputs().values()
    )
    assert "tilecrew.chunk_gated_delta_rule_forward" in graph.code


def test_no_tensor_is_kept_alive(stand_in):
    references = []
    for _ in range(4):
        call = inputs()
        results = chunk_gated_delta_rule(**call)
        references += [weakref.ref(x) for x in (*call.values(), results[0])]
        del call, results
    gc.collect()
    assert stand_in.repeated == 2
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norms", [False, True])
def test_repeated_calls_equal_the_first_ones(dtype, norms):
    clear_plans()
    options = {"use_qk_l2norm_in_kernel": norms, "output_final_state": True}
    problems = [
        random_arguments(1, 200, 2, 4, dtype=dtype, device="cuda", with_initial_state=True, seed=seed)
        for seed in range(4)
    ]

    def run(x, first=False):
        if first:
            clear_plans()
        return chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, **options)

    expected = [run(problem, first=True) for problem in problems]
    clear_plans()
    for problem, results in zip(problems, expected, strict=True):
        for actual, value in zip(run(problem), results, strict=True):
            assert torch.equal(actual, value)
    assert operators.PLANS.num_plans == 1


@pytest.mark.gpu
def test_repeated_decode_on_a_side_stream_and_in_a_graph():
    clear_plans()
    problems = [random_arguments(3, 1, 2, 4, device="cuda", with_initial_state=True, seed=seed) for seed in range(4)]

    def run(x, state):
        return fused_recurrent_gated_delta_rule(
            x.q, x.k, x.v, x.g, beta=x.beta, initial_state=state, inplace_state=True
        )[0]

    expected = []
    for problem in problems:
        clear_plans()
        state = problem.initial_state.clone()
        expected.append((run(problem, state), state))
    clear_plans()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for problem, (o, final_state) in zip(problems, expected, strict=True):
            state = problem.initial_state.clone()
            assert torch.equal(run(problem, state), o)
            assert torch.equal(state, final_state)
    assert recurrent_operators.PLANS.num_plans == 1
    torch.cuda.synchronize()
    state, graph = problems[0].initial_state.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = run(problems[0], state)
    state.copy_(problems[0].initial_state)
    graph.replay()
    assert torch.equal(o, expected[0][0])
    assert torch.equal(state, expected[0][1])
