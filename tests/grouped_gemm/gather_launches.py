"""The grouped GEMM that gathers its rows, compiled for sm_90 without a GPU.

`python -m tests.grouped_gemm.gather_launches` prints {"triton": version, "found": {name: {"ptx": its PTX, "copies": its
asynchronous copies of a thread, "resources": what its cubin uses, "budget": the shared memory that its schedule counts
on} or the error's traceback}} as JSON.
"""

import dataclasses
import json
import re
import sys
import traceback

import torch
import triton

from tests.grouped_gemm.gather_sources import from_ranks, from_table
from tests.grouped_gemm.problems import H200, make
from tilecrew.device import aot
from tilecrew.device.launch import Launch
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.grouped_gemm.hooks import CountGate, SwiGLU
from tilecrew.grouped_gemm.schedule import Problem, TileSizes, hopper_tiles

BF16, FP16 = torch.bfloat16, torch.float16
I32, I64 = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)

# Number of groups and rows that the schedule is asked for, dtype, whether w is transposed, whether there is a gate,
# epilogue, source.
LAUNCHES = {
    "128 x 256": (8, 16384, BF16, False, False, None, from_table),
    "128 x 128": (8, 1024, BF16, False, False, None, from_table),
    "SwiGLU 8, 128 groups": (128, 16384, BF16, False, False, SwiGLU(8), from_table),
    "SwiGLU 8, ranks, 512 groups": (512, 20480, BF16, False, False, SwiGLU(8), from_ranks),
    "SwiGLU 8, ranks, transposed": (128, 16384, BF16, True, False, SwiGLU(8), from_ranks),
    "count gate, ranks, float16": (8, 16384, FP16, False, True, None, from_ranks),
}


def tiles_of(name: str) -> TileSizes:
    num_groups, num_rows, dtype, _, has_gate, _, _ = LAUNCHES[name]
    problem = Problem(num_rows, num_groups, 2048, 2048, str(dtype).removeprefix("torch."), has_gate)
    return hopper_tiles(dataclasses.replace(problem, gathers=True), H200.num_sms)


def make_launch(name: str) -> Launch:
    """On small tensors: sizes do not reach the compiled kernel, but the tiles and the number of groups do."""
    num_groups, _, dtype, transposed, has_gate, epilogue, source = LAUNCHES[name]
    x, w, offs = make([1] * num_groups, 0, 128, 512, dtype=dtype, transposed=transposed)
    hooks = kernel_grouped_gemm.hooks_of(CountGate(I32) if has_gate else None, epilogue)
    tensors = (I64,) if source is from_table else (x, I64, I32, 256)
    out = x.new_empty(x.shape[0], 512 // hooks.shrink)
    hooks = hooks._replace(source=source, source_tensors=tensors)
    return kernel_grouped_gemm.launch(x, w, offs, out, tiles_of(name), 2, hooks)


def main() -> None:
    found = {}
    for name in LAUNCHES:
        try:
            compiled = aot.compile_launch(make_launch(name))
            found[name] = {
                "ptx": compiled.asm["ptx"],
                "copies": re.findall(r"\bLDGSTS\S*", aot.disassembly(compiled)),
                "resources": dataclasses.asdict(aot.resources(compiled)),
                "budget": tiles_of(name).shared_memory_bytes,
            }
        except Exception:  # the test of this launch shows it; those of the others still run
            found[name] = traceback.format_exc()
    json.dump({"triton": triton.__version__, "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
