"""Times the kernels of the forward on a Hopper GPU, and checks their results in the same run.

    PYTHONPATH=. python bench/forward_kernels.py --json bench/results/forward_kernels.json
    PYTHONPATH=. python bench/forward_kernels.py --grid --json bench/results/forward_grid.json

The second measures other problems, without norms. The schedule's estimates are fitted to the first; only that of the
prepare kernel beside the scan is fitted to some of the second.

Per problem, with unit keys from the caller and with norms inside, milliseconds of captured graphs (median, the L2 cache
flushed between repeats): the prepare kernel; what follows it, for the scan of 64 and of 128 values, for the roles with
their best block (their prepare kernel is another, its time in brackets), and for the scan over pieces of L chunks
("L/values"), those with the least estimates; where it can be, the whole with the prepare kernel beside the scan; and
the whole of what the schedule takes. A variant whose error against the float64 recurrence, on a smaller problem with
the same heads, is too large gets no time. One that fails is printed as such and does not stop the others; the file is
written after each problem.
"""

import argparse
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from tilecrew._hardware import hardware_of
from tilecrew.gated_delta_rule import hopper_times, reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.hopper_times import Variant
from tilecrew.gated_delta_rule.operators import problem_of
from tilecrew.gated_delta_rule.schedule import HOPPER_CHUNK_SIZE, Schedule, hopper_sizes, hopper_variant, pick
from tilecrew.testing import as_float64, random_arguments, relative_error

PROBLEMS = [
    (1, 32768, 2, 8),
    (1, 8192, 2, 8),
    (8, 1024, 8, 32),
    (4, 8192, 16, 64),
    (4, 8192, 16, 32),
    (1, 32768, 16, 64),
    (1, 8192, 16, 64),
    (1, 8192, 16, 32),
]
# Batch and tokens by heads: the same heads, whose kernels are compiled by then.
GRID = {
    (2, 8): ((1, 2048), (1, 4096), (1, 16384), (2, 8192), (8, 2048), (32, 512)),
    (8, 32): ((1, 1024), (1, 4096), (2, 4096), (3, 2048), (5, 1024), (16, 256)),
    (16, 32): ((1, 2048), (1, 16384), (2, 4096), (6, 1024), (8, 4096), (24, 192)),
    (16, 64): ((1, 1024), (1, 4096), (2, 2048), (3, 4096), (6, 512), (12, 1024)),
}
LARGEST_ERROR = 5e-3  # bf16 with normal inputs: 3.7e-3 measured
NUM_PIECE_VARIANTS = 4
SMALL_TOKENS = 320
SMALL_CHUNKS_PER_PIECE = 2


def milliseconds(run: Callable[[], object]) -> float:
    import triton

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median")


def variants(arguments: ForwardArguments) -> list[Variant]:
    """The columns, and the schedule's choice among them."""
    problem, num_sms = problem_of(arguments, False), hardware_of("cuda").num_sms
    sizes = hopper_sizes(problem, num_sms)
    in_pieces = sorted(
        hopper_times.piece_variants("scan", sizes), key=lambda variant: hopper_times.microseconds(variant, sizes)
    )
    roles = hopper_variant("roles", problem, num_sms)
    beside = hopper_times.beside_variants("scan", sizes)
    return [Variant("scan", 64), Variant("scan", 128), roles, *beside, *in_pieces[:NUM_PIECE_VARIANTS]]


def schedule_of(variant: Variant) -> Schedule:
    implementation, block_v, *rest = variant
    return Schedule(implementation, block_v, HOPPER_CHUNK_SIZE, "measured", *rest)


def stages(arguments: ForwardArguments, variant: Variant) -> tuple[Callable[[], object], Callable[[], object]]:
    """The prepare kernel and what follows it, as calls; the second works on what the first made."""
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan, kernel_prepare

    result = kernel_forward_roles.allocate_result(arguments)
    if variant.implementation == "scan":
        prepared, schedule = kernel_prepare.run_gated(arguments, result.o), schedule_of(variant)
        return (
            lambda: kernel_prepare.run_gated(arguments, result.o),
            lambda: kernel_forward_scan.run_prepared(arguments, schedule, prepared, result),
        )
    prepared = kernel_prepare.allocate(arguments)
    prepare = kernel_prepare.launch(arguments, prepared, result.o)
    prepare.run()
    return prepare.run, kernel_forward_roles.launch(arguments, prepared, result, variant.block_v).run


def whole(arguments: ForwardArguments, variant: Variant):
    from tilecrew.gated_delta_rule import kernel_forward_roles, kernel_forward_scan

    kernel = kernel_forward_scan if variant.implementation == "scan" else kernel_forward_roles
    return kernel.forward(arguments, schedule_of(variant))


def error(arguments: ForwardArguments, variant: Variant) -> float:
    """On a smaller problem, whose pieces are shorter."""
    if variant.chunks_per_piece:
        variant = variant._replace(chunks_per_piece=SMALL_CHUNKS_PER_PIECE)
    return small_error(arguments.q.shape[2], arguments.v.shape[2], arguments.use_qk_l2norm, variant)


@functools.cache
def small_error(num_heads: int, num_value_heads: int, norms: bool, variant: Variant) -> float:
    heads = num_heads, num_value_heads
    small = random_arguments(1, SMALL_TOKENS, *heads, dtype=torch.bfloat16, device="cuda", seed=1)
    small = replace(small, use_qk_l2norm=norms, output_final_state=True)
    result, truth = whole(small, variant), reference.recurrent_gated_delta_rule(as_float64(small))
    return max(relative_error(result.o, truth.o), relative_error(result.final_state, truth.final_state, head_dim=1))


def measure(arguments: ForwardArguments, variant: Variant) -> dict:
    """One row of the record; `failure` says why there are no times."""
    row: dict = {**variant._asdict()}
    try:
        row["error"] = error(arguments, variant)
        if not row["error"] <= LARGEST_ERROR:
            return {**row, "failure": f"error {row['error']:.1e} is above {LARGEST_ERROR}"}
        if not variant.prepare_programs:
            prepare, forward = stages(arguments, variant)
            row["prepare_ms"], row["forward_ms"] = milliseconds(prepare), milliseconds(forward)
        row["whole_ms"] = milliseconds(lambda: whole(arguments, variant))
    except Exception as failure:
        traceback.print_exc(limit=3)
        row["failure"] = f"{type(failure).__name__}: {failure}"[:500]
    return row


def print_line(name: str, norms: bool, rows: list[dict], chosen: Variant) -> None:
    def time(row: dict, field: str) -> str:
        return f"{row[field]:.3f}" if field in row else "failed"

    scan_64, scan_128, roles, *rest = rows
    in_pieces = [row for row in rest if row["chunks_per_piece"]]
    beside = "".join(f"{row['prepare_programs']} {time(row, 'whole_ms')}" for row in rest if row["prepare_programs"])
    pieces = "  ".join(f"{row['chunks_per_piece']}/{row['block_v']} {time(row, 'forward_ms')}" for row in in_pieces)
    (taken,) = (row for row in rows if tuple(row[field] for field in Variant._fields) == chosen)
    columns = (
        f"{name:17s} norms {norms!s:5s} prepare {time(scan_64, 'prepare_ms')}",
        f"scan64 {time(scan_64, 'forward_ms')}",
        f"scan128 {time(scan_128, 'forward_ms')}",
        f"roles{roles['block_v']} {time(roles, 'forward_ms')} ({time(roles, 'prepare_ms')})",
        f"pieces {pieces or '-'}",
        f"beside {beside or '-'}",
        f"whole {time(taken, 'whole_ms')} of {'/'.join(map(str, chosen))}",
        f"errors up to {max((row['error'] for row in rows if 'error' in row), default=float('nan')):.1e}",
    )
    print(" | ".join(columns), flush=True)


def measure_all(
    report: Callable[[list[dict]], None], problems: Iterable[tuple[int, int, int, int]], norms_of_each: tuple[bool, ...]
) -> None:
    for batch, num_tokens, num_heads, num_value_heads in problems:
        name = f"{batch}x{num_tokens}, {num_heads}/{num_value_heads}"
        for norms in norms_of_each:
            try:
                arguments = random_arguments(
                    *(batch, num_tokens, num_heads, num_value_heads),
                    dtype=torch.bfloat16,
                    device="cuda",
                    output_final_state=True,
                )
                arguments = replace(arguments, use_qk_l2norm=norms)
                schedule = pick(problem_of(arguments, False), hardware_of("cuda"))
                chosen = Variant(*(getattr(schedule, field) for field in Variant._fields))
                rows = [measure(arguments, variant) for variant in variants(arguments)]
            except Exception as failure:
                traceback.print_exc()
                report([{"problem": name, "norms": norms, "failure": f"{type(failure).__name__}: {failure}"[:500]}])
                continue
            print_line(name, norms, rows, chosen)
            report([{"problem": name, "norms": norms, **row} for row in rows])
            torch.cuda.empty_cache()


def write(path: Path, rows: Iterable[dict]) -> None:
    record = {"device": hardware_of("cuda").name, "torch": torch.__version__, "rows": list(rows)}
    path.write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument(
        "--grid", action="store_true", help="other problems than those that the estimates are fitted to"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available() or hardware_of("cuda").capability != (9, 0):
        sys.exit("bench/forward_kernels.py needs a GPU of compute capability 9.0")
    all_rows: list[dict] = []

    def report(rows: list[dict]) -> None:
        all_rows.extend(rows)
        if options.json:
            write(options.json, all_rows)

    if options.grid:
        measure_all(report, [(*size, *heads) for heads, sizes in GRID.items() for size in sizes], (False,))
    else:
        measure_all(report, PROBLEMS, (False, True))
    failures = [row for row in all_rows if "failure" in row]
    if failures:
        sys.exit("\n".join(["failed:", *map(str, failures)]))


if __name__ == "__main__":
    main()
