"""The portable grouped GEMM: under Triton's interpreter in a process of its own, and compiled for other GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.grouped_gemm.problems import make

ROOT = Path(__file__).parents[2]


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    command[-1] += "/interpreted_portable.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=900)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kilobytes"), [(80, 99), (90, 227), (120, 99)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_into_shared_memory(dtype, capability, kilobytes):
    """Code for 8.0 must fit 8.6 and 8.9 too, which have 99 KB."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from tilecrew.device import aot
    from tilecrew.grouped_gemm import kernel_portable

    x, w, offs = make([100, 3, 90], 2, 128, 136, dtype=dtype)
    out, dw = x.new_empty(x.shape[0], 136), torch.empty_like(w)
    for launch in (
        kernel_portable.launch(x, w, offs, out),
        kernel_portable.launch(x, w.transpose(1, 2).contiguous().transpose(1, 2), offs, out.float()),
        kernel_portable.weight_gradient_launch(x, out, offs, dw),
    ):
        resources = aot.resources(aot.compile_launch(launch, GPUTarget("cuda", capability, 32)))
        assert resources.shared_memory_bytes <= kilobytes * 1024
        assert resources.local_memory_instructions == 0
        assert dtype == torch.float32 or resources.wgmma + resources.mma > 0
