"""The product that reads tokens where they are: its values, which calls take it, what it launches, and its source."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilecrew
from tests.moe.problems import BOUNDS, Problem, assert_rows_close
from tests.moe.test_api import KINDS, arguments, expected
from tilecrew.moe import SharedExperts, build_routing, one_rank
from tilecrew.moe.experts import GATE_UP_LAYOUTS

ops = torch.ops.tilecrew
BF16, FP16 = torch.bfloat16, torch.float16


def tables_of(problem):
    """row_routes, token_rows, offs"""
    routing = build_routing(problem.topk_ids[None], num_experts=problem.num_experts, row_block=1)
    token_rows = routing.combine_indices[:, 1].reshape(problem.topk_ids.shape).contiguous()
    return routing.row_routes, token_rows, routing.offs


def gather_gemm(problem, layout, transposed=False):
    row_routes, token_rows, offs = tables_of(problem)
    w = arguments(problem, layout)[0][3]
    if transposed:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    return ops.moe_gather_gemm(problem.x, row_routes, token_rows, w, offs, layout)


def gathered(problem, layout):
    """What it should give, in float64."""
    p = problem
    row_routes, _, offs = (table.cpu() for table in tables_of(p))
    columns = p.gate.shape[2] * (1 if layout == "interleaved" else 2)
    out = torch.zeros(row_routes.shape[0], columns, dtype=torch.float64)
    x, gates, ups = p.x.cpu().double(), p.gate.cpu().double(), p.up.cpu().double()
    begin = 0
    for expert, end in enumerate(offs.tolist()):
        rows = x[row_routes[begin:end].long() // p.topk_ids.shape[1]]
        gate, up = rows @ gates[expert], rows @ ups[expert]
        interleaved = layout == "interleaved"
        out[begin:end] = torch.nn.functional.silu(gate) * up if interleaved else torch.cat((gate, up), 1)
        begin = end
    return out


class Operators(TorchDispatchMode):
    """names: of tilecrew's operators, as the dispatcher meets them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "tilecrew":
            self.names.append(operator._opname)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, layout):
    for dtype in (torch.float32, torch.float64):
        problem = Problem(37, 3, 6, 24, 16, kind=kind, dtype=dtype)
        problem.x[(problem.topk_ids < 0).all(1)] = float("nan")  # tokens without routes are not read
        out, end = gather_gemm(problem, layout), int(tables_of(problem)[2][-1])
        assert_rows_close(out, gathered(problem, layout), 3 * BOUNDS[dtype])
        assert not out[end:].any()


@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
def test_equals_calls_with_gradients(layout):
    problem = Problem(20, 3, 5, 16, 8, kind="some missing", dtype=torch.float64)
    inputs, options = arguments(problem, layout, with_shared=True)
    without = tilecrew.moe_forward(*inputs, **options)
    problem.x.requires_grad_()
    torch.testing.assert_close(without, tilecrew.moe_forward(*inputs, **options).detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
def test_registered_as_torch_wants_it(layout):
    problem = Problem(6, 2, 5, 16, 8, kind="some missing")
    row_routes, token_rows, offs = tables_of(problem)
    w = arguments(problem, layout)[0][3]
    torch.library.opcheck(ops.moe_gather_gemm.default, (problem.x, row_routes, token_rows, w, offs, layout))


@pytest.mark.parametrize(("layout", "num_columns"), [("interleaved", 24), ("halves", 48)])
def test_shape_without_values(layout, num_columns):
    tables = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((14,), (7, 2), (5,))]
    x, w = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((7, 16), (5, 16, 48)))
    out = ops.moe_gather_gemm(x, tables[0], tables[1], w, tables[2], layout)
    assert (out.shape, out.dtype) == ((14, num_columns), BF16)


NAMES = (
    "x",
    "topk_weights",
    "w_gate_up",
    "w_down",
    "shared.w_gate_up",
    "shared.w_down",
    "shared.output_gate",
    "shared",
)


@pytest.mark.parametrize("name", NAMES)
def test_calls_with_gradients_copy(name):
    """Whichever tensor requires one, unless gradients are disabled."""
    inputs, options = arguments(Problem(9, 2, 4, 16, 8), with_shared=True)
    x, ids, weights, w_gate_up, w_down = inputs
    if name == "shared":
        options["shared"] = torch.randn(9, 16)
    shared = options["shared"]
    of_shared = shared._asdict() if isinstance(shared, SharedExperts) else {}
    tensors = {"x": x, "topk_weights": weights, "w_gate_up": w_gate_up, "w_down": w_down, "shared": shared}
    tensors |= {f"shared.{part}": tensor for part, tensor in of_shared.items()}

    def names():
        with Operators() as seen:
            tilecrew.moe_forward(x, ids, weights, w_gate_up, w_down, **options)
        return seen.names

    assert "moe_gather_gemm" in names()
    assert "moe_gather" not in names()
    tensors[name].requires_grad_()
    assert "moe_gather" in names()
    assert "moe_gather_gemm" not in names()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert "moe_gather_gemm" in names()


def test_torch_compile_traces_through_both_layouts():
    for layout in GATE_UP_LAYOUTS:
        (x, *inputs), options = arguments(Problem(12, 2, 4, 16, 8), layout)
        compiled = torch.compile(
            lambda x, inputs=inputs, options=options: tilecrew.moe_forward(x, *inputs, **options),
            fullgraph=True,
            backend="aot_eager",
        )
        assert torch.equal(compiled(x), tilecrew.moe_forward(x, *inputs, **options))


@pytest.fixture
def recorder(monkeypatch):
    """Kernels that the layer launches as on an H200, recorded on the CPU."""
    pytest.importorskip("triton")
    from tests.moe import traced_launches

    return traced_launches.install(monkeypatch)


def launched(recorder, problem, layout="interleaved"):
    """Names of kernels, and of the sources of those that gather."""
    inputs, options = arguments(problem, layout)
    recorder.clear()
    with recorder:
        tilecrew.moe_forward(*inputs, **options)
    assert recorder.host_waits == 0
    entries = [entry for entry in recorder.log if entry.kind == "kernel"]
    return [entry.name for entry in entries], sum("place_of_own_token" in entry.key for entry in entries)


@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_first_product_gathers_on_hopper(dtype, layout, recorder):
    problem = Problem(9, 2, 4, 16, 8, kind="some missing", dtype=dtype)
    names, num_gathering = launched(recorder, problem, layout)
    assert names.count("grouped_gemm_kernel") == 2
    assert num_gathering == 1
    assert "gather_kernel" not in names
    problem.x.requires_grad_()
    names, num_gathering = launched(recorder, problem, layout)
    assert names.count("grouped_gemm_kernel") == 2
    assert num_gathering == 0
    assert "gather_kernel" in names


def test_float32_is_copied_on_hopper(recorder):
    names, num_gathering = launched(recorder, Problem(9, 2, 4, 16, 8))
    assert "gather_kernel" in names
    assert num_gathering == 0


def test_other_gpus_copy(recorder, monkeypatch):
    from tests.grouped_gemm.problems import H200
    from tilecrew._hardware import Hardware

    problem = Problem(9, 2, 4, 16, 8, dtype=BF16)
    assert launched(recorder, problem)[1] == 1
    monkeypatch.setattr(one_rank, "hardware_of", lambda device: Hardware("cuda", "cuda", (8, 0), 108, H200.num_sms))
    names, num_gathering = launched(recorder, problem)
    assert "gather_kernel" in names
    assert num_gathering == 0


def test_no_tokens_launch_no_product(recorder):
    names, _ = launched(recorder, Problem(0, 2, 4, 16, 8, dtype=BF16))
    assert "grouped_gemm_kernel" not in names


@pytest.fixture
def runs(recorder, monkeypatch):
    """(key, tensors) of launches that may be remembered."""
    found = []
    monkeypatch.setattr(one_rank.LAUNCHES, "run", lambda key, tensors, make: found.append((key, tensors)))
    return found


def test_remembered_launches_differ_where_their_kernels_do(runs):
    gather_gemm(Problem(12, 2, 4, 16, 8, dtype=BF16), "halves")
    gather_gemm(Problem(12, 2, 4, 16, 8, dtype=BF16, seed=1), "halves")
    assert runs[0][0] == runs[1][0]
    gather_gemm(Problem(12, 2, 4, 16, 8, dtype=BF16), "interleaved")
    gather_gemm(Problem(12, 2, 4, 16, 8, dtype=BF16), "halves", transposed=True)
    gather_gemm(Problem(8, 3, 4, 16, 8, dtype=BF16), "halves")
    gather_gemm(Problem(12, 2, 5, 16, 8, dtype=BF16), "halves")
    gather_gemm(Problem(12, 2, 4, 24, 8, dtype=BF16), "halves")
    keys = [key for key, _ in runs[1:]]
    assert len(set(keys)) == len(keys)


def test_tokens_that_lie_between_16_bytes_are_copied(runs):
    """Weights that do are refused."""
    problem = Problem(12, 2, 4, 16, 8, dtype=BF16)
    x = torch.empty(12 * 16 + 1, dtype=BF16)[1:].view(12, 16).copy_(problem.x)
    assert x.data_ptr() % 16
    row_routes, token_rows, offs = tables_of(problem)
    w = arguments(problem, "halves")[0][3]
    ops.moe_gather_gemm(x, row_routes, token_rows, w, offs, "halves")
    (_, tensors) = runs[0]
    assert tensors[0].data_ptr() % 16 == 0
    assert torch.equal(tensors[0], x)
    w = torch.empty(w.numel() + 1, dtype=BF16)[1:].view(w.shape)
    with pytest.raises(ValueError, match="w_gate_up must start at an address that is a multiple of 16 bytes"):
        ops.moe_gather_gemm(problem.x, row_routes, token_rows, w, offs, "halves")


def first_address(x):
    return 16  # simulated_gather.FIRST_ADDRESS


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "kind"), [(1, "uniform"), (3, "some missing"), (3, "all missing")])
@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
def test_simulated(layout, top_k, kind, monkeypatch):
    """The whole kernel with its source, from tables without padding: groups begin at any row."""
    pytest.importorskip("triton")
    from tests.grouped_gemm import simulated_gather
    from tests.grouped_gemm.problems import H200
    from tests.simulator.conftest import run_under_seeds
    from tilecrew.device.compat import gluon
    from tilecrew.moe import kernel_dispatch_gemm

    simulated_gather.install(monkeypatch)
    monkeypatch.setattr(kernel_dispatch_gemm, "address_of", gluon.jit(first_address))
    monkeypatch.setattr(kernel_dispatch_gemm.place_of_own_token, "hash", None)
    monkeypatch.setattr(one_rank, "hardware_of", lambda device: H200)
    problem = Problem(150, top_k, 3, 72, 72, kind=kind, dtype=BF16)
    problem.x[(problem.topk_ids < 0).all(1)] = float("nan")
    row_routes, _, offs = tables_of(problem)
    w = arguments(problem, layout)[0][3]
    out = torch.empty(150 * top_k, 72 if layout == "interleaved" else 144, dtype=BF16)
    epilogue = one_rank._epilogue_of(layout)
    launch = one_rank.gather_gemm_launch(problem.x, row_routes, offs, w, out, top_k, epilogue)
    run_under_seeds(launch._replace(num_programs=2), [out], 2)
    assert_rows_close(out, gathered(problem, layout), BOUNDS[BF16])


def test_expected_values_are_those_of_the_layer():
    """The product of this file's truth with the second weights, summed, is the truth of the layer."""
    problem = Problem(11, 3, 4, 16, 8, kind="some missing", dtype=torch.float64)
    row_routes, token_rows, offs = tables_of(problem)
    hidden, rows, begin = gathered(problem, "interleaved"), [], 0
    for expert, end in enumerate(offs.tolist()):
        rows.append(hidden[begin:end] @ problem.down[expert])
        begin = end
    y = torch.cat([*rows, torch.full((len(hidden) - begin, 16), float("nan"), dtype=torch.float64)])
    out = ops.moe_combine(y, problem.topk_weights, None, row_routes, token_rows)
    assert_rows_close(out, expected(problem), BOUNDS[torch.float64])
