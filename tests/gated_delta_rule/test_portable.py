"""The portable forward: under Triton's interpreter in a process of its own, and on a GPU."""

from dataclasses import replace

import pytest
import torch

from tests.gated_delta_rule.kernel_checks import (
    LARGE_MEMORY,
    check_portable,
    run_portable,
    spread_over_more_than_2_to_31_elements,
    with_nan_tail,
    with_strided_inputs,
)
from tests.interpreter import run_interpreted
from tilecrew._hardware import Hardware
from tilecrew.gated_delta_rule.operators import problem_of
from tilecrew.gated_delta_rule.schedule import pick
from tilecrew.testing import random_arguments

EVERYTHING = {"with_initial_state": True, "output_final_state": True, "output_h": True}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("gated_delta_rule/interpreted_portable.py")


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kilobytes"), [(80, 99), (90, 227), (120, 99)])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 256), (torch.float32, 128)])
def test_compiles_into_shared_memory(dtype, dim, capability, kilobytes):
    """Code for 8.0 must fit 8.6 and 8.9 too, which have 99 KB."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from tilecrew.device import aot
    from tilecrew.gated_delta_rule import kernel_portable

    arguments = random_arguments(lengths=[60, 70], key_dim=dim, value_dim=dim, dtype=dtype, **EVERYTHING)
    result = kernel_portable.empty_result(arguments)
    hardware = Hardware("cuda", "cuda", divmod(capability, 10), shared_memory_bytes=kilobytes * 1024)
    schedule = pick(problem_of(arguments, requires_gradient=False), hardware, "portable")
    for launch in kernel_portable.make_launches(arguments, schedule, result):
        resources = aot.resources(aot.compile_launch(launch, GPUTarget("cuda", capability, 32)))
        assert resources.shared_memory_bytes <= kilobytes * 1024
        assert resources.wgmma + resources.mma > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(16, 128), (64, 16), (128, 16), (128, 32), (256, 16), (256, 40)])
def test_head_sizes_of_keys_and_values(dims, dtype):
    """Narrow blocks of V beside wide keys: where Triton 3.6 has read past its shared memory."""
    check_portable(random_arguments(2, 200, 2, 4, *dims, dtype=dtype, device="cuda", **EVERYTHING))
    check_portable(random_arguments(1, 70, 1, 1, *dims, dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 20, 64, 96, 128, 256])
def test_head_sizes(dim, dtype):
    check_portable(random_arguments(2, 200, 2, 4, dim, dim, dtype=dtype, device="cuda", **EVERYTHING))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_sizes(chunk_size, dtype):
    sizes = {"chunk_size": chunk_size, "dtype": dtype, "device": "cuda"}
    check_portable(random_arguments(1, 1000, 2, 6, 128, 64, **sizes, **EVERYTHING))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 63, 64, 65, 100])
def test_numbers_of_tokens(num_tokens):
    check_portable(random_arguments(2, num_tokens, dtype=torch.bfloat16, device="cuda", **EVERYTHING))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_sequences_with_nan_in_the_tail(index_dtype, state_v_first, dtype):
    lengths = {"lengths": [1, 64, 0, 65, 129, 700], "tail": 77}
    options = {"dtype": dtype, "device": "cuda", "state_v_first": state_v_first}
    arguments = with_nan_tail(random_arguments(**lengths, **options, **EVERYTHING))
    check_portable(replace(arguments, cu_seqlens=arguments.cu_seqlens.to(index_dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates_inside(dtype):
    gates = {"A_log": torch.randn(4).cuda(), "dt_bias": torch.randn(4).cuda()}
    flags = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "allow_neg_eigval": True}
    options = {"dtype": dtype, "device": "cuda", "normalised": False}
    check_portable(random_arguments(1, 300, 2, 4, 128, 128, **options, **gates, **flags, **EVERYTHING))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [0.0, -1e-3, -5.0, -20.0, -100.0, float("-inf")])
def test_gates_of_any_strength(g, dtype):
    arguments = random_arguments(1, 200, dtype=dtype, device="cuda", **EVERYTHING)
    arguments.g[:, 10] = g
    arguments.g[:, 100:140] = g
    check_portable(arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_equal_keys(beta, dtype):
    arguments = random_arguments(1, 128, dtype=dtype, device="cuda", **EVERYTHING)
    arguments.k[:] = arguments.k[:, :1].clone()
    arguments.beta.fill_(beta)
    check_portable(arguments)


@pytest.mark.gpu
def test_strided_inputs():
    check_portable(with_strided_inputs(random_arguments(2, 200, dtype=torch.bfloat16, device="cuda", **EVERYTHING)))


@pytest.mark.gpu
def test_hundred_runs_give_the_same_bits():
    arguments = random_arguments(lengths=[300, 1, 1000], tail=3, dtype=torch.bfloat16, device="cuda", **EVERYTHING)
    first = run_portable(arguments)
    for _ in range(100):
        again = run_portable(arguments)
        assert torch.equal(again.o, first.o)
        assert torch.equal(again.final_state, first.final_state)
        assert torch.equal(again.h, first.h)


@pytest.mark.gpu
def test_cuda_graph_replays_with_other_lengths():
    arguments = random_arguments(lengths=[300, 1, 200], tail=11, dtype=torch.bfloat16, device="cuda", **EVERYTHING)
    run_portable(arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_portable(arguments)
    for bounds in ([0, 300, 301, 501], [0, 0, 64, 512]):
        arguments.cu_seqlens.copy_(torch.tensor(bounds))
        expected = run_portable(arguments)
        for x in (captured.o, captured.final_state, captured.h):
            x.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured.o, expected.o)
        assert torch.equal(captured.final_state, expected.final_state)
        assert torch.equal(captured.h, expected.h)


@LARGE_MEMORY
@pytest.mark.gpu
def test_more_programs_than_a_grid_dimension_of_65535():
    lengths = [1 + n % 3 for n in range(2200)]
    sizes = {"num_heads": 32, "num_value_heads": 32, "key_dim": 16, "value_dim": 16, "chunk_size": 16}
    check_portable(random_arguments(lengths=lengths, dtype=torch.bfloat16, device="cuda", **sizes, **EVERYTHING))


@LARGE_MEMORY
@pytest.mark.gpu
@pytest.mark.slow
def test_input_offsets_past_2_to_31():
    arguments = random_arguments(1, 100, dtype=torch.bfloat16, device="cuda", **EVERYTHING)
    check_portable(spread_over_more_than_2_to_31_elements(arguments))


@LARGE_MEMORY
@pytest.mark.gpu
@pytest.mark.slow
def test_output_offsets_past_2_to_31():
    """2**31 + elements of o: every value head has the same inputs, so every head must have head 0's output."""
    num_tokens, num_value_heads = 2**17 + 70, 256
    small = random_arguments(1, num_tokens, 1, 1, 16, 64, dtype=torch.bfloat16, device="cuda")
    g, beta = (x.expand(-1, -1, num_value_heads) for x in (small.g, small.beta))
    wide = {"v": small.v.expand(-1, -1, num_value_heads, -1), "g": g, "beta": beta}
    o = run_portable(replace(small, **wide)).o
    assert o.numel() > 2**31
    expected = run_portable(small).o
    assert expected.isfinite().all()
    for head in (0, 1, num_value_heads - 1):
        assert torch.equal(o[:, :, head], expected[:, :, 0])
