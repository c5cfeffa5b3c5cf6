"""The operators under torch's tracing: fullgraph compilation equals eager, and torch's checks of operators pass."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests import devices
from tilecrew import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tilecrew.gated_delta_rule import operators, recurrent_operators
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.testing import random_arguments

device = devices.device
SMALL = {"num_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 24}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def compiled(function, **options):
    # aot_eager traces like the default backend (dynamo, fakes, functionalisation, autograd) and generates no code.
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def tensors(arguments):
    return arguments.q, arguments.k, arguments.v, arguments.g, arguments.beta


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (torch.equal(x, y) and x.stride() == y.stride())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_final_state": True, "output_h": True},
        {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"history_tolerance": 1e-4, "batch_invariant": True},
    ],
    ids=["plain", "all_outputs", "gates", "batches"],
)
def test_inference(options, device):
    def function(*inputs):
        return chunk_gated_delta_rule(*inputs, **options)

    inputs = tensors(random_arguments(**SMALL, num_tokens=70, device=device))
    assert_equal(compiled(function)(*inputs), function(*inputs))


def test_inference_with_states_and_gate(device):
    arguments = random_arguments(**SMALL, num_tokens=70, device=device, with_initial_state=True)
    a_log = torch.zeros(4, device=device)

    def function(*inputs):
        *inputs, state, a_log = inputs
        return chunk_gated_delta_rule(
            *inputs, initial_state=state, output_final_state=True, use_gate_in_kernel=True, A_log=a_log, dt_bias=a_log
        )

    inputs = (*tensors(arguments), arguments.initial_state, a_log)
    assert_equal(compiled(function)(*inputs), function(*inputs))


def test_varlen(device):
    arguments = random_arguments(**SMALL, lengths=[3, 65, 0], tail=2, device=device)

    def function(*inputs):
        *inputs, cu_seqlens = inputs
        return chunk_gated_delta_rule(*inputs, cu_seqlens=cu_seqlens, output_final_state=True, output_h=True)

    inputs = (*tensors(arguments), arguments.cu_seqlens)
    assert_equal(compiled(function)(*inputs), function(*inputs))


def test_offsets_are_checked_inside_a_compiled_function():
    def function(*inputs):
        *inputs, cu_seqlens = inputs
        return chunk_gated_delta_rule(*inputs, cu_seqlens=cu_seqlens)

    inputs = tensors(random_arguments(**SMALL, num_tokens=8))
    with pytest.raises(ValueError, match=r"cu_seqlens must end at T = 8 or before, got \[0, 9\]"):
        compiled(function)(*inputs, torch.tensor([0, 9]))


def test_new_lengths_need_no_new_compilation(device):
    counter = CompileCounterWithBackend("aot_eager")

    def function(*inputs):
        return chunk_gated_delta_rule(*inputs, output_final_state=True, output_h=True)

    traced = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    # At least two chunks each: torch compiles a size of one anew.
    for num_tokens in (70, 130, 128, 333):
        inputs = tensors(random_arguments(**SMALL, num_tokens=num_tokens, device=device))
        assert_equal(traced(*inputs), function(*inputs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("lengths", [None, [3, 65, 0]], ids=["batch", "varlen"])
def test_training(lengths, device):
    arguments = random_arguments(**SMALL, num_tokens=70, lengths=lengths, device=device, with_initial_state=True)
    cu_seqlens = arguments.cu_seqlens

    def step(function):
        leaves = [x.clone().requires_grad_() for x in (*tensors(arguments), arguments.initial_state)]
        o, final_state = function(*leaves)
        (o.square().sum() + final_state.sum()).backward()
        return [o.detach(), final_state.detach(), *(leaf.grad for leaf in leaves)]

    def function(*inputs):
        *inputs, state = inputs
        options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        return chunk_gated_delta_rule(
            *inputs, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, **options
        )

    for actual, expected in zip(step(compiled(function)), step(function), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_decode(device):
    arguments = random_arguments(**SMALL, batch=3, num_tokens=1, device=device, with_initial_state=True)

    def function(q, k, v, g, beta, state):
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=state, output_final_state=True)

    inputs = (*tensors(arguments), arguments.initial_state)
    assert_equal(compiled(function)(*inputs), function(*inputs))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_decode_in_place(backend, device):
    """A pool that a compiled step updates between operations that read it."""
    arguments = random_arguments(**SMALL, batch=2, num_tokens=1, device=device)
    pool = torch.randn(5, 4, 16, 24, device=device)
    indices = torch.tensor([3, -1], device=device)

    def function(q, k, v, g, beta, pool, indices):
        before = pool.sum()
        o, final_state = fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=pool, state_indices=indices, inplace_state=True
        )
        return before, o, final_state.sum()

    traced_pool = pool.clone()
    traced = torch.compile(function, fullgraph=True, backend=backend)
    results = traced(*tensors(arguments), traced_pool, indices)
    untouched = pool.clone()
    expected = function(*tensors(arguments), pool, indices)
    for actual, value in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, value)
    torch.testing.assert_close(traced_pool, pool)
    assert not torch.equal(pool[3], untouched[3])
    assert torch.equal(pool[:3], untouched[:3])


def forward_values(device, lengths=None, requires_grad=False, **options):
    arguments = random_arguments(
        **SMALL, num_tokens=20, lengths=lengths, device=device, with_initial_state=True, **options
    )
    values = [getattr(arguments, name) for name in operators.FIELDS]
    if requires_grad:
        values = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values]
    return values


@pytest.mark.parametrize("lengths", [None, [3, 0, 15]], ids=["batch", "varlen"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_opcheck_chunk_forward(lengths, requires_grad, device):
    values = forward_values(device, lengths, requires_grad, output_final_state=True, output_h=not requires_grad)
    operator = torch.ops.tilecrew.chunk_gated_delta_rule_forward.default
    torch.library.opcheck(operator, (*values, requires_grad, None))


def test_opcheck_chunk_backward(device):
    values = forward_values(device, output_final_state=True)
    do = torch.randn(1, 20, 4, 24, device=device)
    dfinal_state = torch.randn(1, 4, 16, 24, device=device)
    torch.library.opcheck(torch.ops.tilecrew.chunk_gated_delta_rule_backward.default, (do, dfinal_state, *values))


@pytest.mark.parametrize("inplace", [False, True], ids=["forward", "inplace"])
def test_opcheck_recurrent(inplace, device):
    arguments = random_arguments(**SMALL, batch=2, num_tokens=3, device=device)
    arguments = RecurrentArguments(
        *(arguments.q, arguments.k, arguments.v, arguments.g, arguments.beta, 0.5),
        initial_state=torch.randn(4, 4, 16, 24, device=device),
        state_indices=torch.tensor([2, 0], device=device),
        inplace_state=inplace,
        output_final_state=True,
    )
    values = [getattr(arguments, name) for name in recurrent_operators.FIELDS]
    name = "recurrent_gated_delta_rule_inplace" if inplace else "recurrent_gated_delta_rule_forward"
    torch.library.opcheck(getattr(torch.ops.tilecrew, name).default, (*values, None))
