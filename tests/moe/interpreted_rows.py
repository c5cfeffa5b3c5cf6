"""The kernels that move rows, under Triton's interpreter: run by test_rows.py."""

import pytest
import torch

from tests.gated_delta_rule import interpreter
from tests.moe.problems import BOUNDS, assert_rows_close, random_ids, tables_of
from tilecrew.moe import kernel_rows

interpreter.allow_loop_bounds()
SHAPES = [(5, 1, 3, 8), (17, 2, 5, 136), (3, 20, 4, 2056), (1, 6, 64, 1024)]
DTYPES = [torch.float16, torch.float32]


def make(shape, dtype, kind="some missing"):
    num_tokens, top_k, num_experts, hidden = shape
    row_routes, token_rows = tables_of(random_ids(num_tokens, top_k, num_experts, kind=kind), num_experts, 4)
    x = torch.randn(num_tokens, hidden).to(dtype)
    y = torch.randn(row_routes.shape[0], hidden).to(dtype)
    y[row_routes < 0] = float("nan")
    weights = torch.rand(num_tokens, top_k)
    weights[token_rows < 0] = float("nan")
    return x, y, weights, row_routes, token_rows


def empty(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_gather(shape, dtype, weighted):
    x, _, weights, row_routes, _ = make(shape, dtype)
    top_k = shape[1]
    out = empty(row_routes.shape[0], shape[3], dtype=dtype)
    kernel_rows.gather_launch(x, weights if weighted else None, row_routes, out, top_k).run()
    wanted = torch.zeros(out.shape, dtype=torch.float64)
    for row, route in enumerate(row_routes.tolist()):
        if route >= 0:
            factor = float(weights.flatten()[route]) if weighted else 1.0
            wanted[row] = factor * x[route // top_k].double()
    assert_rows_close(out, wanted, BOUNDS[dtype])
    assert weighted or torch.equal(out.double(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("has_base", [False, True])
def test_combine(shape, dtype, weighted, has_base):
    x, y, weights, _, token_rows = make(shape, dtype)
    out = empty(shape[0], shape[3], dtype=dtype)
    base = x if has_base else None
    kernel_rows.combine_launch(y, weights if weighted else None, token_rows, base, out).run()
    wanted = x.double() if has_base else torch.zeros(out.shape, dtype=torch.float64)
    for token in range(shape[0]):
        for k, row in enumerate(token_rows[token].tolist()):
            if row >= 0:
                factor = float(weights[token, k]) if weighted else 1.0
                wanted[token] += factor * y[row].double()
    assert_rows_close(out, wanted, 4 * BOUNDS[dtype])


@pytest.mark.parametrize("shape", SHAPES)
def test_combine_adds_in_the_order_of_k(shape):
    """Bit by bit what adding one route after the other gives, products rounded before sums as the interpreter does."""
    _, y, weights, _, token_rows = make(shape, torch.float32)
    out = empty(shape[0], shape[3], dtype=torch.float32)
    kernel_rows.combine_launch(y, weights, token_rows, None, out).run()
    wanted = torch.zeros_like(out)
    for token in range(shape[0]):
        for k, row in enumerate(token_rows[token].tolist()):
            if row >= 0:
                wanted[token] = wanted[token] + weights[token, k] * y[row]
    assert torch.equal(out, wanted)


def test_no_route_at_all_gives_zeros():
    x, y, weights, row_routes, token_rows = make((4, 2, 3, 40), torch.float16, "all missing")
    out = empty(4, 40, dtype=torch.float16)
    kernel_rows.combine_launch(y, weights, token_rows, None, out).run()
    assert torch.equal(out, torch.zeros_like(out))
    rows = empty(row_routes.shape[0], 40, dtype=torch.float16)
    kernel_rows.gather_launch(x, weights, row_routes, rows, 2).run()
    assert torch.equal(rows, torch.zeros_like(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape, dtype):
    x, y, _, _, token_rows = make(shape, dtype)
    out = empty(*token_rows.shape, dtype=torch.float32)
    kernel_rows.products_launch(x, y, token_rows, out).run()
    for token in range(shape[0]):
        for k, row in enumerate(token_rows[token].tolist()):
            if row < 0:
                assert out[token, k] == 0
            else:
                terms = x[token].double() * y[row].double()
                assert abs(float(out[token, k]) - float(terms.sum())) <= 1e-6 * float(terms.abs().sum())
