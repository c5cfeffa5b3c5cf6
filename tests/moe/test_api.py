"""The layer on one rank against the loop over experts in float64."""

import pytest
import torch

import tilecrew
from tests.moe.problems import BOUNDS, Problem, assert_rows_close
from tilecrew.moe import SharedExperts, interleave_gate_up, reference
from tilecrew.moe.experts import compute_shared

KINDS = ["uniform", "one expert", "some missing", "all missing", "ends empty"]


def expected(problem, with_shared=False):
    p = problem
    wide = [tensor.double() for tensor in (p.topk_weights, p.gate, p.up, p.down)]
    out = reference.moe(p.x.double(), p.topk_ids, *wide)
    if with_shared:
        shared = [tensor.double() for tensor in (p.shared_gate, p.shared_up, p.shared_down, p.output_gate)]
        out = out + reference.shared_experts(p.x.double(), *shared)
    return out


def arguments(problem, layout="interleaved", with_shared=False):
    p = problem

    def joined(gate, up):
        return interleave_gate_up(gate, up) if layout == "interleaved" else torch.cat((gate, up), -1)

    shared = None
    if with_shared:
        shared = SharedExperts(joined(p.shared_gate, p.shared_up), p.shared_down, p.output_gate)
    options = {"shared": shared, "gate_up_layout": layout}
    return (p.x, p.topk_ids, p.topk_weights, joined(p.gate, p.up), p.down), options


@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, layout, with_shared):
    for dtype in (torch.float32, torch.float64):
        problem = Problem(37, 3, 6, 24, 16, kind=kind, dtype=dtype)
        inputs, options = arguments(problem, layout, with_shared)
        out = tilecrew.moe_forward(*inputs, **options)
        assert out.dtype == dtype
        assert_rows_close(out, expected(problem, with_shared), 3 * BOUNDS[dtype])
        if kind == "all missing" and not with_shared:
            assert not out.any()


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "intermediate"),
    [(0, 2, 4, 16, 8), (1, 1, 1, 8, 8), (1, 6, 64, 136, 24), (129, 2, 5, 8, 64), (300, 10, 512, 40, 8)],
)
def test_shapes(num_tokens, top_k, num_experts, hidden, intermediate):
    problem = Problem(num_tokens, top_k, num_experts, hidden, intermediate)
    inputs, options = arguments(problem)
    assert_rows_close(tilecrew.moe_forward(*inputs, **options), expected(problem), 3 * BOUNDS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_twice_torch(dtype):
    """Against the same mathematics in torch in that dtype, over all rows: torch rounds each route's result too."""
    problem = Problem(64, 4, 8, 64, 48, dtype=dtype)
    inputs, options = arguments(problem)
    wanted = expected(problem)
    plain = reference.moe(
        problem.x, problem.topk_ids, problem.topk_weights.to(dtype), problem.gate, problem.up, problem.down
    )
    error, plain_error = ((out.double() - wanted).norm() for out in (tilecrew.moe_forward(*inputs, **options), plain))
    assert error <= 2 * plain_error


def test_duplicate_ids_add_up():
    problem = Problem(9, 2, 4, 16, 8)
    problem.topk_ids[:, 1] = problem.topk_ids[:, 0]
    inputs, options = arguments(problem)
    assert_rows_close(tilecrew.moe_forward(*inputs, **options), expected(problem), 3 * BOUNDS[torch.float32])


def test_weights_of_missing_routes_do_not_matter():
    problem = Problem(20, 3, 5, 16, 8, kind="some missing")
    inputs, options = arguments(problem)
    before = tilecrew.moe_forward(*inputs, **options)
    problem.topk_weights[problem.topk_ids < 0] = float("nan")
    assert torch.equal(tilecrew.moe_forward(*inputs, **options), before)


def test_a_bad_token_spoils_no_other():
    problem = Problem(20, 3, 5, 16, 8)
    inputs, options = arguments(problem)
    before = tilecrew.moe_forward(*inputs, **options)
    problem.x[7] = float("nan")
    after = tilecrew.moe_forward(*inputs, **options)
    assert after[7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(after[others], before[others])


def test_strided_inputs_and_transposed_weights():
    problem = Problem(20, 3, 5, 16, 8)
    (x, ids, weights, w_gate_up, w_down), options = arguments(problem)
    wanted = tilecrew.moe_forward(x, ids, weights, w_gate_up, w_down, **options)
    wide = torch.zeros(20, 40)
    wide[:, 3:19] = x
    ids, weights = ids.t().contiguous().t(), weights.t().contiguous().t()
    transposed = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w_gate_up, w_down)]
    out = tilecrew.moe_forward(wide[:, 3:19], ids.int(), weights, *transposed, **options)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("kind", ["uniform", "some missing", "all missing"])
def test_gradients_equal_those_of_the_loop(kind, layout):
    problem = Problem(13, 3, 5, 16, 8, kind=kind, dtype=torch.float64)
    names = ("x", "topk_weights", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "output_gate")
    for name in names:
        getattr(problem, name).requires_grad_()
    d_out = torch.randn(13, 16, dtype=torch.float64)
    leaves = [getattr(problem, name) for name in names]
    inputs, options = arguments(problem, layout, with_shared=True)
    actual = torch.autograd.grad(tilecrew.moe_forward(*inputs, **options), leaves, d_out)
    wanted = torch.autograd.grad(expected(problem, with_shared=True), leaves, d_out)
    for name, left, right in zip(names, actual, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_output_of_shared_experts_is_added():
    problem = Problem(13, 3, 5, 16, 8)
    inputs, options = arguments(problem, with_shared=True)
    wanted = tilecrew.moe_forward(*inputs, **options)
    output = compute_shared(problem.x, options["shared"], "interleaved").requires_grad_()
    out = tilecrew.moe_forward(*inputs, shared=output)
    assert torch.equal(out, wanted)
    assert torch.equal(torch.autograd.grad(out.sum(), output)[0], torch.ones_like(output))


@pytest.mark.slow
def test_second_gradients():
    problem = Problem(2, 2, 2, 8, 8, dtype=torch.float64)
    (x, ids, weights, w_gate_up, w_down), options = arguments(problem)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weights, w_gate_up, w_down)]

    def run(x, weights, w_gate_up, w_down):
        return tilecrew.moe_forward(x, ids, weights, w_gate_up, w_down, **options)

    assert torch.autograd.gradgradcheck(run, leaves)


def test_torch_compile_traces_through():
    problem = Problem(12, 2, 4, 16, 8)
    (x, *inputs), options = arguments(problem, with_shared=True, layout="halves")
    compiled = torch.compile(lambda x: tilecrew.moe_forward(x, *inputs, **options), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), tilecrew.moe_forward(x, *inputs, **options))


def test_capacity():
    inputs, options = arguments(Problem(12, 2, 4, 16, 8))
    assert torch.equal(tilecrew.moe_forward(*inputs, **options, capacity=12), tilecrew.moe_forward(*inputs, **options))
    with pytest.raises(ValueError, match="x of rank 0 has 12 tokens, more than its capacity of 11"):
        tilecrew.moe_forward(*inputs, **options, capacity=11)


def test_module():
    problem = Problem(30, 3, 6, 24, 16)
    layer = tilecrew.ExpertParallelMoE(6, 24, 16, shared_intermediate_size=24, shared_output_gate=True, capacity=64)
    assert set(layer.state_dict()) == {
        "w_gate_up", "w_down", "shared_w_gate_up", "shared_w_down", "shared_output_gate",
    }  # fmt: skip
    layer.load_experts(problem.gate, problem.up, problem.down)
    layer.load_shared_experts(problem.shared_gate, problem.shared_up, problem.shared_down, problem.output_gate)
    out = layer(problem.x, problem.topk_ids, problem.topk_weights)
    assert_rows_close(out, expected(problem, with_shared=True), 3 * BOUNDS[torch.float32])
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())
    with pytest.raises(ValueError, match="65 tokens, more than its capacity of 64"):
        layer(torch.zeros(65, 24), torch.zeros(65, 3, dtype=torch.int64), torch.zeros(65, 3))
    assert "experts=0..6 of 6" in repr(layer)


def test_module_learns():
    torch.manual_seed(0)
    problem = Problem(64, 2, 4, 16, 16)
    wanted = expected(problem).float()
    layer = tilecrew.ExpertParallelMoE(4, 16, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-2)
    losses = []
    for _ in range(25):
        loss = (layer(problem.x, problem.topk_ids, problem.topk_weights) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
