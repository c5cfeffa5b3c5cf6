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
from tilecrew.parallel import kernel_exchange, kernel_signal

I32, I64 = torch.zeros(512, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
HALF = torch.zeros(256, 64, dtype=torch.bfloat16)
PIECE = {"ROWS": 8, "COLUMNS": 512}
SECOND = 10**9

LAUNCHES = {
    "barrier": (kernel_signal.barrier_kernel, (I32, I64, 0, 2, SECOND), {"num_warps": 1}),
    "notify": (kernel_signal.notify_kernel, (I32, I32, I64, 0, 2, 3), {"num_warps": 1}),
    "put": (kernel_signal.put_kernel, (I32, I64, 0, 1, 0, 2, 7), {"num_warps": 1}),
    "wait": (kernel_signal.wait_kernel, (I32, 0, 1, 7, I32, I64, 0, 2, SECOND), {"num_warps": 1}),
    "pull": (
        kernel_exchange.pull_kernel,
        (HALF, I64, HALF, I32, I32, 0, 2, 128, 64),
        {"num_warps": 8, **PIECE},
    ),
    "reduce": (
        kernel_exchange.reduce_kernel,
        ((HALF, I64, HALF), I32, I32, I32, I64, 0, 2, 128, 64, SECOND),
        {"num_warps": 8, **PIECE},
    ),
}


def main() -> None:
    found = {}
    for name, (kernel, arguments, options) in LAUNCHES.items():
        try:
            compiled = aot.compile_launch(Launch(kernel, 1, arguments, options))
            found[name] = {"ptx": compiled.asm["ptx"], "resources": dataclasses.asdict(aot.resources(compiled))}
        except Exception:  # the test of this launch shows it; those of the others still run
            found[name] = traceback.format_exc()
    json.dump({"triton": triton.__version__, "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
