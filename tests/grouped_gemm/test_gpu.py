"""The grouped GEMM on a GPU: the kernel with roles, with wgmma and with mma.sync where they run, and the portable
kernel."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

import tilecrew
from tests.delays import delay
from tests.grouped_gemm.problems import GROUPS, assert_close, expected, make
from tests.grouped_gemm.waits_in_vain import TIMEOUT_SECONDS
from tests.own_process import ROOT
from tilecrew.grouped_gemm import (
    GELU,
    BandGate,
    Bias,
    CountGate,
    NoGate,
    NotifyRowBlock,
    RouteWeight,
    SiLU,
    SwiGLU,
    max_row_blocks,
    operators,
    reference,
)

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUM_TURNS = 4  # of a gate that waits for rows that are late


def skip_where_it_cannot_run(implementation):
    capability = torch.cuda.get_device_capability()
    if implementation == "hopper" and capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    if implementation == "mma_sync" and capability[0] not in (9, 12):
        pytest.skip("needs compute capability 9.0 or 12.x")
    return implementation


@pytest.fixture(params=["hopper", "mma_sync", "portable"])
def implementation(request):
    return skip_where_it_cannot_run(request.param)


@pytest.fixture(params=["hopper", "mma_sync"])
def with_roles(request):
    """Implementations that have gates and notifications."""
    return skip_where_it_cannot_run(request.param)


def lengths_of(kind, num_groups):
    """Rows of each group: equal, skewed so that the first has half of all, or every other one empty."""
    generator = torch.Generator().manual_seed(num_groups)
    if kind == "equal":
        return [130] * num_groups
    if kind == "skewed":
        return [1000, *torch.randint(0, 40, (num_groups - 1,), generator=generator).tolist()]
    return [0 if group % 2 else int(torch.randint(1, 200, (1,), generator=generator)) for group in range(num_groups)]


def check(lengths, tail, num_inner, num_columns, implementation, **options):
    x, w, offs = make(lengths, tail, num_inner, num_columns, device="cuda", **options)
    out = tilecrew.grouped_gemm(x, w, offs, implementation=implementation)
    assert_close(out, expected(x, w, offs), offs)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["equal", "skewed", "half empty"])
@pytest.mark.parametrize("num_groups", [1, 2, 5, 64, 256, 512])
def test_groups(num_groups, kind, transposed, implementation):
    check(lengths_of(kind, num_groups), 77, 264, 520, implementation, transposed=transposed)


@pytest.mark.parametrize("name", GROUPS)
def test_sizes_of_groups(name, implementation):
    check(*GROUPS[name], 512, 768, implementation)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129])
def test_every_group_of_one_size(size, dtype, implementation):
    check([size] * 40, 3, 192, 1536, implementation, dtype=dtype)


@pytest.mark.parametrize("num_rows", [1, 2, 17, 128, 1000])
def test_few_rows_over_many_groups(num_rows, implementation):
    generator = torch.Generator().manual_seed(num_rows)
    groups = torch.randint(0, 128, (num_rows,), generator=generator).sort().values
    check(torch.bincount(groups, minlength=128).tolist(), 0, 2048, 1536, implementation)


@pytest.mark.parametrize(("num_inner", "num_columns"), [(8, 8), (72, 136), (64, 128), (7168, 256), (200, 4104)])
def test_inner_and_outer_sizes(num_inner, num_columns, implementation):
    check([130, 0, 70], 5, num_inner, num_columns, implementation)


def test_float32_on_the_portable_kernel():
    check([130, 0, 70], 5, 136, 200, None, dtype=FP32)


@pytest.mark.parametrize("num_groups", [1022, 1500])
def test_very_many_groups(num_groups):
    check([3, 0] * (num_groups // 2), 1, 64, 128, None)


def test_rows_and_columns_stay_where_they_are(implementation):
    """Every element of the output tells its row and column: no permutation of them can cancel."""
    lengths, num_columns = [70, 0, 129, 300], 1032
    num_rows = sum(lengths)
    x = torch.zeros(num_rows, 8, dtype=FP16, device="cuda")
    x[:, 0], x[:, 1] = torch.arange(num_rows), 1
    w = torch.zeros(4, 8, num_columns, dtype=FP16, device="cuda")
    w[:, 0], w[:, 1] = 1, torch.arange(num_columns) / 2048
    offs = torch.tensor(lengths).cumsum(0).to(torch.int32).cuda()
    out = tilecrew.grouped_gemm(x, w, offs, implementation=implementation)
    wanted = torch.arange(num_rows)[:, None] + torch.arange(num_columns)[None, :] / 2048
    assert torch.equal(out.cpu(), wanted.to(FP16))


def test_a_bad_group_spoils_no_other(implementation):
    x, w, offs = make([100, 60, 100], 0, 264, 520, device="cuda")
    wanted = expected(x, w, offs)
    x[100:160] = float("nan")
    out = tilecrew.grouped_gemm(x, w, offs, implementation=implementation)
    assert out[100:160].isnan().all()
    for rows in (slice(0, 100), slice(160, 260)):
        assert_close(out[rows], wanted[rows], torch.tensor([100]))


@pytest.mark.parametrize("lengths", [[300, 0, 65, 1000], [3, 1, 0, 20]])
def test_epilogues(lengths, implementation):
    num_columns = 576
    x, w, offs = make(lengths, 9, 264, num_columns, device="cuda")
    x = torch.where(x.isnan(), 0, x)
    num_rows, weights = x.shape[0], torch.rand(x.shape[0], device="cuda")
    weights[num_rows - 9 :] = float("nan")
    for hook in (
        Bias(torch.randn(4, num_columns, device="cuda", dtype=BF16)),
        SiLU(),
        GELU(),
        GELU("tanh"),
        SwiGLU(),
        SwiGLU(8),
        SwiGLU(16),
        SwiGLU(32),
        RouteWeight(weights),
    ):
        out = tilecrew.grouped_gemm(x, w, offs, epilogue=hook, implementation=implementation)
        assert_close(out, expected(x, w, offs, hook), offs, bound=6e-3)


def test_bands_wait_for_another_stream(with_roles):
    """Rows come last block first, so that a band's first tiles start with its last, then in other orders, with random
    delays between them; the last block is partial."""
    implementation, generator = with_roles, random.Random(0)
    x, w, offs = make([256, 0, 640, 300], 0, 264, 512, device="cuda")
    plain = tilecrew.grouped_gemm(x, w, offs, implementation=implementation)
    rows, x = x, torch.empty_like(x)
    expected_rows = [min(128, 1196 - 128 * block) for block in range(10)]
    targets = torch.tensor(expected_rows, dtype=torch.int32, device="cuda")
    counters = torch.zeros_like(targets)
    other = torch.cuda.Stream()

    def bring(block):
        delay(generator)
        x[128 * block : 128 * (block + 1)].copy_(rows[128 * block : 128 * (block + 1)])
        counters[block : block + 1].copy_(targets[block : block + 1])

    # What CUDA does once (compile, load, make streams) may wait for running kernels: done before.
    tilecrew.grouped_gemm(rows, w, offs, gate=BandGate(targets, offs), implementation=implementation)
    with torch.cuda.stream(other):
        for block in range(10):
            bring(block)
    for turn in range(NUM_TURNS):
        torch.cuda.synchronize()
        x.fill_(float("nan"))
        counters.zero_()
        torch.cuda.synchronize()
        out = tilecrew.grouped_gemm(x, w, offs, gate=BandGate(counters, offs), implementation=implementation)
        with torch.cuda.stream(other):
            for block in reversed(range(10)) if turn == 0 else generator.sample(range(10), 10):
                bring(block)
        torch.cuda.synchronize()
        assert torch.equal(out, plain)


def test_gates_wait_for_another_stream(with_roles):
    """The kernel starts first, holds back, and reads rows that are written meanwhile: in pieces, of which a block may
    have several, in random orders, with random delays between them."""
    implementation, generator = with_roles, random.Random(0)
    x, w, offs = make([130, 0, 20], 0, 264, 512, device="cuda")
    plain = tilecrew.grouped_gemm(x, w, offs, implementation=implementation)
    assert torch.equal(tilecrew.grouped_gemm(x, w, offs, gate=NoGate(), implementation=implementation), plain)
    counters = torch.zeros(3, dtype=torch.int32, device="cuda")
    rows, x = x, torch.empty_like(x)
    targets = torch.tensor([128, 2, 20], dtype=torch.int32, device="cuda")
    pieces = [(0, 0, 50), (0, 50, 127), (0, 127, 128), (1, 128, 130), (2, 130, 131), (2, 131, 150)]  # block and rows
    other = torch.cuda.Stream()

    def bring(block, begin, end):
        delay(generator)
        x[begin:end].copy_(rows[begin:end])
        counters[block : block + 1].add_(end - begin)  # behind the copy of the rows: the stream orders them

    # What CUDA does once (compile, load, make streams) may wait for running kernels: done before.
    tilecrew.grouped_gemm(rows, w, offs, gate=CountGate(targets), implementation=implementation)
    with torch.cuda.stream(other):
        for piece in pieces:
            bring(*piece)
    for _ in range(NUM_TURNS):
        torch.cuda.synchronize()
        x.fill_(float("nan"))
        counters.zero_()
        torch.cuda.synchronize()
        out = tilecrew.grouped_gemm(x, w, offs, gate=CountGate(counters), implementation=implementation)
        with torch.cuda.stream(other):
            for piece in generator.sample(pieces, len(pieces)):
                bring(*piece)
        torch.cuda.synchronize()
        assert torch.equal(out, plain)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["count", "band"])
def test_a_gate_that_waits_in_vain_ends_the_call_with_an_error(gate, with_roles):
    """In a process of its own, which loses its CUDA context. One row of the last block is missing."""
    command = [sys.executable, "-m", "tests.grouped_gemm.waits_in_vain", with_roles, gate]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert "unspecified launch failure" in found["error"], found  # what CUDA makes of a trap
    assert TIMEOUT_SECONDS <= found["seconds"] < 5


@pytest.mark.parametrize("lengths", [[130, 0, 20, 64], [300, 1, 0, 129], [5, 0, 0, 7]])
@pytest.mark.parametrize("epilogue", [None, SwiGLU(8)])
def test_every_row_block_is_notified(epilogue, lengths, with_roles):
    x, w, offs = make(lengths, 9, 264, 528, device="cuda")
    x = torch.where(x.isnan(), 0, x)
    rows = torch.zeros(max_row_blocks(x.shape[0], 4), dtype=torch.int32, device="cuda")
    hook = NotifyRowBlock(rows, epilogue=epilogue)
    wanted = [min(128, length - first) for length in lengths for first in range(0, length, 128)]
    wanted_out = expected(x, w, offs, epilogue)
    for _ in range(20):
        rows.zero_()
        out = tilecrew.grouped_gemm(x, w, offs, epilogue=hook, implementation=with_roles)
        assert_close(out, wanted_out, offs, bound=6e-3)
        assert rows.tolist() == wanted + [0] * (len(rows) - len(wanted))
        assert not hook.arrivals.any()


@pytest.mark.parametrize("waiting_first", [False, True])
def test_a_second_product_waits_for_the_notifications_of_the_first(waiting_first, with_roles):
    """Two streams: SwiGLU and notifications in the first product, a gate in the second, which starts before or behind.
    Both have so few tiles that they fit the GPU together. The first is late, by a random time."""
    lengths, generator = [300, 0, 65, 130], random.Random(0)
    num_rows, num_inner, num_hidden = sum(lengths), 1032, 264
    x, w, offs = make(lengths, 0, num_inner, 2 * num_hidden, device="cuda")
    _, second_w, _ = make(lengths, 0, num_hidden, 392, device="cuda", seed=1)
    rows = torch.zeros(max_row_blocks(num_rows, 4), dtype=torch.int32, device="cuda")
    hidden = torch.empty(num_rows, num_hidden, device="cuda", dtype=BF16)
    out = torch.empty(num_rows, 392, device="cuda", dtype=BF16)
    notify, gate = NotifyRowBlock(rows, epilogue=SwiGLU(8)), CountGate(rows)
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def first():
        with torch.cuda.stream(streams[0]):
            delay(generator)
            tilecrew.grouped_gemm(x, w, offs, epilogue=notify, out=hidden, implementation=with_roles)

    def second():
        with torch.cuda.stream(streams[1]):
            tilecrew.grouped_gemm(hidden, second_w, offs, gate=gate, out=out, implementation=with_roles)

    # Compiled and loaded before anything waits: loading may wait for running kernels.
    first()
    torch.cuda.synchronize()
    second()
    torch.cuda.synchronize()
    wanted_hidden, wanted = hidden.clone(), out.clone()
    assert_close(wanted_hidden, expected(x, w, offs, SwiGLU(8)), offs, bound=6e-3)
    assert_close(wanted, expected(wanted_hidden, second_w, offs), offs)
    for _ in range(50):
        rows.zero_()
        hidden.fill_(float("nan"))
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        for run in (second, first) if waiting_first else (first, second):
            run()
        torch.cuda.synchronize()
        assert torch.equal(hidden, wanted_hidden)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("with_hooks", [False, True])
def test_calls_by_plans_read_the_tensors_that_they_are_given(with_hooks, implementation):
    """From the third call of a shape on a plan is repeated, at other addresses and with other values."""
    lengths = [130, 0, 20, 64]
    operators.PLANS.clear()
    kept = []
    for seed in range(6):
        x, w, offs = make(lengths, 9, 264, 528, device="cuda", seed=seed)
        offs = offs - seed
        epilogue = Bias(torch.randn(4, 528, device="cuda")) if with_hooks else None
        out = tilecrew.grouped_gemm(x, w, offs, epilogue=epilogue, implementation=implementation)
        assert_close(out, expected(x, w, offs, epilogue), offs, bound=6e-3)
        kept += [x, w, offs, epilogue, out]  # so that no address comes twice
    # An epilogue behind the portable kernel is torch's work, and makes no plan.
    assert operators.PLANS.num_plans == (0 if with_hooks and implementation == "portable" else 1)


def test_hundred_runs_give_the_same_bits(implementation):
    x, w, offs = make(lengths_of("skewed", 64), 9, 520, 776, device="cuda")
    first = tilecrew.grouped_gemm(x, w, offs, implementation=implementation)
    for _ in range(100):
        assert torch.equal(tilecrew.grouped_gemm(x, w, offs, implementation=implementation), first)


@pytest.mark.parametrize("epilogue", [None, SwiGLU(8)])
def test_cuda_graph_replays_with_other_offsets(epilogue, implementation):
    x, w, offs = make([100, 0, 128, 72], 28, 264, 528, device="cuda")
    x = torch.where(x.isnan(), 0, x)

    def run():
        return tilecrew.grouped_gemm(x, w, offs, epilogue=epilogue, implementation=implementation)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for ends in ([100, 100, 228, 300], [0, 328, 328, 328], [1, 2, 3, 4]):
        offs.copy_(torch.tensor(ends))
        wanted = run()
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, wanted)
        assert_close(captured, expected(x, w, offs, epilogue), offs, bound=6e-3)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed, implementation):
    x, w, offs = make([300, 0, 65, 130], 9, 264, 520, device="cuda", transposed=transposed)
    x = torch.where(x.isnan(), 0, x).requires_grad_()
    w.requires_grad_()
    dy = torch.randn(x.shape[0], 520, device="cuda", dtype=BF16)
    tilecrew.grouped_gemm(x, w, offs, implementation=implementation).backward(dy)
    wide = dy.double()
    assert_close(x.grad, reference.grouped_gemm(wide, w.detach().double().transpose(1, 2), offs), offs)
    wanted = reference.weight_gradient(x.detach().double(), wide, offs)
    assert_close(w.grad.flatten(1), wanted.flatten(1), torch.tensor([4]))
    assert not w.grad[1].any()


def test_out_and_strides(implementation):
    x, w, offs = make([300, 0, 65], 9, 264, 520, device="cuda")
    wide_x, wide_out = (torch.full((374, 640), float("nan"), device="cuda", dtype=BF16) for _ in range(2))
    x = wide_x[:, 8:272].copy_(x)
    out = wide_out[:, 16:536]
    tilecrew.grouped_gemm(x, w, offs, out=out, implementation=implementation)
    assert_close(out, expected(x, w, offs), offs)
    assert wide_out[:, :16].isnan().all()
    assert wide_out[:, 536:].isnan().all()


def test_one_row_of_odd_strides(implementation):
    """The stride of a dimension of size 1 may be anything."""
    x, w, offs = make([0, 1], 0, 264, 520, device="cuda")
    x = x.as_strided(x.shape, (1, 1))
    out = torch.empty(520, 1, device="cuda", dtype=BF16).t()
    tilecrew.grouped_gemm(x, w, offs, out=out, implementation=implementation)
    assert_close(out, expected(x, w, offs), offs)


def test_torch_compile_traces_through():
    x, w, offs = make([300, 0, 65], 0, 264, 520, device="cuda")
    compiled = torch.compile(lambda x, w: tilecrew.grouped_gemm(x, w, offs), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w), tilecrew.grouped_gemm(x, w, offs))


@pytest.mark.slow
def test_offsets_past_2_to_31(implementation):
    """More than 2**31 elements in each of x, w and out; the last rows and groups are what could be missed."""
    num_rows, num_groups = 2**19 + 100, 9
    x = torch.randn(num_rows, 4160, device="cuda", dtype=BF16)
    w = torch.randn(1, 4160, 4160, device="cuda", dtype=BF16).expand(140, -1, -1).contiguous() / 64
    offs = torch.full((140,), num_rows, dtype=torch.int32, device="cuda")
    offs[: 140 - num_groups] = num_rows - 200
    offs[140 - num_groups :] = torch.arange(num_groups, dtype=torch.int32, device="cuda") * 20 + num_rows - 180
    offs[-1] = num_rows
    out = tilecrew.grouped_gemm(x, w, offs, implementation=implementation)
    rows = slice(num_rows - 300, None)
    wanted = x[rows].double() @ w[0].double()
    assert_close(out[rows], wanted, torch.tensor([300]))
