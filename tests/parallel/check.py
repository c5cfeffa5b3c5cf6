"""Checks a machine with two GPUs or more in less than three minutes: `python -m tests.parallel.check`.

It prints what `tilecrew doctor` finds about ranks, then runs the tests marked multi_gpu. The tests start their own
processes; neither torchrun nor NCCL is needed. The exit code is 1 where a check or a test fails, and 2 where there are
no two GPUs.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from tilecrew.parallel.preflight import run_preflight

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 175


def main() -> int:
    start = time.monotonic()
    if torch.cuda.device_count() < 2:
        print(f"this needs two GPUs, torch sees {torch.cuda.device_count()}")
        return 2
    # Multicast is not used, and setting it up fails on hosts whose switches do not offer it.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    is_right = True
    for check in run_preflight():
        is_right = is_right and check.is_right is not False
        mark = {True: "right", False: "WRONG", None: ""}[check.is_right]
        print(f"{mark:<6}{check.name}: {check.detail}", flush=True)
    print(f"preflight took {time.monotonic() - start:.0f} s", flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "multi_gpu", "tests/parallel", "-v", "--durations=0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        remaining = LIMIT_SECONDS - (time.monotonic() - start)
        tests = subprocess.run(command, cwd=ROOT, env=environment, timeout=max(remaining, 1))
    except subprocess.TimeoutExpired:
        print(f"the tests were not done after {LIMIT_SECONDS} s in all")
        return 1
    return int(not is_right or tests.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
