"""The grouped GEMM that gathers its rows, on a GPU of compute capability 9.0."""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton")
from tests.delays import delay
from tests.grouped_gemm.gather_sources import from_ranks, from_table
from tests.grouped_gemm.problems import assert_close, expected, make
from tilecrew._hardware import hardware_of
from tilecrew.grouped_gemm import BandGate, SwiGLU, kernel_grouped_gemm
from tilecrew.grouped_gemm.schedule import Problem, pick

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
NUM_TOKENS = 300


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def problem_of(lengths, num_inner, num_columns, dtype=BF16, transposed=False, seed=0):
    """tokens, their row for each row of x or -1, x itself, w, offs."""
    x, w, offs = make(lengths, 0, num_inner, num_columns, dtype=dtype, device="cuda", transposed=transposed, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(NUM_TOKENS, num_inner, generator=generator).to("cuda", dtype)
    token = torch.randint(0, NUM_TOKENS, (x.shape[0],), generator=generator)
    token = torch.where(torch.rand(x.shape[0], generator=generator) < 0.1, -1, token).cuda()
    x = torch.where(token[:, None] >= 0, tokens[token.clamp_min(0)], 0)
    return tokens, token, x, w, offs


def addresses_of(tokens, token):
    return torch.where(token >= 0, tokens.data_ptr() + token * tokens.stride(0) * 2, 0)


def multiply(x, w, offs, source=None, source_tensors=(), epilogue=None, gate=None, num_rows=None):
    """By the kernel alone, in the same tiles with a source and without; rows behind the last offset are zeros."""
    num_rows = x.shape[0] if num_rows is None else num_rows
    dtype = str(x.dtype).removeprefix("torch.")
    problem = Problem(num_rows, w.shape[0], w.shape[1], w.shape[2], dtype, gate is not None)
    schedule = pick(dataclasses.replace(problem, gathers=True), hardware_of(x.device), "hopper")
    hooks = kernel_grouped_gemm.hooks_of(gate, epilogue)._replace(source=source, source_tensors=source_tensors)
    out = torch.full((num_rows, w.shape[2] // hooks.shrink), float("nan"), dtype=x.dtype, device=x.device)
    kernel_grouped_gemm.launch(x, w, offs, out, schedule.tiles, schedule.num_programs, hooks).run()
    return out


def gathered(tokens, token, w, offs, **options):
    table = addresses_of(tokens, token)
    return multiply(tokens, w, offs, from_table, (table,), num_rows=len(token), **options)


def check(lengths, num_inner, num_columns, epilogue=None, **options):
    tokens, token, x, w, offs = problem_of(lengths, num_inner, num_columns, **options)
    out = gathered(tokens, token, w, offs, epilogue=epilogue)
    bound = None if epilogue is None else 6e-3
    assert_close(out, expected(x, w, offs, epilogue), offs, bound)
    assert torch.equal(out, multiply(x, w, offs, epilogue=epilogue))
    return out


@pytest.mark.parametrize("num_inner", [8, 64, 72, 512, 2048])
@pytest.mark.parametrize("num_columns", [256, 1032])
def test_sizes(num_inner, num_columns):
    check([300, 0, 65, 130, 1], num_inner, num_columns)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129])
def test_every_group_of_one_size(size, dtype):
    check([size] * 40 + [1], 192, 1544, dtype=dtype)


@pytest.mark.parametrize("num_groups", [2, 64, 256, 512])
@pytest.mark.parametrize("epilogue", [None, SwiGLU(8)])
def test_skewed_groups(epilogue, num_groups):
    generator = torch.Generator().manual_seed(num_groups)
    lengths = [1000, *torch.randint(0, 40, (num_groups - 1,), generator=generator).tolist()]
    check(lengths, 264, 528, epilogue, transposed=num_groups == 64)


def test_many_tiles_of_one_step_and_of_many():
    for num_inner in (8, 64, 128, 1088):
        check([2000, 3000, 17], num_inner, 4104)


def test_rows_without_an_address_are_zeros_and_nothing_else_is_read():
    """Whatever stands beside the rows that are named, or behind their columns, is NaN."""
    wide = torch.full((NUM_TOKENS, 96), float("nan"), device="cuda", dtype=BF16)
    _, token, _, w, offs = problem_of([130, 70, 129], 72, 264)
    named = torch.arange(NUM_TOKENS, device="cuda") % 2 == 0
    token = torch.where(token >= 0, token // 2 * 2, -1)
    wide[:, :72] = torch.where(named[:, None], torch.randn(NUM_TOKENS, 72, device="cuda"), float("nan")).to(BF16)
    tokens = wide[:, :72]
    x = torch.where(token[:, None] >= 0, tokens[token.clamp_min(0)], 0)
    out = gathered(tokens, token, w, offs)
    assert_close(out, expected(x, w, offs), offs)
    assert not out[token < 0].any()
    assert not gathered(tokens, torch.full_like(token, -1), w, offs).any()


@pytest.mark.parametrize("with_gate", [False, True])
def test_rows_of_several_buffers(with_gate):
    """Where a row lies follows from its rank's offset, and behind a gate that is open already."""
    lengths = [256, 0, 384, 128]
    buffers = [torch.randn(100, 200, device="cuda").to(BF16) for _ in range(3)]
    offsets = torch.tensor([buffer.data_ptr() - buffers[1].data_ptr() for buffer in buffers], device="cuda")
    _, w, offs = make(lengths, 0, 200, 520, device="cuda")
    rank = torch.randint(-1, 3, (sum(lengths),), device="cuda")
    row = torch.where(rank >= 0, torch.randint(0, 100, (sum(lengths),), device="cuda"), -1)
    places = torch.stack([rank, row], 1).to(torch.int32)
    x = torch.stack(buffers)[rank.clamp_min(0), row.clamp_min(0)] * (rank >= 0)[:, None]
    counters = torch.full((sum(lengths) // 128,), 128, dtype=torch.int32, device="cuda")
    gate = BandGate(counters, offs) if with_gate else None
    tensors = (buffers[1], offsets, places, 400)
    out = multiply(buffers[1], w, offs, from_ranks, tensors, gate=gate, num_rows=sum(lengths))
    assert_close(out, expected(x, w, offs), offs)
    assert torch.equal(out, multiply(x, w, offs))


def test_bands_wait_for_another_stream():
    """Tokens come while the kernel runs, last block of rows first, then in other orders, with random delays between
    them: each block of rows has tokens of its own."""
    lengths, generator = [256, 0, 640, 384], random.Random(0)
    num_rows = sum(lengths)
    x, w, offs = make(lengths, 0, 264, 512, device="cuda")
    plain = multiply(x, w, offs)
    order = torch.cat([torch.randperm(128) + first for first in range(0, num_rows, 128)]).cuda()
    ready, tokens = torch.empty_like(x), torch.empty_like(x)
    ready[order] = x
    targets = torch.full((num_rows // 128,), 128, dtype=torch.int32, device="cuda")
    counters, other = torch.zeros_like(targets), torch.cuda.Stream()
    table, blocks = addresses_of(tokens, order), range(num_rows // 128)

    def bring(block):
        delay(generator)
        rows = slice(128 * block, 128 * (block + 1))
        tokens[rows].copy_(ready[rows])
        counters[block : block + 1].copy_(targets[block : block + 1])

    # What CUDA does once may wait for running kernels: done before.
    assert torch.equal(gathered(ready, order, w, offs, gate=BandGate(targets, offs)), plain)
    with torch.cuda.stream(other):
        for block in blocks:
            bring(block)
    for turn in range(4):
        torch.cuda.synchronize()
        tokens.fill_(float("nan"))
        counters.zero_()
        torch.cuda.synchronize()
        gate = BandGate(counters, offs)
        out = multiply(tokens, w, offs, from_table, (table,), gate=gate, num_rows=num_rows)
        with torch.cuda.stream(other):
            for block in reversed(blocks) if turn == 0 else generator.sample(blocks, len(blocks)):
                bring(block)
        torch.cuda.synchronize()
        assert torch.equal(out, plain)


@pytest.mark.parametrize("num_inner", [64, 2048])
def test_hundred_runs_give_the_same_bits(num_inner):
    tokens, token, _, w, offs = problem_of([3000, 5, 0, 700, 129] * 8, num_inner, 776)
    first = gathered(tokens, token, w, offs)
    for _ in range(100):
        assert torch.equal(gathered(tokens, token, w, offs), first)
