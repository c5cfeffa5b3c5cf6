"""Every kind of launch of the grouped GEMM with roles, compiled without a GPU for sm_90, and with mma.sync for sm_120
too: `python -m tests.grouped_gemm.gluon_launches` prints {"triton": version, "resources": {name: what its cubin uses,
and the shared memory that its schedule counts on, or the error's traceback}} as JSON; with --few only of those in FEW.

A process of its own, because a process has one version of Triton: PYTHONPATH chooses it, TRITON_CACHE_DIR must too.
"""

import dataclasses
import json
import sys
import traceback

import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.grouped_gemm.problems import H200, make
from tilecrew.device import aot
from tilecrew.device.launch import Launch
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.grouped_gemm.hooks import GELU, Bias, CountGate, NotifyRowBlock, RouteWeight, SiLU, SwiGLU
from tilecrew.grouped_gemm.schedule import Problem, TileSizes, hopper_tiles, mma_sync_tiles

BF16, FP16 = torch.bfloat16, torch.float16
NUM_COLUMNS = 512

# Number of groups and rows that the schedule is asked for, dtype, whether w is transposed, gate, epilogue.
LAUNCHES = {
    "128 x 256": (8, 16384, BF16, False, None, None),
    "128 x 256, transposed": (8, 16384, BF16, True, None, None),
    "128 x 256, float16, 256 groups": (256, 2**17, FP16, False, None, None),
    "128 x 128": (8, 1024, BF16, False, None, None),
    "64 x 256": (128, 4096, BF16, False, None, None),
    "64 x 256, transposed": (128, 4096, BF16, True, None, None),
    "64 x 128, float16": (1, 1, FP16, False, None, None),
    "64 x 256, 1022 groups": (1022, 4096, BF16, False, None, None),
    "count gate": (8, 16384, BF16, False, "count", None),
    "bias": (8, 16384, BF16, False, None, "bias"),
    "SiLU": (8, 16384, BF16, False, None, "silu"),
    "GELU": (8, 16384, BF16, True, None, "gelu"),
    "GELU, tanh, 64 rows": (128, 4096, BF16, False, None, "gelu tanh"),
    "SwiGLU 1": (8, 16384, BF16, False, None, "swiglu 1"),
    "SwiGLU 8, gate": (8, 16384, BF16, False, "count", "swiglu 8"),
    "SwiGLU 8, 64 rows, transposed": (128, 4096, BF16, True, None, "swiglu 8"),
    "route weight": (8, 16384, FP16, False, None, "route"),
    "notify": (8, 16384, BF16, False, None, "notify"),
    "notify, SwiGLU 8, gate, transposed": (8, 16384, BF16, True, "count", "notify swiglu 8"),
}
# The same with mma.sync, each for sm_90 and sm_120.
MMA_SYNC_LAUNCHES = {
    "plain": (8, 16384, BF16, False, None, None),
    "transposed": (8, 16384, BF16, True, None, None),
    "float16, 256 groups": (256, 4096, FP16, False, None, None),
    "gate, bias": (8, 16384, BF16, False, "count", "bias"),
    "GELU": (8, 16384, BF16, True, None, "gelu"),
    "SwiGLU 1": (8, 16384, BF16, False, None, "swiglu 1"),
    "notify, SwiGLU 8": (8, 16384, BF16, False, None, "notify swiglu 8"),
}
TARGETS = {"sm_90": aot.SM90, "sm_120": GPUTarget("cuda", 120, 32)}
MMA_SYNC_NAMES = [f"{name}, {target}" for name in MMA_SYNC_LAUNCHES for target in TARGETS]

# What versions of Triton that are not installed compile: every kernel with all tiles, elements, layouts of w, with a
# gate and without, and every epilogue that is more than a function of one element.
FEW = [
    "128 x 256, float16, 256 groups",
    "128 x 128",
    "64 x 256, transposed",
    "64 x 128, float16",
    "64 x 256, 1022 groups",
    "bias",
    "GELU, tanh, 64 rows",
    "SwiGLU 1",
    "SwiGLU 8, gate",
    "notify",
    "notify, SwiGLU 8, gate, transposed",
]
MMA_SYNC_FEW = [
    f"{name}, {target}"
    for name, target in (
        ("plain", "sm_90"),
        ("float16, 256 groups", "sm_120"),
        ("gate, bias", "sm_90"),
        ("GELU", "sm_90"),
        ("SwiGLU 1", "sm_120"),
        ("notify, SwiGLU 8", "sm_90"),
    )
]
OF_ONE_ELEMENT = ("silu", "gelu", "gelu tanh", "route")


def epilogue_of(name, num_groups, num_rows):
    return {
        None: lambda: None,
        "bias": lambda: Bias(torch.zeros(num_groups, NUM_COLUMNS)),
        "silu": SiLU,
        "gelu": GELU,
        "gelu tanh": lambda: GELU("tanh"),
        "swiglu 1": SwiGLU,
        "swiglu 8": lambda: SwiGLU(8),
        "route": lambda: RouteWeight(torch.zeros(num_rows)),
        "notify": lambda: NotifyRowBlock(torch.zeros(num_groups, dtype=torch.int32)),
        "notify swiglu 8": lambda: NotifyRowBlock(torch.zeros(num_groups, dtype=torch.int32), epilogue=SwiGLU(8)),
    }[name]()


def case_of(name: str) -> tuple[tuple, TileSizes, GPUTarget]:
    """The entry of a table, its tiles, and what it is compiled for."""
    if name in LAUNCHES:
        num_groups, num_rows, _, _, gate, epilogue = case = LAUNCHES[name]
        notifies = epilogue is not None and epilogue.startswith("notify")
        problem = Problem(num_rows, num_groups, 2048, 2048, "bfloat16", gate is not None, notifies)
        return case, hopper_tiles(problem, H200.num_sms), aot.SM90
    name, target = name.rsplit(", ", 1)
    case = MMA_SYNC_LAUNCHES[name]
    return case, mma_sync_tiles(Problem(case[1], case[0], 2048, 2048, "bfloat16")), TARGETS[target]


def properties_of(name: str) -> set[tuple]:
    """What a launch is an example of."""
    (_, _, dtype, transposed, gate, epilogue), tiles, target = case_of(name)
    kernel = "roles" if name in LAUNCHES else "mma.sync"
    epilogue = "of one element" if epilogue in OF_ONE_ELEMENT else epilogue
    entries = (tiles, dtype, transposed, gate, epilogue, target)
    return {(kernel, number, str(entry)) for number, entry in enumerate(entries)}


def make_launch(name: str) -> Launch:
    """On small tensors: sizes do not reach the compiled kernel, but the tiles and the number of groups do."""
    (num_groups, _, dtype, transposed, gate, epilogue), tiles, _ = case_of(name)
    x, w, offs = make([1] * num_groups, 0, 128, NUM_COLUMNS, dtype=dtype, transposed=transposed)
    hook = epilogue_of(epilogue, num_groups, x.shape[0])
    out = x.new_empty(x.shape[0], NUM_COLUMNS // (1 if hook is None else hook.shrink))
    counters = CountGate(torch.zeros(8, dtype=torch.int32)) if gate else None
    hooks = kernel_grouped_gemm.hooks_of(counters, hook)
    return kernel_grouped_gemm.launch(x, w, offs, out, tiles, 2, hooks)


def main() -> None:
    resources = {}
    for name in (*FEW, *MMA_SYNC_FEW) if "--few" in sys.argv else (*LAUNCHES, *MMA_SYNC_NAMES):
        _, tiles, target = case_of(name)
        try:
            found = dataclasses.asdict(aot.resources(aot.compile_launch(make_launch(name), target)))
            resources[name] = {**found, "budget": tiles.shared_memory_bytes}
        except Exception:  # the test of this launch shows it; those of the others still run
            resources[name] = traceback.format_exc()
    json.dump({"triton": triton.__version__, "resources": resources}, sys.stdout)


if __name__ == "__main__":
    main()
