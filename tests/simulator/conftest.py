"""The fixture `simulate`: runs a launch in the simulator under several seeds, on outputs that start as NaN."""

import pytest
import torch

pytest.importorskip("triton")
from tilecrew.device.launch import Launch
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
