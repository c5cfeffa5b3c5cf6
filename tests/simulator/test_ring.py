"""The arithmetic of ring.py in the simulator: stages and phases for steps up to the largest."""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")
from tilecrew.device.compat import gl, gluon
from tilecrew.device.launch import Launch
from tilecrew.device.ring import quotient_parity, remainder
from tilecrew.simulator import simulate

STEPS = torch.cat(
    [
        torch.arange(4096),
        *(torch.arange(-64, 64) + edge for edge in (2**16, 3 * 2**15, 2**17, 2**24, 2**30)),
        torch.arange(2**31 - 512, 2**31),
        (torch.arange(2048) * 1_048_573) % 2**31,
    ]
).to(torch.int32)


@dataclass(frozen=True)
class Config:
    divisor: int


@gluon.jit
def stages_kernel(steps, stages, parities, config: gl.constexpr, num_warps: gl.constexpr):
    index = gl.program_id(0) * 128 + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    step = gl.load(steps + index)
    gl.store(stages + index, remainder(step, config.divisor))
    gl.store(parities + index, quotient_parity(step, config.divisor))


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 8])
def test_stages_and_phases(divisor):
    assert STEPS.min() >= 0 and STEPS.numel() % 128 == 0
    stages, parities = torch.full_like(STEPS, -1), torch.full_like(STEPS, -1)
    arguments = (STEPS, stages, parities, Config(divisor))
    simulate(Launch(stages_kernel, STEPS.numel() // 128, arguments, {"num_warps": 4}))
    assert torch.equal(stages, STEPS % divisor)
    assert torch.equal(parities, STEPS // divisor % 2)


@gluon.jit
def walk_kernel(stages, parities, num_steps, num_warps: gl.constexpr):
    for i in range(num_steps):
        gl.store(stages + i, remainder(i, 3))
        gl.store(parities + i, quotient_parity(i, 3))


def test_scalars():
    """As roles have them: no tensor, but a loop's counter."""
    stages, parities = torch.full((2, 100), -1, dtype=torch.int32)
    simulate(Launch(walk_kernel, 1, (stages, parities, 100), {"num_warps": 4}))
    assert stages.tolist() == [i % 3 for i in range(100)]
    assert parities.tolist() == [i // 3 % 2 for i in range(100)]


@gluon.jit
def unsigned_shift_kernel(x, out, num_warps: gl.constexpr):
    index = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + index, (gl.load(x + index).to(gl.uint32) >> 17).to(gl.int32))


def test_shifts_of_unsigned_numbers_bring_in_zeros():
    x = (torch.arange(128) * 123_456_789 - 2**31) % 2**32
    out = torch.full((128,), -1, dtype=torch.int32)
    simulate(Launch(unsigned_shift_kernel, 1, (x.to(torch.int32), out), {"num_warps": 4}))
    assert (x >= 2**31).any()
    assert torch.equal(out.long(), x >> 17)
