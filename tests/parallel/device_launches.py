"""Every kernel of tilecrew.parallel, compiled for sm_90 without a GPU.

`python -m tests.parallel.device_launches` prints {"triton": version, "found": {name: {"ptx": its PTX, "resources": what
its cubin uses} or the error's traceback}} as JSON.
"""

import dataclasses
import json
import sys
import traceback

import torch
import triton

from tilecrew.device import aot
from tilecrew.device.launch import Launch
from tilecrew.grouped_gemm import kernel_grouped_gemm
from tilecrew.grouped_gemm.schedule import Problem, hopper_tiles
from tilecrew.parallel import Signals, World, kernel_exchange, kernel_preflight, kernel_signal
from tilecrew.parallel.fusion import PULL_PIECE, SUM_PIECE
from tilecrew.parallel.gemm_reduce_scatter import NotifyOwners

I32, I64 = torch.zeros(512, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
HALF = torch.zeros(256, 64, dtype=torch.bfloat16)
SECOND = 10**9


def gemm_launch() -> Launch:
    """The grouped GEMM whose epilogue tells the owners of rows."""
    world = World.emulated(1, device="cpu")[0]
    epilogue = NotifyOwners(
        torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), Signals(world, 2), 100
    )
    tiles = hopper_tiles(Problem(16384, 1, 2048, 2048, "bfloat16", notifies=True), 132)
    x, w, out = HALF, torch.zeros(1, 64, 512, dtype=torch.bfloat16), torch.zeros(256, 512, dtype=torch.bfloat16)
    hooks = kernel_grouped_gemm.hooks_of(None, epilogue)
    return kernel_grouped_gemm.launch(x, w, I32[:1], out, tiles, 2, hooks)


LAUNCHES = {
    "barrier": (kernel_signal.barrier_kernel, (I32, I64, 0, 2, SECOND), {"num_warps": 1}),
    "notify": (kernel_signal.notify_kernel, (I32, I32, I64, 0, 2, 3), {"num_warps": 1}),
    "put": (kernel_signal.put_kernel, (I32, I64, 0, 1, 0, 2, 7), {"num_warps": 1}),
    "wait": (kernel_signal.wait_kernel, (I32, 0, 1, 7, I32, I64, 0, 2, SECOND), {"num_warps": 1}),
    "pull": (
        kernel_exchange.pull_kernel,
        (HALF, I64, HALF, I32, I32, 0, 2, 128, 64),
        PULL_PIECE,
    ),
    "reduce": (
        kernel_exchange.reduce_kernel,
        ((HALF, I64, HALF), (I32, I32, I32, I32, I64), 0, 2, 128, 64, SECOND),
        SUM_PIECE,
    ),
    "copy": (kernel_preflight.copy_kernel, (I32, I32, 512, 4096), {"num_warps": 8}),
    "count": (kernel_preflight.count_kernel, (I32, 9, I32, I32, 512, "sys", 4096), {"num_warps": 4}),
    "GEMM that notifies owners": None,
}


def main() -> None:
    found = {}
    for name, parts in LAUNCHES.items():
        try:
            launch = gemm_launch() if parts is None else Launch(parts[0], 1, *parts[1:])
            compiled = aot.compile_launch(launch)
            found[name] = {"ptx": compiled.asm["ptx"], "resources": dataclasses.asdict(aot.resources(compiled))}
        except Exception:  # the test of this launch shows it; those of the others still run
            found[name] = traceback.format_exc()
    json.dump({"triton": triton.__version__, "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
