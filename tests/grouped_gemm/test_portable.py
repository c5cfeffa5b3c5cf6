"""The portable grouped GEMM: under Triton's interpreter in a process of its own, and compiled for other GPUs."""

import pytest
import torch

from tests.grouped_gemm.problems import make
from tests.interpreter import run_interpreted


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("grouped_gemm/interpreted_portable.py")


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
