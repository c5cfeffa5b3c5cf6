"""Times the first call of a shape in a new process, with Triton's disk cache empty, then filled.

    PYTHONPATH=. python bench/first_call.py --json bench/results/first_call.json

The clock starts when torch is imported and has its CUDA context, which every program that uses a GPU pays, and stops
when the result of tilecrew's first call is there: import of tilecrew, compilation or reading the cache, launch. The
second call of the same shape stands beside it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

PROGRAM = """
import json, sys, time
import torch
make = {"device": "cuda", "dtype": torch.bfloat16}
num_tokens, num_heads, num_value_heads = map(int, sys.argv[2:5])
q, k = (torch.randn(1, num_tokens, num_heads, 128, **make) for _ in range(2))
v = torch.randn(1, num_tokens, num_value_heads, 128, **make)
g = -torch.rand(1, num_tokens, num_value_heads, device="cuda")
beta = torch.rand_like(g)
state = torch.zeros(1, num_value_heads, 128, 128, device="cuda")
x, w, offs = torch.randn(256, 1024, **make), torch.randn(8, 1024, 512, **make), torch.full((8,), 256, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
import tilecrew
calls = {
    "forward": lambda: tilecrew.chunk_gated_delta_rule(
        q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    ),
    "decode": lambda: tilecrew.fused_recurrent_gated_delta_rule(
        q[:, :1], k[:, :1], v[:, :1], g[:, :1], beta=beta[:, :1], initial_state=state, output_final_state=True
    ),
    "grouped_gemm": lambda: tilecrew.grouped_gemm(x, w, offs.int()),
}
times = []
with torch.inference_mode():
    for _ in range(2):
        calls[sys.argv[1]]()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
print(json.dumps(times))
"""
CASES = {
    "forward 1x8192, 16/64": ("forward", "8192", "16", "64"),
    "forward 1x32768, 2/8": ("forward", "32768", "2", "8"),
    "decode": ("decode", "1", "16", "32"),
    "grouped GEMM": ("grouped_gemm", "1", "1", "1"),
}


def first_and_second(arguments: tuple[str, ...], cache: str) -> tuple[float, float]:
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    first, second = json.loads(run.stdout.splitlines()[-1])
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    json_path = parser.parse_args().json
    cases = {}
    for name, arguments in CASES.items():
        with tempfile.TemporaryDirectory() as cache:
            cold, _ = first_and_second(arguments, cache)
            warm, second = first_and_second(arguments, cache)
        cases[name] = {"cold_seconds": cold, "warm_seconds": warm, "second_call_seconds": second}
        print(f"{name:24} cold {cold:6.2f} s   warm {warm:6.2f} s   second call {1e3 * second:6.2f} ms", flush=True)
    record = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cases": cases,
    }
    if json_path:
        json_path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
