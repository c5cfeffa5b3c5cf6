"""Mixture of experts on a GPU: tables, the kernels that move rows, the layer, graphs, and ranks over NCCL."""

from pathlib import Path

import pytest
import torch

import tilecrew
from tests.moe.problems import BOUNDS, Problem, assert_rows_close, random_ids, tables_of
from tests.moe.test_api import KINDS, arguments, expected
from tests.moe.test_collective import run_ranks
from tests.moe.test_one_rank import gather_gemm, gathered
from tests.moe.test_routing import assert_same
from tests.own_process import run_emulated
from tilecrew.grouped_gemm import SwiGLU
from tilecrew.grouped_gemm.api import grouped_gemm
from tilecrew.moe import build_routing, operators, reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ops = torch.ops.tilecrew


@pytest.mark.gpu
@pytest.mark.parametrize("row_block", [1, 128])
@pytest.mark.parametrize("kind", ["uniform", "one expert", "some missing", "all missing", "ends empty"])
@pytest.mark.parametrize(
    ("world_size", "capacity", "top_k", "num_experts"),
    [(1, 0, 2, 4), (1, 1, 10, 512), (1, 300, 8, 256), (3, 129, 6, 64), (4, 17, 2, 3), (8, 40, 2, 5)],
)
def test_routing_equals_the_loops(world_size, capacity, top_k, num_experts, kind, row_block):
    ids = random_ids(world_size * capacity, top_k, num_experts, kind=kind).reshape(world_size, capacity, top_k)
    num_tokens = torch.randint(0, capacity + 1, (world_size,))
    for counts in (None, num_tokens):
        for rank in {0, world_size // 2, world_size - 1}:
            options = {"num_experts": num_experts, "rank": rank, "row_block": row_block}
            on_device = None if counts is None else counts.cuda()
            actual = build_routing(ids.cuda().int(), num_tokens=on_device, **options)
            assert_same(actual, reference.routing_by_loops(ids, num_tokens=counts, **options))


@pytest.mark.gpu
def test_ids_that_are_no_experts_count_as_missing():
    ids = random_ids(200, 4, 16)
    bad = ids.clone()
    bad[::3, 1], bad[::5, 2], bad[7], bad[8] = 16, -7, 2**31 - 1, -(2**31)
    ids[(bad < 0) | (bad >= 16)] = -1
    actual = build_routing(bad[None].cuda(), num_experts=16)
    assert_same(actual, reference.routing_by_loops(ids[None], num_experts=16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden"),
    [(1, 10, 512, 2048), (129, 1, 3, 8), (300, 8, 64, 7168), (65, 20, 40, 1032)],
)
def test_row_kernels_equal_torch(num_tokens, top_k, num_experts, hidden, dtype):
    """gather without weights moves bits; the others differ from torch on the CPU by roundings of float32 sums."""
    ids = random_ids(num_tokens, top_k, num_experts, kind="some missing")
    row_routes, token_rows = tables_of(ids, num_experts, 128)
    x = torch.randn(num_tokens, hidden).to(dtype)
    y = torch.randn(row_routes.shape[0], hidden).to(dtype)
    y[row_routes < 0] = float("nan")
    weights = torch.rand(num_tokens, top_k)
    weights[token_rows < 0] = float("nan")
    tables = (row_routes, token_rows)
    cuda = [tensor.cuda() for tensor in (x, y, weights, *tables)]
    gx, gy, gw, *gt = cuda
    assert operators.runs_kernels(gx)
    assert torch.equal(ops.moe_gather(gx, None, *gt).cpu(), ops.moe_gather(x, None, *tables))
    wide = (x.double(), y.double(), weights.double())
    bound = 2 * BOUNDS[dtype]
    assert_rows_close(ops.moe_gather(gx, gw, *gt).cpu(), ops.moe_gather(wide[0], wide[2], *tables), bound)
    for base in (None, gx):
        wanted = ops.moe_combine(wide[1], wide[2], None if base is None else wide[0], *tables)
        assert_rows_close(ops.moe_combine(gy, gw, base, *gt).cpu(), wanted, bound)
    products = ops.moe_products(gx, gy, *gt).cpu()
    terms = ops.moe_products(wide[0].abs(), wide[1].abs(), *tables)
    assert ((products - ops.moe_products(wide[0], wide[1], *tables)).abs() <= 1e-6 * terms).all()


@pytest.mark.gpu
@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "intermediate"),
    [(0, 2, 4, 64, 64), (1, 10, 512, 256, 64), (17, 4, 8, 1024, 512), (300, 8, 64, 520, 136), (1000, 2, 5, 136, 264)],
)
def test_layer_errs_no_more_than_twice_torch(
    num_tokens, top_k, num_experts, hidden, intermediate, dtype, layout, with_shared
):
    sizes = (num_tokens, top_k, num_experts, hidden, intermediate)
    problem = Problem(*sizes, kind="some missing", dtype=dtype, device="cuda")
    inputs, options = arguments(problem, layout, with_shared)
    out = tilecrew.moe_forward(*inputs, **options)
    wanted = expected(problem, with_shared)
    if dtype == FP32:
        assert_rows_close(out, wanted, 4 * BOUNDS[dtype])
        return
    p = problem
    plain = reference.moe(p.x, p.topk_ids, p.topk_weights.to(dtype), p.gate, p.up, p.down)
    if with_shared:
        plain = plain + reference.shared_experts(p.x, p.shared_gate, p.shared_up, p.shared_down, p.output_gate)
    assert (out.double() - wanted).norm() <= 2 * (plain.double() - wanted).norm() + 1e-30
    assert not out[(p.topk_ids < 0).all(1)].any() or with_shared


@pytest.mark.gpu
def test_layer_of_the_size_of_qwen3_next():
    problem = Problem(600, 10, 512, 2048, 512, dtype=BF16, device="cuda")
    inputs, options = arguments(problem, with_shared=True)
    assert_rows_close(tilecrew.moe_forward(*inputs, **options), expected(problem, True), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients(dtype, layout):
    """Off float64 at most twice as far as autograd through the loop in the same dtype, and a floor for float32."""
    problem = Problem(300, 4, 16, 264, 136, kind="some missing", dtype=dtype, device="cuda")
    names = ("x", "topk_weights", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "output_gate")
    leaves = [getattr(problem, name).requires_grad_() for name in names]
    d_out = torch.randn(problem.x.shape, device="cuda").to(dtype)
    inputs, options = arguments(problem, layout, with_shared=True)
    actual = torch.autograd.grad(tilecrew.moe_forward(*inputs, **options), leaves, d_out)
    wanted = torch.autograd.grad(expected(problem, with_shared=True), leaves, d_out.double())
    p = problem
    plain = reference.moe(p.x, p.topk_ids, p.topk_weights.to(dtype), p.gate, p.up, p.down)
    plain = plain + reference.shared_experts(p.x, p.shared_gate, p.shared_up, p.shared_down, p.output_gate)
    plain = torch.autograd.grad(plain, leaves, d_out)
    for name, left, right, torch_way in zip(names, actual, wanted, plain, strict=True):
        error, torch_error = ((g.double() - right.double()).norm() for g in (left, torch_way))
        assert error <= 2 * torch_error + 4 * BOUNDS[FP32] * right.double().norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 700])
def test_hundred_runs_give_the_same_bits(num_tokens):
    problem = Problem(num_tokens, 8, 32, 264, 136, dtype=BF16, device="cuda")
    inputs, options = arguments(problem, with_shared=True)
    leaves = [problem.x, problem.topk_weights, problem.down]
    first = tilecrew.moe_forward(*inputs, **options)
    d_out = torch.randn_like(first)
    first_gradients = None
    for _ in range(100):
        assert torch.equal(tilecrew.moe_forward(*inputs, **options), first)
        with torch.enable_grad():
            for leaf in leaves:
                leaf.requires_grad_()
            gradients = torch.autograd.grad(tilecrew.moe_forward(*inputs, **options), leaves, d_out)
            for leaf in leaves:
                leaf.requires_grad_(False)
        first_gradients = first_gradients or gradients
        assert all(torch.equal(*pair) for pair in zip(gradients, first_gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_graph_replays_with_other_inputs_equal_eager_calls(num_tokens, layout):
    problem = Problem(num_tokens, 6, 40, 264, 136, dtype=BF16, device="cuda")
    inputs, options = arguments(problem, layout, with_shared=True)
    x, ids, weights = inputs[:3]

    def run():
        return tilecrew.moe_forward(*inputs, **options)

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed, kind in enumerate(["uniform", "one expert", "some missing", "all missing", "ends empty"] * 3):
        x.copy_(torch.randn(x.shape))
        ids.copy_(random_ids(num_tokens, 6, 40, kind=kind, seed=seed))
        weights.copy_(torch.rand(weights.shape))
        wanted = run()
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, wanted)


@pytest.mark.gpu
def test_graph_of_the_tables_replays_with_other_counts():
    ids = random_ids(3 * 50, 4, 10).reshape(3, 50, 4).cuda()
    num_tokens = torch.tensor([50, 0, 17], device="cuda")
    options = {"num_experts": 10, "rank": 1, "num_tokens": num_tokens}
    build_routing(ids, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = build_routing(ids, **options)
    for seed in range(4):
        ids.copy_(random_ids(3 * 50, 4, 10, kind="some missing", seed=seed).reshape(3, 50, 4))
        num_tokens.copy_(torch.tensor([seed, 50, 50 - seed]))
        graph.replay()
        host = {"num_experts": 10, "rank": 1, "num_tokens": num_tokens.cpu()}
        assert_same(captured, reference.routing_by_loops(ids.cpu(), **host))


@pytest.mark.gpu
def test_nothing_waits_for_the_device(sync_is_an_error):
    problem = Problem(64, 4, 8, 264, 136, dtype=BF16, device="cuda")
    inputs, options = arguments(problem, with_shared=True)
    for leaf in (problem.x, inputs[3], inputs[4]):
        leaf.requires_grad_()
    tilecrew.moe_forward(*inputs, **options).sum().backward()  # compiles
    with sync_is_an_error():
        tilecrew.moe_forward(*inputs, **options).sum().backward()
    with torch.no_grad():
        tilecrew.moe_forward(*inputs, **options)  # compiles
        with sync_is_an_error():
            tilecrew.moe_forward(*inputs, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "with_shared"), [("halves", True), ("interleaved", False)])
def test_torch_compile_traces_through(layout, with_shared):
    problem = Problem(64, 4, 8, 264, 136, dtype=BF16, device="cuda")
    (x, ids, *inputs), options = arguments(problem, layout, with_shared)
    compiled = torch.compile(
        lambda x, ids: tilecrew.moe_forward(x, ids, *inputs, **options), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x, ids), tilecrew.moe_forward(x, ids, *inputs, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "intermediate"),
    [(0, 2, 4, 64, 64), (1, 10, 512, 256, 64), (129, 1, 3, 8, 8), (300, 8, 64, 520, 136), (1000, 2, 5, 136, 264)],
)
def test_product_of_gathered_tokens(num_tokens, top_k, num_experts, hidden, intermediate, dtype, layout, transposed):
    """Tokens without routes are NaN, as is what stands in the output before."""
    for kind in KINDS:
        sizes = (num_tokens, top_k, num_experts, hidden, intermediate)
        problem = Problem(*sizes, kind=kind, dtype=dtype, device="cuda")
        problem.x[(problem.topk_ids < 0).all(1)] = float("nan")
        out = gather_gemm(problem, layout, transposed).cpu()
        assert_rows_close(out, gathered(problem, layout), BOUNDS[dtype])
        assert not out[int((problem.topk_ids >= 0).sum()) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "one expert", "some missing"])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_gathered_tokens_give_the_bits_of_copied_ones(layout, kind):
    """In the tiles of large calls, which are the same for both."""
    problem = Problem(1024, 8, 64, 2048, 768, kind=kind, dtype=BF16, device="cuda")
    row_routes, token_rows = tables_of(problem.topk_ids, 64)
    routing = build_routing(problem.topk_ids[None], num_experts=64, row_block=1)
    rows = ops.moe_gather(problem.x, None, row_routes, token_rows)
    w = arguments(problem, layout)[0][3]
    wanted = grouped_gemm(rows, w, routing.offs, epilogue=SwiGLU(8) if layout == "interleaved" else None)
    first = gather_gemm(problem, layout)
    assert torch.equal(first, wanted)
    for _ in range(100):
        assert torch.equal(gather_gemm(problem, layout), first)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_tokens_are_gathered_at_any_address(layout):
    """A launch that is remembered takes tensors of other calls; one of tokens between 16 bytes copies them."""
    problems = [Problem(65, 3, 7, 72, 40, dtype=BF16, device="cuda", seed=seed) for seed in range(4)]
    found = [gather_gemm(problem, layout) for problem in [*problems, *problems]]
    for problem, first, again in zip(problems, found[:4], found[4:], strict=True):
        assert_rows_close(first.cpu(), gathered(problem, layout), BOUNDS[BF16])
        assert torch.equal(first, again)
    (problem, *_), (wanted, *_) = problems, found
    problem.x = torch.empty(65 * 72 + 1, dtype=BF16, device="cuda")[1:].view(65, 72).copy_(problem.x)
    assert problem.x.data_ptr() % 16
    assert torch.equal(gather_gemm(problem, layout), wanted)


@pytest.mark.gpu
def test_tokens_behind_two_gigabytes():
    num_tokens, hidden, num_routed = 160_000, 8192, 200
    problem = Problem(num_routed, 1, 2, hidden, 8, dtype=BF16, device="cuda")
    x = torch.zeros(num_tokens, hidden, dtype=BF16, device="cuda")
    ids = torch.full((num_tokens, 1), -1, device="cuda")
    weights = torch.ones(num_tokens, 1, device="cuda")
    x[-num_routed:], ids[-num_routed:], weights[-num_routed:] = problem.x, problem.topk_ids, problem.topk_weights
    out = tilecrew.moe_forward(x, ids, weights, *arguments(problem)[0][3:])
    assert_rows_close(out[-num_routed:], expected(problem), 2e-2)
    assert not out[:-num_routed].any()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_tokens_are_copied_for_gradients_only(layout, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    from tilecrew.moe import kernel_rows

    def refuse(*arguments):
        raise RuntimeError("a copy")

    problem = Problem(300, 8, 64, 520, 136, kind="some missing", dtype=BF16, device="cuda")
    inputs, options = arguments(problem, layout, with_shared=True)
    monkeypatch.setattr(kernel_rows, "gather_launch", refuse)
    assert_rows_close(tilecrew.moe_forward(*inputs, **options), expected(problem, True), 2e-2)
    problem.x.requires_grad_()
    with pytest.raises(RuntimeError, match="a copy"):
        tilecrew.moe_forward(*inputs, **options)


@pytest.mark.gpu
def test_float64_is_refused():
    inputs, options = arguments(Problem(5, 2, 4, 16, 8, dtype=torch.float64, device="cuda"))
    with pytest.raises(TypeError, match="x must be bfloat16 or float16 or float32, got float64"):
        tilecrew.moe_forward(*inputs, **options)


@pytest.mark.gpu
@pytest.mark.slow
def test_one_rank_over_nccl(tmp_path):
    run_ranks("tests.moe.collective_rank", 1, tmp_path, "nccl")


@pytest.mark.multi_gpu
@pytest.mark.slow
def test_two_ranks_over_nccl(tmp_path):
    run_ranks("tests.moe.collective_rank", 2, tmp_path, "nccl")


@pytest.mark.gpu
@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("part", range(24))
def test_emulated_ranks(part):
    """A process has the GPU for itself while it has its turn, so parts may run at the same time."""
    run_emulated(Path(__file__).parent / "emulated_gpu.py", f"{part}/24")


@pytest.mark.gpu
@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_forms_of_emulated_ranks(part):
    run_emulated(Path(__file__).parent / "emulated_forms.py", f"{part}/4")
