"""The grouped GEMM that gathers its rows, in the simulator: right values, no race, no deadlock.

In words of the simulator (simulated_gather) what is told are the stages' hand-overs, their proxy fences among them, and
which rows and columns go where.
"""

import pytest
import torch

pytest.importorskip("triton")
from tests.grouped_gemm import simulated_gather
from tests.grouped_gemm.hook_examples import SimulatedCountGate
from tests.grouped_gemm.problems import GROUPS, assert_close, expected, make
from tests.grouped_gemm.test_simulator import sizes_of
from tests.simulator.conftest import run_under_seeds
from tests.simulator.mutations import mutate, names_of_places
from tilecrew.device.compat import gl, gluon
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.grouped_gemm.hooks import NotifyRowBlock, SwiGLU
from tilecrew.grouped_gemm.schedule import max_row_blocks
from tilecrew.simulator import FaultError, run


@gluon.jit
def load_address(rows, tensors):
    return gl.load(tensors[1] + rows)


@pytest.fixture(autouse=True)
def simulated_words(monkeypatch):
    simulated_gather.install(monkeypatch)


def launch_of(lengths, tail, num_inner, num_columns, *, num_stages=3, num_programs=2, epilogue=None, gate=None):
    """A launch of random rows of a buffer, every seventh missing, and what it should give."""
    x, w, offs = make(lengths, tail, num_inner, num_columns)
    tokens = torch.randn(50, num_inner).to(x.dtype)
    token = torch.randint(0, 50, (x.shape[0],))
    missing = torch.arange(x.shape[0]) % 7 == 6
    addresses = torch.where(missing, 0, simulated_gather.FIRST_ADDRESS + token * num_inner * 2)
    out = torch.empty(x.shape[0], num_columns // (1 if epilogue is None else epilogue.shrink), dtype=x.dtype)
    hooks = kernel_grouped_gemm.hooks_of(gate, epilogue)
    hooks = hooks._replace(source=load_address, source_tensors=(tokens, addresses))
    tiles = sizes_of((128, 128, num_stages, 1), w.shape[0])
    launch = kernel_grouped_gemm.launch(tokens, w, offs, out, tiles, num_programs, hooks)
    rows = torch.where(missing[:, None], 0, tokens[token])
    return launch, out, expected(rows, w, offs, epilogue), offs


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (lengths, tail) in GROUPS.items() if sum(lengths) + tail])
def test_groups(name):
    launch, out, wanted, offs = launch_of(*GROUPS[name], 72, 136)
    run_under_seeds(launch, [out], 2)
    assert_close(out, wanted, offs)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_inner", [8, 64, 328])
def test_steps_and_stages(num_inner, num_stages):
    """Tiles of one step, and of more than there are stages; none is handed over late for ever."""
    launch, out, wanted, offs = launch_of([130, 0, 70, 300], 9, num_inner, 264, num_stages=num_stages, num_programs=1)
    run_under_seeds(launch, [out], 2)
    assert_close(out, wanted, offs)


@pytest.mark.slow
def test_epilogue():
    launch, out, wanted, offs = launch_of([130, 70], 0, 72, 272, epilogue=SwiGLU(8))
    run_under_seeds(launch, [out], 2)
    assert_close(out, wanted, offs, bound=6e-3)


@pytest.mark.slow
def test_a_gate_holds_back_what_another_kernel_writes():
    """Rows of the first product, in reverse, are those of the second."""
    x, w, offs = make([130, 0, 60], 0, 72, 144)
    _, second_w, _ = make([130, 0, 60], 0, 72, 136, seed=1)
    counters = torch.zeros(max_row_blocks(190, 3), dtype=torch.int32)
    hidden, out = torch.empty(190, 72, dtype=x.dtype), torch.empty(190, 136, dtype=x.dtype)
    order = torch.cat([torch.arange(127, -1, -1), torch.tensor([129, 128]), torch.arange(189, 129, -1)])
    notify = kernel_grouped_gemm.hooks_of(None, NotifyRowBlock(counters, epilogue=SwiGLU(8)))
    gated = kernel_grouped_gemm.hooks_of(SimulatedCountGate(counters), None)
    gated = gated._replace(source=load_address, source_tensors=(hidden, simulated_gather.FIRST_ADDRESS + order * 144))
    tiles = sizes_of((128, 128, 3, 1), 3)
    first = kernel_grouped_gemm.launch(x, w, offs, hidden, tiles, 2, notify)
    second = kernel_grouped_gemm.launch(hidden, second_w, offs, out, tiles, 2, gated)
    programs = [run.compile_program(launch) for launch in (first, second)]
    for seed in range(2):
        hidden.fill_(float("nan"))
        out.fill_(float("nan"))
        counters.zero_()
        run.simulate([first, second], seed, programs, 2)
        assert_close(out, expected(hidden[order], second_w, offs), offs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drop fence", "drop arrive", "drop wait"])
def test_a_fault_of_the_role_is_found(kind):
    launch, *_ = launch_of([256, 130], 0, 328, 264, num_programs=1)
    program = run.compile_program(launch)
    named = names_of_places(program, kind, run.role_names(launch))
    places = [place for (role, _), place in named.items() if role == "gather_role"]
    faults = []
    for place in places:
        try:
            run.simulate(launch, 0, [mutate(program, kind, place)])
        except FaultError:
            faults.append(place)
    # A copy that is over at once is behind the fence of its own step: that of the last steps has none left to see.
    assert len(faults) == (1 if kind == "drop fence" else len(places)) > 0
