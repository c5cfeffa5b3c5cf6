"""Moving rows: the operators in torch and their gradients, the kernels interpreted and compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.moe.problems import random_ids, tables_of
from tilecrew.moe import operators

ROOT = Path(__file__).parents[2]
ops = torch.ops.tilecrew


def make(num_tokens=5, top_k=3, num_experts=4, hidden=6, kind="some missing", dtype=torch.float64):
    row_routes, token_rows = tables_of(random_ids(num_tokens, top_k, num_experts, kind=kind), num_experts, 4)
    x = torch.randn(num_tokens, hidden, dtype=dtype)
    y = torch.randn(row_routes.shape[0], hidden, dtype=dtype)
    weights = torch.rand(num_tokens, top_k, dtype=operators.wide_dtype(dtype))
    return x, y, weights, row_routes, token_rows


@pytest.mark.parametrize("kind", ["uniform", "some missing", "all missing", "one expert"])
def test_values(kind):
    x, y, weights, row_routes, token_rows = make(kind=kind)
    y[row_routes < 0] = float("nan")
    weights[token_rows < 0] = float("nan")
    gathered = ops.moe_gather(x, weights, row_routes, token_rows)
    combined = ops.moe_combine(y, weights, x, row_routes, token_rows)
    products = ops.moe_products(x, y, row_routes, token_rows)
    wanted = x.clone()
    seen = torch.zeros(row_routes.shape[0], dtype=torch.bool)
    for token in range(x.shape[0]):
        for k, row in enumerate(token_rows[token].tolist()):
            if row < 0:
                assert products[token, k] == 0
                continue
            seen[row] = True
            wanted[token] += weights[token, k] * y[row]
            torch.testing.assert_close(gathered[row], weights[token, k] * x[token])
            torch.testing.assert_close(products[token, k], x[token] @ y[row])
    torch.testing.assert_close(combined, wanted)
    assert torch.equal(seen, row_routes >= 0)
    assert not gathered[~seen].any()


def test_first_and_second_gradients():
    x, y, weights, row_routes, token_rows = make()
    x, y, weights = (tensor.requires_grad_() for tensor in (x, y, weights))
    base = torch.randn_like(x).requires_grad_()
    is_row = (row_routes >= 0)[:, None]

    def gather(x, weights):
        return ops.moe_gather(x, weights, row_routes, token_rows)

    def combine(y, weights, base):
        return ops.moe_combine(y, weights, base, row_routes, token_rows)

    def products(x, y):
        return ops.moe_products(x, torch.where(is_row, y, 0), row_routes, token_rows)

    for function, inputs in ((gather, (x, weights)), (combine, (y, weights, base)), (products, (x, y))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_without_weights():
    x, y, weights, row_routes, token_rows = make()
    ones = torch.ones_like(weights)
    assert torch.equal(ops.moe_gather(x, None, row_routes, token_rows), ops.moe_gather(x, ones, row_routes, token_rows))
    assert torch.equal(
        ops.moe_combine(y, None, None, row_routes, token_rows), ops.moe_combine(y, ones, None, row_routes, token_rows)
    )


def test_registered_as_torch_wants_it():
    x, y, weights, row_routes, token_rows = make(dtype=torch.float32)
    x.requires_grad_()
    y.requires_grad_()
    weights.requires_grad_()
    torch.library.opcheck(ops.moe_gather.default, (x, weights, row_routes, token_rows))
    torch.library.opcheck(ops.moe_combine.default, (y, weights, x, row_routes, token_rows))
    torch.library.opcheck(ops.moe_products.default, (x, y, row_routes, token_rows))
    ids = random_ids(12, 2, 5, kind="some missing").reshape(2, 6, 2)
    torch.library.opcheck(ops.moe_routing.default, (ids, torch.tensor([6, 3]), 5, 1, 4))


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    command[-1] += "/interpreted_rows.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=900)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_without_spills_and_with_wide_accesses(dtype, capability):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from tilecrew.device import aot
    from tilecrew.moe import kernel_rows

    x, y, weights, row_routes, token_rows = make(16, 10, 8, 2048, dtype=dtype)
    out_rows, out_tokens, out_weights = torch.empty_like(y), torch.empty_like(x), torch.empty_like(weights)
    wide_routes = token_rows.repeat(1, 2).contiguous()  # more routes than are unrolled
    for launch in (
        kernel_rows.gather_launch(x, None, row_routes, out_rows, 10),
        kernel_rows.gather_launch(x, weights, row_routes, out_rows, 10),
        kernel_rows.combine_launch(y, weights, token_rows, x, out_tokens),
        kernel_rows.combine_launch(y, None, token_rows, None, out_tokens),
        kernel_rows.combine_launch(y, None, wide_routes, None, out_tokens),
        kernel_rows.products_launch(x, y, token_rows, out_weights),
    ):
        compiled = aot.compile_launch(launch, GPUTarget("cuda", capability, 32))
        assert aot.resources(compiled).local_memory_instructions == 0
        assert ".v4.b32" in compiled.asm["ptx"]  # 16 bytes a thread
