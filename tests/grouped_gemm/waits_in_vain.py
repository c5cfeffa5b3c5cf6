"""A gate that waits for rows that never come, in a process of its own, because a trap ends its CUDA context:
`python -m tests.grouped_gemm.waits_in_vain IMPLEMENTATION GATE` prints {"seconds": how long the call took until its
error, "error": what torch says} as JSON.

No run_emulated: that runs tests, and a process of tests whose context is lost has failed.
"""

import json
import os
import sys
import time

import torch

import tilecrew
from tests.grouped_gemm.problems import make
from tilecrew.grouped_gemm import BandGate, CountGate

TIMEOUT_SECONDS = 0.3


def main() -> None:
    implementation, gate_name = sys.argv[1:]
    x, w, offs = make([128, 0, 20], 0, 264, 512, device="cuda")
    counters = torch.tensor([128, 20], dtype=torch.int32, device="cuda")
    gate = {
        "count": lambda: CountGate(counters, timeout_seconds=TIMEOUT_SECONDS),
        "band": lambda: BandGate(counters, offs, timeout_seconds=TIMEOUT_SECONDS),
    }[gate_name]()

    def call():
        tilecrew.grouped_gemm(x, w, offs, gate=gate, implementation=implementation)
        torch.cuda.synchronize()

    call()  # all rows are there: it compiles, and does not fail
    counters[1:].sub_(1)
    torch.cuda.synchronize()
    start, message = time.monotonic(), ""
    try:
        call()
    except RuntimeError as error:
        message = str(error)
    print(json.dumps({"seconds": time.monotonic() - start, "error": message}), flush=True)
    os._exit(0)  # what would be freed belongs to a context that is lost


if __name__ == "__main__":
    main()
