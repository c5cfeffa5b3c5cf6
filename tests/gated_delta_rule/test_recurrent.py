"""Decode: the torch recurrence, and its kernel under Triton's interpreter (in a process of its own) and on a GPU."""

import re
from dataclasses import replace

import pytest
import torch

from tests.gated_delta_rule.kernel_checks import (
    EVERY_GATE,
    LARGE_MEMORY,
    assert_within,
    check_recurrent,
    random_recurrent_arguments,
    recurrent_as_float64,
)
from tests.interpreter import run_interpreted
from tilecrew._hardware import Hardware
from tilecrew.gated_delta_rule import recurrent, reference
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.testing import random_arguments

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("gated_delta_rule/interpreted_recurrent.py")


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_to_16_byte_accesses_of_the_state_without_spills(capability, state_v_first, num_tokens, monkeypatch):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from tilecrew.device import aot
    from tilecrew.gated_delta_rule import kernel_recurrent

    options = {"pool": [0, 1, 2], "inplace_state": True, "use_qk_l2norm": True, "state_v_first": state_v_first}
    arguments = random_recurrent_arguments(3, num_tokens, dtype=torch.bfloat16, **options)
    hardware = Hardware("cuda", "cuda", divmod(capability, 10))
    monkeypatch.setattr(kernel_recurrent, "hardware_of", lambda device: hardware)
    launch = kernel_recurrent.make_launch(arguments, torch.empty_like(arguments.v), arguments.initial_state)
    compiled = aot.compile_launch(launch, GPUTarget("cuda", capability, 32))
    config = launch.args[-1]
    num_accesses = config.BLOCK_K * config.BLOCK_V // (launch.options["num_warps"] * 32 * 4)
    assert len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", compiled.asm["ptx"])) >= num_accesses
    assert len(re.findall(r"st\.global(?:\.\w+)*\.v4\.b32", compiled.asm["ptx"])) == num_accesses
    assert aot.resources(compiled).stack_bytes == 0
    ptx = compiled.asm["ptx"]
    starts_early = capability >= 90
    assert launch.options.get("launch_pdl", False) == starts_early
    assert ("griddepcontrol.launch_dependents" in ptx) == starts_early
    if starts_early:  # nothing is read in front of the wait but a row, past the L1 cache, for a hint
        before_wait = ptx[: ptx.index("griddepcontrol.wait")]
        assert re.findall(r"ld\.global[.\w]*", before_wait) == ["ld.global.cg.b32"]
        assert before_wait.count("cp.async.bulk.prefetch.L2.global") == 1
    else:
        assert "prefetch" not in ptx


@pytest.mark.parametrize("lengths", [None, [3, 0, 1, 5]])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("use_gates", [False, True])
def test_torch_recurrence_is_that_of_the_chunked_operator(lengths, state_v_first, use_gates):
    gates = {"A_log": torch.randn(4).double(), "dt_bias": torch.randn(4).double()} if use_gates else {}
    options = {"state_v_first": state_v_first, "output_final_state": True, "with_initial_state": True}
    flags = {"use_qk_l2norm": use_gates, "use_beta_sigmoid": use_gates, "allow_neg_eigval": use_gates}
    chunked = random_arguments(
        2, 9, 2, 4, 8, 12, dtype=torch.float64, lengths=lengths, tail=2, **options, **flags, **gates
    )
    shared = {name: getattr(chunked, name) for name in vars(chunked) if name in RecurrentArguments.__dataclass_fields__}
    o, final_state = recurrent.forward(RecurrentArguments(**shared))
    expected = reference.recurrent_gated_delta_rule(chunked)
    torch.testing.assert_close(o, expected.o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(final_state, expected.final_state, rtol=1e-10, atol=1e-12)


def test_torch_channel_gates_equal_a_head_gate_where_all_channels_agree():
    arguments = recurrent_as_float64(random_recurrent_arguments(2, 3, dims=(8, 12), output_final_state=True))
    expected_o, expected_state = recurrent.forward(arguments)
    beta = arguments.beta[..., None].expand(-1, -1, -1, 12)
    for name, size in (("gk", 8), ("gv", 12)):
        gate = arguments.g[..., None].expand(-1, -1, -1, size)
        o, state = recurrent.forward(replace(arguments, g=None, beta=beta, **{name: gate}))
        torch.testing.assert_close(o, expected_o)
        torch.testing.assert_close(state, expected_state)


def test_torch_recurrence_is_differentiable():
    arguments = recurrent_as_float64(
        random_recurrent_arguments(heads=(1, 2), dims=(3, 2), lengths=[2, 0, 1], tail=1, output_final_state=True)
    )
    names = ("q", "k", "v", "g", "beta", "initial_state")
    inputs = tuple(getattr(arguments, name).requires_grad_() for name in names)

    def forward(*tensors):
        return recurrent.forward(replace(arguments, **dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradcheck(forward, inputs)


def test_torch_pool():
    arguments = random_recurrent_arguments(3, 2, dims=(8, 8), pool=[3, -1, 0], output_final_state=True)
    o, final_state = recurrent.forward(arguments)
    assert not o[1].any()
    assert not final_state[1].any()
    rows = replace(arguments, state_indices=None, initial_state=arguments.initial_state[[3, 1, 0]])
    expected_o, expected_state = recurrent.forward(rows)
    assert torch.equal(o[[0, 2]], expected_o[[0, 2]])
    assert torch.equal(final_state[[0, 2]], expected_state[[0, 2]])

    before = arguments.initial_state.clone()
    _, pool = recurrent.forward(replace(arguments, inplace_state=True))
    assert pool is arguments.initial_state
    assert torch.equal(pool[[3, 0]], final_state[[0, 2]])
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])


def test_torch_in_place_needs_a_state():
    arguments = replace(random_recurrent_arguments(1, 1, dims=(8, 8), inplace_state=True), initial_state=None)
    with pytest.raises(ValueError, match="inplace_state needs an initial_state"):
        recurrent.forward(arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dim", [16, 20, 64, 96, 128, 256])
def test_head_sizes(dim, state_v_first, dtype):
    options = {"dtype": dtype, "device": "cuda", "state_v_first": state_v_first, "output_final_state": True}
    for num_tokens in (1, 3):
        check_recurrent(random_recurrent_arguments(4, num_tokens, (2, 6), (dim, dim), **options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_every_gate(num_tokens, dtype):
    flags = {"gates": EVERY_GATE, "use_beta_sigmoid": True, "allow_neg_eigval": True, "use_qk_l2norm": True}
    options = {"dtype": dtype, "device": "cuda", "output_final_state": True}
    check_recurrent(random_recurrent_arguments(4, num_tokens, (2, 4), (128, 96), **options, **flags))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_pool_in_place_and_out_of_place(num_tokens, state_v_first, state_dtype):
    from tilecrew.gated_delta_rule import kernel_recurrent

    options = {"pool": [3, -1, 0, 7], "state_dtype": state_dtype, "state_v_first": state_v_first, "device": "cuda"}
    arguments = random_recurrent_arguments(4, num_tokens, dtype=torch.bfloat16, output_final_state=True, **options)
    check_recurrent(arguments)
    o, final_state = kernel_recurrent.forward(arguments)
    assert not o[1].any()
    assert not final_state[1].any()

    pool = arguments.initial_state.clone()
    o_in_place, returned = kernel_recurrent.forward(replace(arguments, initial_state=pool, inplace_state=True))
    assert returned is pool
    assert torch.equal(o_in_place, o)
    assert torch.equal(pool[[3, 0, 7]], final_state[[0, 2, 3]])
    check_recurrent(replace(arguments, inplace_state=True))


@pytest.mark.gpu
@pytest.mark.parametrize("pool", [None, [4, -1, 2, 0, -1]])
def test_packed_sequences_with_a_tail(pool):
    options = {"lengths": [2, 1, 0, 3, 1], "tail": 40, "pool": pool, "output_final_state": True}
    arguments = random_recurrent_arguments(dtype=torch.bfloat16, device="cuda", **options)
    for x in (arguments.q, arguments.k, arguments.v, arguments.g, arguments.beta):
        x[:, 7:] = float("nan")
    check_recurrent(arguments)


@pytest.mark.gpu
def test_hundred_runs_give_the_same_bits():
    from tilecrew.gated_delta_rule import kernel_recurrent

    arguments = random_recurrent_arguments(16, 2, dtype=torch.bfloat16, device="cuda", output_final_state=True)
    o, final_state = kernel_recurrent.forward(arguments)
    for _ in range(100):
        o_again, state_again = kernel_recurrent.forward(arguments)
        assert torch.equal(o_again, o)
        assert torch.equal(state_again, final_state)


@pytest.mark.gpu
def test_cuda_graph_decodes_step_by_step():
    """The same graph, replayed with new inputs and indices, continues the states of the pool."""
    from tilecrew.gated_delta_rule import kernel_recurrent

    options = {"pool": [0, 1, 2, -1], "inplace_state": True, "device": "cuda"}
    arguments = random_recurrent_arguments(4, 1, dtype=torch.bfloat16, **options)
    start = arguments.initial_state.clone()
    kernel_recurrent.forward(arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = kernel_recurrent.forward(arguments)
    arguments.initial_state.copy_(start)
    expected = replace(arguments, initial_state=start)
    for indices in ([0, 1, 2, -1], [2, -1, 0, 1]):
        arguments.state_indices.copy_(torch.tensor(indices))
        arguments.v.normal_()
        graph.replay()
        expected_o, _ = kernel_recurrent.forward(expected)
        assert torch.equal(o, expected_o)
        assert torch.equal(arguments.initial_state, start)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [2, 64])
@pytest.mark.parametrize("has_other_kernels", [False, True])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_what_starts_early_waits_for_what_is_in_front_of_it(state_v_first, has_other_kernels, num_sequences):
    """The call before, whose states a call goes on from, and torch's kernel that makes q. Two sequences have so few
    states that they are prefetched."""
    from tilecrew.gated_delta_rule import kernel_recurrent

    pool = list(range(num_sequences))
    options = {"pool": pool, "inplace_state": True, "state_v_first": state_v_first, "device": "cuda"}
    arguments = random_recurrent_arguments(num_sequences, 1, dtype=torch.bfloat16, **options)
    num_states = num_sequences * arguments.v.shape[2]
    assert (num_states <= kernel_recurrent.PREFETCHED_STATES.value) == (num_sequences == 2)

    def steps(waits):
        found = [arguments.initial_state.clone()]
        for step in range(50):
            q = arguments.q.roll(step, 0) if has_other_kernels else arguments.q
            found.append(kernel_recurrent.forward(replace(arguments, q=q, initial_state=found[0]))[0])
            if waits:
                torch.cuda.synchronize()
        return found

    expected = steps(waits=True)
    assert all(x.isfinite().all() for x in expected)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(steps(waits=False), expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_the_kernel_before_writes(dtype):
    """What stood there before is no row of the pool, or another one: that is prefetched at most, and not used. The pool
    begins in the middle of 16 bytes."""
    from tilecrew.gated_delta_rule import kernel_recurrent

    options = {"pool": [3, 0, -1, 2], "inplace_state": True, "device": "cuda"}
    arguments = random_recurrent_arguments(4, 1, dtype=torch.bfloat16, **options)
    pool, indices = arguments.initial_state.to(dtype), arguments.state_indices

    def call(rows):
        buffer = pool.new_empty(pool.numel() + 1)
        states = buffer[1:].view(pool.shape).copy_(pool)
        return replace(arguments, initial_state=states, state_indices=rows)

    expected = call(indices)
    expected_o, _ = kernel_recurrent.forward(expected)
    assert expected_o.isfinite().all()
    for wrong in (2**31 - 1, -(2**31), pool.shape[0], 1):
        rows = torch.full_like(indices, wrong)
        actual = call(rows)
        kernel_recurrent.forward(call(indices))  # one in front that lets the next start early
        rows.copy_(indices)
        o, _ = kernel_recurrent.forward(actual)
        assert torch.equal(o, expected_o)
        assert torch.equal(actual.initial_state, expected.initial_state)


@pytest.mark.gpu
@pytest.mark.parametrize("state_v_first", [False, True])
def test_a_sequence_has_the_same_bits_in_every_batch(state_v_first):
    from tilecrew.gated_delta_rule import kernel_recurrent

    options = {"state_v_first": state_v_first, "output_final_state": True, "device": "cuda"}
    arguments = random_recurrent_arguments(300, 1, dtype=torch.bfloat16, **options)
    o, final_state = kernel_recurrent.forward(arguments)
    for first, last in ((7, 8), (7, 40)):
        part = {
            name: value[first:last]
            for name, value in vars(arguments).items()
            if isinstance(value, torch.Tensor) and value.shape[0] == 300
        }
        o_part, state_part = kernel_recurrent.forward(replace(arguments, **part))
        assert torch.equal(o_part, o[first:last])
        assert torch.equal(state_part, final_state[first:last])


@LARGE_MEMORY
@pytest.mark.gpu
def test_more_programs_than_a_grid_dimension_of_65535():
    options = {"dtype": torch.bfloat16, "device": "cuda", "output_final_state": True}
    check_recurrent(random_recurrent_arguments(2200, 1, (32, 32), (16, 16), **options))


@LARGE_MEMORY
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("state_v_first", [False, True])
def test_pool_rows_past_2_to_31_elements(state_v_first):
    from tilecrew.gated_delta_rule import kernel_recurrent

    num_rows = 2**31 // (4 * 128 * 128) + 10
    options = {"pool": [0, 2, 1], "state_v_first": state_v_first, "inplace_state": True, "device": "cuda"}
    small = random_recurrent_arguments(3, 2, dtype=torch.bfloat16, **options)
    pool = torch.zeros(num_rows, *small.state_shape, device="cuda")
    last_rows = torch.tensor([num_rows - 3, num_rows - 1, num_rows - 2], device="cuda")
    pool[num_rows - 3 :] = small.initial_state[:3]
    o, _ = kernel_recurrent.forward(replace(small, initial_state=pool, state_indices=last_rows))
    expected_o, expected_state = kernel_recurrent.forward(small)
    assert torch.equal(o, expected_o)
    assert torch.equal(pool[num_rows - 3 :], expected_state[:3])
    assert not pool[:3].any()


@pytest.mark.gpu
def test_state_error_stays_that_of_float32_over_many_steps():
    """1000 steps of weak decay, bfloat16 inputs: the state keeps float32's error, because it is never rounded."""
    from tilecrew.gated_delta_rule import kernel_recurrent

    arguments = random_recurrent_arguments(1, 1000, dtype=torch.bfloat16, device="cuda", output_final_state=True)
    arguments = replace(arguments, g=arguments.g * 1e-3)
    _, expected = recurrent.forward(recurrent_as_float64(arguments))
    _, yardstick = recurrent.forward(arguments)
    _, actual = kernel_recurrent.forward(arguments)
    assert_within(actual, expected, yardstick, 1, torch.float32, "final_state")
