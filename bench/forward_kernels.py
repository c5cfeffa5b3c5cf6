"""Times kernel_prepare and kernel_forward_roles on a Hopper GPU, and checks their results in the same run.

    PYTHONPATH=. python bench/forward_kernels.py --json bench/results/forward_kernels.json

Per problem, V block and kind of keys (unit keys from the caller, or norms inside the kernel): milliseconds of a
captured graph, median with the L2 cache flushed between repeats. A configuration whose error against the float64
recurrence, on a smaller problem with the same heads, is too large gets no time.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tilecrew._hardware import hardware_of
from tilecrew.gated_delta_rule import reference
from tilecrew.testing import as_float64, random_arguments, relative_error

PROBLEMS = [(1, 32768, 16, 64), (1, 8192, 16, 64), (4, 8192, 16, 64), (1, 8192, 16, 32), (1, 8192, 2, 8)]
BLOCKS = (128, 64, 32)
LARGEST_ERROR = 5e-3  # bf16 with normal inputs: 3.6e-3 measured


def milliseconds(launch) -> float:
    import triton

    launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=50, return_mode="median")


def launches(arguments, block_v):
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_prepare

    prepared = kernel_prepare.allocate(arguments)
    result = kernel_forward_roles.allocate_result(arguments)
    prepare = kernel_prepare.launch(arguments, prepared, result.o)
    return prepare, kernel_forward_roles.launch(arguments, prepared, result, block_v), result


def error(num_heads: int, num_value_heads: int, norms: bool, block_v: int) -> float:
    arguments = random_arguments(1, 320, num_heads, num_value_heads, dtype=torch.bfloat16, device="cuda", seed=1)
    arguments = replace(arguments, use_qk_l2norm=norms, output_final_state=True)
    prepare, forward, result = launches(arguments, block_v)
    for launch in (prepare, forward):
        launch.run()
    truth = reference.recurrent_gated_delta_rule(as_float64(arguments))
    return max(relative_error(result.o, truth.o), relative_error(result.final_state, truth.final_state, head_dim=1))


def measure() -> list[dict]:
    rows = []
    for batch, num_tokens, num_heads, num_value_heads in PROBLEMS:
        arguments = random_arguments(
            batch, num_tokens, num_heads, num_value_heads, dtype=torch.bfloat16, device="cuda", output_final_state=True
        )
        for norms in (False, True):
            problem = replace(arguments, use_qk_l2norm=norms)
            for block_v in BLOCKS:
                row = {
                    "problem": f"{batch}x{num_tokens}, {num_heads}/{num_value_heads}",
                    "norms": norms,
                    "block_v": block_v,
                    "error": error(num_heads, num_value_heads, norms, block_v),
                }
                if not row["error"] <= LARGEST_ERROR:
                    print(f"{row}: error above {LARGEST_ERROR}, not timed")
                else:
                    prepare, forward, _ = launches(problem, block_v)
                    row |= {"prepare_ms": milliseconds(prepare), "roles_ms": milliseconds(forward)}
                    print(f"{row['problem']:18s} norms {norms!s:5s} block {block_v:3d}", end="  ")
                    print(f"prepare {row['prepare_ms']:.3f}  roles {row['roles_ms']:.3f}  error {row['error']:.1e}")
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if not torch.cuda.is_available() or hardware_of("cuda").capability != (9, 0):
        sys.exit("bench/forward_kernels.py needs a GPU of compute capability 9.0")
    rows = measure()
    if options.json:
        record = {"device": hardware_of("cuda").name, "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if not all("roles_ms" in row for row in rows):
        sys.exit("a configuration was wrong")


if __name__ == "__main__":
    main()
