"""The fixture `simulate`: runs a launch in the simulator under several seeds, on outputs that start as NaN. And what
stands for assembly that the simulator does not know."""

import pytest
import torch

pytest.importorskip("triton")
from tilecrew.device.compat import gl, gluon
from tilecrew.device.launch import Launch
from tilecrew.gated_delta_rule import chunk_flags
from tilecrew.simulator import run

SEEDS = 3


def run_under_seeds(
    launch: Launch,
    outputs: list[torch.Tensor],
    num_seeds: int = SEEDS,
    resident: int = 1,
    zeros: torch.Tensor | None = None,
) -> None:
    """Every seed starts from NaN and must give the bits of the first: no result depends on who came first. `zeros`: a
    tensor that the launch expects to be zero."""
    program = run.compile_program(launch)
    first: list[torch.Tensor] = []
    for seed in range(num_seeds):
        for output in outputs:
            output.fill_(float("nan") if output.is_floating_point() else -1)
        if zeros is not None:
            zeros.zero_()
        run.simulate(launch, seed, [program], resident)
        if not first:
            first = [output.clone() for output in outputs]
        for output, expected in zip(outputs, first, strict=True):
            assert torch.equal(output.nan_to_num(nan=-7e33), expected.nan_to_num(nan=-7e33)), f"seed {seed}"


@pytest.fixture
def simulate():
    return run_under_seeds


@gluon.jit
def load_acquire(pointer, SCOPE: gl.constexpr):
    return gl.atomic_add(pointer, 0, sem="acquire", scope="gpu")


@gluon.jit
def multiprocessor():
    return gl.program_id(0)


@gluon.jit
def nanoseconds():
    return 0


@gluon.jit
def no_trap():
    pass


@pytest.fixture(autouse=True)
def simulated_words(monkeypatch):
    """What chunk_flags says in assembly that the simulator does not know."""
    for function in (load_acquire, multiprocessor, nanoseconds):
        monkeypatch.setattr(chunk_flags, function.__name__, function)
    monkeypatch.setattr(chunk_flags, "trap", no_trap)
    for function in (chunk_flags.first_item, chunk_flags.wait_until_prepared):
        monkeypatch.setattr(function, "hash", None)
