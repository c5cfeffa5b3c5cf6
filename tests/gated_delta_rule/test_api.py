"""The public functions against the token recurrence in float64: options, gradients, edges, promises about memory."""

import inspect
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch

from tests import devices
from tilecrew import chunk_gated_delta_rule, explain_chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tilecrew.gated_delta_rule import gates, operators, reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.schedule import Schedule
from tilecrew.testing import as_float64, random_arguments, relative_error

device = devices.device
SMALL = {"num_tokens": 77, "num_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 24}
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
# Against float64, with inputs exact in both: float32 arithmetic (strong gates lose most, in differences of their
# cumulative sums) and, for the half types, rounding of the operands and the result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def public(arguments: ForwardArguments, **changes):
    """Keywords of chunk_gated_delta_rule for checked arguments."""
    call = dict(vars(arguments))
    call["use_qk_l2norm_in_kernel"] = call.pop("use_qk_l2norm")
    call["use_beta_sigmoid_in_kernel"] = call.pop("use_beta_sigmoid")
    return call | {"use_gate_in_kernel": arguments.A_log is not None} | changes


def decode(arguments: ForwardArguments, **changes):
    """Keywords of fused_recurrent_gated_delta_rule for the same."""
    call = public(arguments, **changes)
    for name in ("cu_seqlens_cpu", "chunk_size", "output_h", "history_tolerance", "batch_invariant"):
        del call[name]
    return call


def assert_matches(arguments, results, truth):
    tolerance = TOLERANCE[arguments.q.dtype]
    if arguments.q.is_cuda and arguments.q.dtype == torch.float32:
        # The kernels take differences of cumulative gates, which lose an ulp or two of the largest sum.
        tolerance = max(tolerance, float(arguments.g.clamp(min=-100).sum(1).abs().max()) * 2**-22)
    assert results[0].dtype == arguments.q.dtype
    assert relative_error(results[0], truth.o) < tolerance
    if arguments.output_final_state:
        assert results[1].dtype == (torch.float64 if arguments.q.dtype == torch.float64 else torch.float32)
        assert relative_error(results[1], truth.final_state, head_dim=1) < tolerance
    else:
        assert results[1] is None
    if arguments.output_h:
        assert results[2].dtype == arguments.q.dtype
        assert relative_error(results[2], truth.h) < tolerance


PROBLEMS = {
    "plain": {},
    "states": {"with_initial_state": True, "output_final_state": True},
    "v_first": {"with_initial_state": True, "output_final_state": True, "state_v_first": True},
    "h": {"with_initial_state": True, "output_h": True},
    "batch": {"batch": 3, "output_final_state": True, "output_h": True},
    "one_token": {"num_tokens": 1, "with_initial_state": True, "output_final_state": True},
    "varlen": {"lengths": [1, 64, 0, 65, 5], "tail": 3, "with_initial_state": True, "output_final_state": True},
    "varlen_h": {"lengths": [1, 64, 0, 65, 5], "tail": 3, "output_h": True},
    "small_chunks": {"chunk_size": 16, "output_h": True},
    "all_gates": {"normalised": False, "use_qk_l2norm": True, "use_beta_sigmoid": True, "allow_neg_eigval": True},
    "sigmoid": {"use_beta_sigmoid": True},
    "scale": {"scale": 0.3},
    "strong_gates": {"gate_strength": 400.0, "with_initial_state": True, "output_final_state": True},
}


def problem(name, **options):
    arguments = random_arguments(**(SMALL | PROBLEMS[name] | options))
    if name == "all_gates":
        device = arguments.q.device
        wide = arguments.g.dtype
        a_log = torch.linspace(-1, 1, 4, dtype=wide, device=device)
        return replace(arguments, A_log=a_log, dt_bias=a_log.flip(0), beta=arguments.beta * 4 - 2)
    return arguments


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matches_the_recurrence(name, dtype, device):
    arguments = problem(name, dtype=dtype, device=device)
    truth = reference.recurrent_gated_delta_rule(as_float64(arguments, "cpu"))
    assert_matches(arguments, chunk_gated_delta_rule(**public(arguments)), truth)
    if not arguments.output_h:
        assert_matches(arguments, fused_recurrent_gated_delta_rule(**decode(arguments)), truth)


@pytest.mark.parametrize("name", ["varlen", "all_gates"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_small_types_of_every_argument(name, index_dtype, device):
    """fp16 inputs, bf16 gates and states: converted exactly, computed in float32."""
    arguments = problem(name, dtype=torch.float16, device=device, with_initial_state=True)
    small = {field: getattr(arguments, field) for field in ("g", "beta", "initial_state", "A_log", "dt_bias")}
    small = {field: None if x is None else x.bfloat16() for field, x in small.items()}
    arguments = replace(arguments, **small)
    if arguments.cu_seqlens is not None:
        arguments = replace(arguments, cu_seqlens=arguments.cu_seqlens.to(index_dtype))
    truth = reference.recurrent_gated_delta_rule(as_float64(arguments, "cpu"))
    assert_matches(arguments, chunk_gated_delta_rule(**public(arguments)), truth)


def test_argument_order_is_that_of_flash_linear_attention():
    chunk = list(inspect.signature(chunk_gated_delta_rule).parameters)[:16]
    expected = (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel"
        " allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context"
    )
    assert chunk == expected.split()
    recurrent = list(inspect.signature(fused_recurrent_gated_delta_rule).parameters)[:18]
    expected = (
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel"
        " A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens"
    )
    assert recurrent == expected.split()


def test_views_of_one_projection(device):
    """q, k, v as a model has them: slices of one tensor, contiguous in the last dimension only."""
    mixed = torch.randn(2, 40, 2 * 2 * 16 + 4 * 24, device=device)
    q, k, v = mixed.split((32, 32, 96), dim=-1)
    q, k, v = q.unflatten(-1, (2, 16)), k.unflatten(-1, (2, 16)), v.unflatten(-1, (4, 24))
    gate = torch.rand(2, 40, 8, device=device)
    g, beta = -gate[..., :4], gate[..., 4:]
    options = {"use_qk_l2norm_in_kernel": True}
    expected, _ = chunk_gated_delta_rule(*(x.contiguous() for x in (q, k, v, g, beta)), **options)
    assert torch.equal(chunk_gated_delta_rule(q, k, v, g, beta, **options)[0], expected)
    step, _ = fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **options)
    assert relative_error(step, expected) < 1e-5


@pytest.mark.parametrize("lengths", [None, [], [0, 0]], ids=["batch", "no_sequence", "empty_sequences"])
@pytest.mark.parametrize("with_initial_state", [False, True])
def test_no_token(lengths, with_initial_state, device):
    arguments = random_arguments(
        **SMALL | {"num_tokens": 0}, lengths=lengths, with_initial_state=with_initial_state, device=device
    )
    num_sequences = 1 if lengths is None else len(lengths)
    state = arguments.initial_state
    expected = torch.zeros(num_sequences, 4, 16, 24) if state is None else state.cpu()
    for function, call in ((chunk_gated_delta_rule, public), (fused_recurrent_gated_delta_rule, decode)):
        o, final_state = function(**call(arguments, output_final_state=True))[:2]
        assert o.shape == (1, 0, 4, 24)
        assert torch.equal(final_state.cpu(), expected)
        if state is not None and state.numel() > 0:
            assert final_state.untyped_storage().data_ptr() != state.untyped_storage().data_ptr()


def test_tokens_without_a_sequence_give_zeros(device):
    arguments = random_arguments(**SMALL, lengths=[], tail=9, device=device)
    for function, call in ((chunk_gated_delta_rule, public), (fused_recurrent_gated_delta_rule, decode)):
        o, final_state = function(**call(arguments, output_final_state=True))
        assert torch.equal(o.cpu(), torch.zeros(1, 9, 4, 24))
        assert final_state.shape == (0, 4, 16, 24)


def test_results_are_new_memory(device):
    arguments = problem("states", device=device)
    inputs = {name: x.clone() for name, x in vars(arguments).items() if isinstance(x, torch.Tensor)}
    first = chunk_gated_delta_rule(**public(arguments))
    kept = [x.clone() for x in first]
    second = chunk_gated_delta_rule(**public(replace(arguments, v=arguments.v * 2)))
    assert all(torch.equal(x, y) for x, y in zip(first, kept, strict=True))
    assert not torch.equal(first[0], second[0])
    storages = {x.untyped_storage().data_ptr() for x in (*first, *second, *inputs.values())}
    assert len(storages) == len(first) + len(second) + len(inputs)
    for name, x in inputs.items():
        assert torch.equal(getattr(arguments, name), x), f"{name} was changed"


GRADIENT_PROBLEMS = ("states", "v_first", "varlen", "all_gates", "batch", "strong_gates")


def gradients(function, arguments, keyword_arguments):
    """The results' product with fixed directions, differentiated with respect to every float tensor."""
    leaves = {
        name: getattr(arguments, name).detach().clone().requires_grad_()
        for name in TENSORS
        if getattr(arguments, name) is not None
    }
    results = function(**keyword_arguments(replace(arguments, **leaves), output_final_state=True))
    o, final_state = results[:2]
    loss = 0
    for index, x in enumerate((o, final_state)):
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        loss = loss + (x.double() * direction.to(x.device)).sum()
    loss.backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def recurrence(**call):
    """The public call through autograd of the float64 recurrence."""
    call["use_qk_l2norm"] = call.pop("use_qk_l2norm_in_kernel")
    call["use_beta_sigmoid"] = call.pop("use_beta_sigmoid_in_kernel")
    del call["use_gate_in_kernel"]
    result = reference.recurrent_gated_delta_rule(gates.apply_gates(ForwardArguments(**call)))
    return result.o, result.final_state


@pytest.mark.parametrize("name", GRADIENT_PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_match_those_of_the_recurrence(name, dtype, device):
    arguments = problem(name, dtype=dtype, device=device)
    truth = gradients(recurrence, as_float64(arguments, "cpu"), public)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for function, call in ((chunk_gated_delta_rule, public), (fused_recurrent_gated_delta_rule, decode)):
        actual = gradients(function, arguments, call)
        assert actual.keys() == truth.keys()
        for field, gradient in actual.items():
            assert gradient.dtype == dtype
            # Per tensor: a gradient of one head may be a sum that cancels to nearly nothing.
            error = (gradient.cpu().double() - truth[field]).norm() / truth[field].norm()
            assert error < tolerance, f"{field}: {float(error)}"


def test_gradients_come_in_the_dtype_of_their_input(device):
    arguments = problem("all_gates", dtype=torch.bfloat16, device=device, with_initial_state=True)
    arguments = replace(arguments, g=arguments.g.bfloat16(), initial_state=arguments.initial_state.half())
    truth = gradients(recurrence, as_float64(arguments, "cpu"), public)
    for field, gradient in gradients(chunk_gated_delta_rule, arguments, public).items():
        assert gradient.dtype == getattr(arguments, field).dtype
        assert (gradient.cpu().double() - truth[field]).norm() / truth[field].norm() < 2e-2, field


@pytest.mark.parametrize("requiring", TENSORS)
def test_each_input_alone_can_require_the_gradient(requiring):
    arguments = problem("all_gates", with_initial_state=True)
    leaf = getattr(arguments, requiring).clone().requires_grad_()
    results = chunk_gated_delta_rule(**public(replace(arguments, **{requiring: leaf})))
    results[0].square().sum().backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad.abs().sum() > 0


def test_gradcheck():
    arguments = random_arguments(
        num_tokens=5,
        num_heads=1,
        num_value_heads=2,
        key_dim=3,
        value_dim=2,
        dtype=torch.float64,
        with_initial_state=True,
    )
    inputs = [getattr(arguments, name).requires_grad_() for name in TENSORS[:6]]

    def function(q, k, v, g, beta, initial_state):
        return chunk_gated_delta_rule(q, k, v, g, beta, None, initial_state, True)

    assert torch.autograd.gradcheck(function, inputs)


def test_hard_reset(device):
    """g = -inf forgets everything before: finite results, gradient 0 at that gate and at all that it cut off."""
    arguments = problem("states", device=device)
    arguments.g[:, 40] = -torch.inf
    results = gradients(chunk_gated_delta_rule, arguments, public)
    assert all(gradient.isfinite().all() for gradient in results.values())
    assert torch.equal(results["g"][:, 40], torch.zeros_like(results["g"][:, 40]))
    after = replace(arguments, **{name: getattr(arguments, name)[:, 40:] for name in ("q", "k", "v", "g", "beta")})
    after = replace(after, initial_state=None)
    whole, state = chunk_gated_delta_rule(**public(arguments))
    rest, rest_state = chunk_gated_delta_rule(**public(after))
    assert relative_error(whole[:, 40:], rest) < TOLERANCE[torch.float32]
    assert relative_error(state, rest_state, head_dim=1) < TOLERANCE[torch.float32]


def test_offsets_may_be_overwritten_before_the_backward(device):
    arguments = problem("varlen", device=device)
    expected = gradients(chunk_gated_delta_rule, arguments, public)
    cu_seqlens = arguments.cu_seqlens.clone()
    leaf = arguments.v.clone().requires_grad_()
    o, state = chunk_gated_delta_rule(**public(replace(arguments, v=leaf, cu_seqlens=cu_seqlens)))
    cu_seqlens.zero_()
    loss = 0
    for index, x in enumerate((o, state)):
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        loss = loss + (x.double() * direction.to(x.device)).sum()
    loss.backward()
    assert torch.equal(leaf.grad, expected["v"])


def test_states_per_chunk_have_no_gradient():
    arguments = problem("h")
    leaf = arguments.v.clone().requires_grad_()
    o, _, h = chunk_gated_delta_rule(**public(replace(arguments, v=leaf)))
    assert o.requires_grad
    assert not h.requires_grad


def test_a_second_derivative_is_refused():
    leaf = torch.rand(1, 4, 2, 8).requires_grad_()
    o, _ = chunk_gated_delta_rule(leaf, leaf, leaf, torch.zeros(1, 4, 2), torch.ones(1, 4, 2))
    (gradient,) = torch.autograd.grad(o.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inplace_state", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_state_pool(state_dtype, inplace_state, index_dtype, device):
    """Sequences read, and in place write, the rows that their indices name; padding gives zeros and touches nothing."""
    arguments = random_arguments(**SMALL | {"num_tokens": 2}, batch=3, device=device)
    pool = torch.randn(6, 4, 16, 24, device=device).to(state_dtype)
    before = pool.clone()
    indices = torch.tensor([4, -1, 1], dtype=index_dtype, device=device)
    call = decode(arguments, output_final_state=True, initial_state=pool)
    o, final_state = fused_recurrent_gated_delta_rule(**call, state_indices=indices, inplace_state=inplace_state)

    rows = before[[4, 0, 1]].float()
    rows[1] = 0
    truth = reference.recurrent_gated_delta_rule(
        as_float64(replace(arguments, initial_state=rows, output_final_state=True), "cpu")
    )
    truth.o[1], truth.final_state[1] = 0, 0
    state_tolerance = 1e-5 if state_dtype == torch.float32 else 1e-2
    assert relative_error(o, truth.o) < 1e-5
    assert torch.equal(o[1].cpu(), torch.zeros(2, 4, 24))
    assert final_state.dtype == state_dtype
    if inplace_state:
        assert final_state is pool
        assert relative_error(pool[[4, 1]], truth.final_state[[0, 2]], head_dim=1) < state_tolerance
        assert torch.equal(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    else:
        assert relative_error(final_state, truth.final_state, head_dim=1) < state_tolerance
        assert torch.equal(pool, before)


def test_state_in_place_without_indices(device):
    arguments = problem("one_token", device=device)
    state = arguments.initial_state.clone()
    expected = fused_recurrent_gated_delta_rule(**decode(arguments))[1]
    _, final_state = fused_recurrent_gated_delta_rule(**decode(arguments, initial_state=state), inplace_state=True)
    assert final_state is state
    assert torch.equal(state, expected)


def test_steps_continue_a_prefill(device):
    """One state layout for both functions: prefill, then token by token, equals the whole."""
    arguments = problem("v_first", device=device)
    whole, whole_state = chunk_gated_delta_rule(**public(arguments))
    parts = {name: getattr(arguments, name).split([70, 7], dim=1) for name in ("q", "k", "v", "g", "beta")}
    prefill = replace(arguments, **{name: first for name, (first, _) in parts.items()})
    rest = replace(arguments, **{name: second for name, (_, second) in parts.items()})
    first, state = chunk_gated_delta_rule(**public(prefill))
    second, state = fused_recurrent_gated_delta_rule(**decode(replace(rest, initial_state=state)))
    assert relative_error(torch.cat([first, second], dim=1), whole) < TOLERANCE[torch.float32]
    assert relative_error(state, whole_state, head_dim=1) < TOLERANCE[torch.float32]


def test_explain_takes_the_same_arguments(device):
    arguments = problem("states", device=device)
    schedule = explain_chunk_gated_delta_rule(**public(arguments))
    assert schedule.implementation == ("chunked" if device == "cpu" else "portable")
    assert schedule.implementation in str(schedule)
    leaf = arguments.v.clone().requires_grad_()
    reason = "an input requires a gradient"
    assert reason in explain_chunk_gated_delta_rule(**public(replace(arguments, v=leaf))).reason
    with torch.no_grad():
        assert reason not in explain_chunk_gated_delta_rule(**public(replace(arguments, v=leaf))).reason
    with pytest.raises(TypeError, match="unexpected keyword argument 'fast'"):
        explain_chunk_gated_delta_rule(**public(arguments), fast=True)


def test_forced_chunked_equals_automatic_on_the_cpu():
    arguments = problem("states")
    expected = chunk_gated_delta_rule(**public(arguments))
    forced = chunk_gated_delta_rule(**public(arguments), implementation="chunked")
    assert all(torch.equal(x, y) for x, y in zip(expected, forced, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("lengths", [None, [3, 0, 130]], ids=["batch", "varlen"])
def test_cuda_graph(dim, lengths):
    """Captured once compiled, and replayed with other values and other offsets in the same memory."""
    sizes = {
        "num_tokens": 140,
        "key_dim": dim,
        "value_dim": dim,
        "with_initial_state": True,
        "output_final_state": True,
    }
    tail = 7 if lengths else 0
    arguments = random_arguments(**sizes, lengths=lengths, tail=tail, dtype=torch.bfloat16, device="cuda")
    other_lengths = None if lengths is None else [64, 66, 1]
    tail = 9 if lengths else 0
    other = random_arguments(**sizes, lengths=other_lengths, tail=tail, dtype=torch.bfloat16, device="cuda", seed=1)
    expected = chunk_gated_delta_rule(**public(other)), fused_recurrent_gated_delta_rule(**decode(other))
    chunk_gated_delta_rule(**public(arguments))
    fused_recurrent_gated_delta_rule(**decode(arguments))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chunk_gated_delta_rule(**public(arguments)), fused_recurrent_gated_delta_rule(**decode(arguments))
    for name, x in vars(arguments).items():
        if isinstance(x, torch.Tensor):
            x.copy_(getattr(other, name))
    graph.replay()
    for results, truth in zip(captured, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(results, truth, strict=True))


@pytest.mark.parametrize(
    ("change", "is_aligned"),
    [
        (lambda q: q, True),
        (lambda q: q[:, 1:], True),
        (lambda q: torch.cat([q, q], dim=-1)[..., :16], True),
        (lambda q: torch.cat([q, q], dim=-1)[..., 8:24], True),
        (lambda q: torch.cat([q, q], dim=-1)[..., 4:20], False),
        (lambda q: torch.nn.functional.pad(q, (0, 4))[..., :16], False),
        (lambda q: q[:, :, :1].expand(-1, -1, 2, -1), False),
        (lambda q: q.mT.contiguous().mT[:, :1, :1], True),
    ],
)
def test_alignment_that_tma_needs(change, is_aligned):
    arguments = random_arguments(**SMALL, dtype=torch.bfloat16)
    arguments = replace(arguments, q=change(arguments.q))
    assert operators.problem_of(arguments, requires_gradient=False).is_aligned == is_aligned


@pytest.mark.parametrize(
    ("implementation", "stem"),
    [("scan", "kernel_forward_scan"), ("roles", "kernel_forward_roles"), ("portable", "kernel_portable")],
)
def test_the_schedule_reaches_its_kernel(implementation, stem, monkeypatch):
    arguments = problem("all_gates", output_final_state=True)
    schedule = Schedule(implementation, 64, 64, "test")
    expected = reference.recurrent_gated_delta_rule(arguments)
    calls = []
    kernel = types.SimpleNamespace(forward=lambda *call: calls.append(call) or expected)
    monkeypatch.setitem(sys.modules, f"tilecrew.gated_delta_rule.{stem}", kernel)
    monkeypatch.setattr(operators, "schedule_of", lambda *_: schedule)
    o, final_state = chunk_gated_delta_rule(**public(arguments))
    assert torch.equal(o, expected.o) and torch.equal(final_state, expected.final_state)
    ((received, received_schedule),) = calls
    assert received_schedule is schedule
    # Kernels apply norms and gates themselves.
    assert received.use_qk_l2norm and received.use_beta_sigmoid and received.A_log is arguments.A_log


def test_import_needs_no_triton_and_no_gpu():
    program = (
        "import sys; sys.modules['triton'] = None; import torch, tilecrew\n"
        "a = torch.rand(1, 4, 2, 8); b = torch.rand(1, 4, 2)\n"
        "tilecrew.chunk_gated_delta_rule(a, a, a, -b, b)\n"
        "tilecrew.fused_recurrent_gated_delta_rule(a, a, a, -b, beta=b)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=devices.ROOT, timeout=300)
