"""Compile a kernel without a GPU and read what the compiler made of it: registers, spills, shared memory, instructions.

Triton's wheel carries ptxas, cuobjdump and nvdisasm, so a launch's arguments (CPU tensors in place of device tensors)
are enough to get the cubin that a GPU would run. The private imports of this job stand here only.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tilecrew.device.compat import GluonASTSource
from tilecrew.device.launch import Launch

SM90 = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Resources:
    """What a cubin uses. Registers are those at entry; roles re-divide them. Spills: STL and LDL instructions."""

    registers: int
    local_memory_instructions: int
    stack_bytes: int
    shared_memory_bytes: int
    wgmma: int
    mma: int
    tma: int


def compile_launch(launch: Launch, target: GPUTarget = SM90):
    """The compiled kernel of one launch, for `target`; nothing is launched and no GPU is needed.

    launch: a Launch, or anything else with its `kernel` (in Gluon or in plain Triton), `args` and `options`.
    Returns Triton's compiled kernel: `.asm["ttgir" | "ptx" | "cubin"]`, `.metadata.shared`.
    """
    # A launch adds this option itself; without it the compile key differs from the launch's.
    options = {"instrumentation_mode": knobs.compilation.instrumentation_mode, **launch.options}
    backend = make_backend(target)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound_args, specialization, extra = bind(*launch.args, **options)
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, options, bound_args, specialization, extra)
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def resources(compiled) -> Resources:
    """Registers, spills, shared memory and the instructions that matter, read from the cubin's disassembly."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        sass = _run(tools / "nvdisasm", "-c", file.name)
    return Resources(
        registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
        local_memory_instructions=len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        stack_bytes=int(re.findall(r"STACK:(\d+)", usage)[-1]),
        shared_memory_bytes=compiled.metadata.shared,
        wgmma=len(re.findall(r"\bHGMMA\b", sass)),
        mma=len(re.findall(r"\bHMMA\b", sass)),
        tma=len(re.findall(r"\bUTMA(?:LDG|STG)\b", sass)),
    )


def _run(tool: Path, *arguments: str) -> str:
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True, timeout=120).stdout
