"""Times the kernels of the forward on a Hopper GPU, and checks their results in the same run.

    PYTHONPATH=. python bench/forward_kernels.py --json bench/results/forward_kernels.json

Per problem, with unit keys from the caller and with norms inside: milliseconds of captured graphs (median, the L2 cache
flushed between repeats) of the scan, and of the roles with the block of V that their schedule takes: the prepare
kernel, the other kernel, and both. A configuration whose error against the float64 recurrence, on a smaller problem
with the same heads, is too large gets no time.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tilecrew._hardware import hardware_of
from tilecrew.gated_delta_rule import reference
from tilecrew.gated_delta_rule.operators import problem_of
from tilecrew.gated_delta_rule.schedule import Schedule, pick
from tilecrew.testing import as_float64, random_arguments, relative_error

PROBLEMS = [
    (1, 32768, 16, 64),
    (1, 8192, 16, 64),
    (4, 8192, 16, 64),
    (4, 8192, 16, 32),
    (1, 8192, 16, 32),
    (8, 1024, 8, 32),
    (1, 32768, 2, 8),
    (1, 8192, 2, 8),
]
LARGEST_ERROR = 5e-3  # bf16 with normal inputs: 3.7e-3 measured


def milliseconds(run) -> float:
    import triton

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median")


def stages(arguments, schedule: Schedule):
    """The two stages of an implementation, as calls; the second works on what the first made."""
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare

    result = kernel_forward_roles.allocate_result(arguments)
    if schedule.implementation == "scan":
        prepared = kernel_prepare.run_gated(arguments, result.o)
        forward = kernel_forward_scan.launch(arguments, prepared, result)
        return lambda: kernel_prepare.run_gated(arguments, result.o), forward.run
    prepared = kernel_prepare.allocate(arguments)
    prepare = kernel_prepare.launch(arguments, prepared, result.o)
    prepare.run()
    forward = kernel_forward_roles.launch(arguments, prepared, result, schedule.block_v)
    return prepare.run, forward.run


def whole(arguments, schedule: Schedule):
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan

    kernel = kernel_forward_scan if schedule.implementation == "scan" else kernel_forward_roles
    return kernel.forward(arguments, schedule)


def error(num_heads: int, num_value_heads: int, norms: bool, schedule: Schedule) -> float:
    arguments = random_arguments(1, 320, num_heads, num_value_heads, dtype=torch.bfloat16, device="cuda", seed=1)
    arguments = replace(arguments, use_qk_l2norm=norms, output_final_state=True)
    result, truth = whole(arguments, schedule), reference.recurrent_gated_delta_rule(as_float64(arguments))
    return max(relative_error(result.o, truth.o), relative_error(result.final_state, truth.final_state, head_dim=1))


def measure() -> list[dict]:
    rows = []
    for batch, num_tokens, num_heads, num_value_heads in PROBLEMS:
        arguments = random_arguments(
            batch, num_tokens, num_heads, num_value_heads, dtype=torch.bfloat16, device="cuda", output_final_state=True
        )
        for norms in (False, True):
            problem = replace(arguments, use_qk_l2norm=norms)
            for implementation in ("scan", "roles"):
                schedule = pick(problem_of(problem, False), hardware_of("cuda"), implementation)
                row = {
                    "problem": f"{batch}x{num_tokens}, {num_heads}/{num_value_heads}",
                    "norms": norms,
                    "implementation": implementation,
                    "block_v": schedule.block_v,
                    "error": error(num_heads, num_value_heads, norms, schedule),
                }
                rows.append(row)
                if not row["error"] <= LARGEST_ERROR:
                    print(f"{row}: error above {LARGEST_ERROR}, not timed")
                    continue
                prepare, forward = stages(problem, schedule)
                row |= {"prepare_ms": milliseconds(prepare), "forward_ms": milliseconds(forward)}
                row["whole_ms"] = milliseconds(lambda problem=problem, schedule=schedule: whole(problem, schedule))
                print(f"{row['problem']:18s} norms {norms!s:5s} {implementation:5s} {schedule.block_v:3d}", end="  ")
                print(f"prepare {row['prepare_ms']:.3f}  forward {row['forward_ms']:.3f}", end="  ")
                print(f"whole {row['whole_ms']:.3f}  error {row['error']:.1e}", flush=True)
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
    if not all("whole_ms" in row for row in rows):
        sys.exit("a configuration was wrong")


if __name__ == "__main__":
    main()
