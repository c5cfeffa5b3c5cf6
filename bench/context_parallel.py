"""Times context parallelism inside one Hopper GPU, part by part, and checks its results in the same run.

    PYTHONPATH=. python bench/context_parallel.py --json context_parallel.json

Per problem and number of pieces of a sequence, microseconds of captured graphs: `cold` with the L2 cache flushed
between repeats, `warm` without. Parts: prepare, the table of pieces, kernel_states, kernel_combine, the scan over
pieces by block of V, and the whole from prepare to scan; 1 piece is the forward without pieces. The error is that of o
and of the final state against the chunk form in float64, and above MAX_FLOAT64_TOKENS against the forward without
pieces. A configuration that fails, or whose error is too large, is printed with the reason and does not stop the
others; the file is written after each.
"""

import argparse
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tilecrew._hardware import hardware_of
from tilecrew.gated_delta_rule import chunked
from tilecrew.gated_delta_rule.schedule import Schedule
from tilecrew.testing import as_float64, random_arguments, relative_error

PROBLEMS = [(1, 32768, 2, 8), (1, 8192, 2, 8), (1, 32768, 4, 16), (1, 131072, 2, 8)]
PIECES = (4, 8, 12, 16, 24)
BLOCKS_OF_V = (64, 128)  # of the scan
COMBINATIONS = ((16, 8, 3), (16, 8, 2), (16, 4, 3), (32, 8, 3))  # block of V, warps, stages of kernel_combine
TOLERANCE = 1e-6  # of the run that drops history
MAX_FLOAT64_TOKENS = 32768
LARGEST_ERROR = 1e-2


def microseconds(run: Callable[[], object]) -> dict[str, float]:
    import triton

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    cold = triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median")
    graph.replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repeats = max(5, int(20 / max(cold, 1e-3)))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return {"cold_us": round(cold * 1e3, 2), "warm_us": round(start.elapsed_time(end) / repeats * 1e3, 2)}


def forward(arguments, chunks_per_piece: int, block_v: int, tolerance: float = 0.0):
    """From the inputs to the outputs; whole sequences where chunks_per_piece is 0."""
    from tilecrew.gated_delta_rule import kernel_forward_scan

    schedule = Schedule("scan", block_v, 64, "measured", chunks_per_piece)
    return kernel_forward_scan.forward(replace(arguments, history_tolerance=tolerance), schedule)


def error(actual, expected) -> float:
    return max(relative_error(actual.o, expected.o), relative_error(actual.final_state, expected.final_state, 1))


def parts(arguments, chunks_per_piece: int) -> dict:
    """name -> a call that runs this part alone, on what the parts before it have made."""
    from tilecrew.gated_delta_rule import (
        context_parallel,
        kernel_combine,
        kernel_forward_roles,
        kernel_forward_scan,
        kernel_prepare,
        kernel_states,
    )

    result = kernel_forward_roles.allocate_result(arguments)
    prepared = kernel_prepare.run_gated(arguments, result.o)
    plan = context_parallel.plan(arguments, chunks_per_piece)
    pieces = context_parallel.table(arguments, plan)
    ends = kernel_states.allocate(arguments, plan.num_rows)
    states = kernel_combine.allocate(arguments, plan)
    calls = {
        "prepare": lambda: kernel_prepare.run_gated(arguments, result.o),
        "table": lambda: context_parallel.table(arguments, plan),
        "states": kernel_states.launch(arguments, prepared, pieces, ends).run,
        f"states, tolerance {TOLERANCE}": kernel_states.launch(arguments, prepared, pieces, ends, TOLERANCE).run,
        "states again": kernel_states.launch(arguments, prepared, pieces, ends).run,
    }
    for block_v, num_warps, num_stages in COMBINATIONS:
        name = f"combine, V block {block_v}, {num_warps} warps, {num_stages} stages"
        calls[name] = kernel_combine.launch(arguments, plan, ends, states, block_v, num_warps, num_stages).run
    cut = replace(arguments, initial_state=states)
    for block_v in BLOCKS_OF_V:
        calls[f"scan, V block {block_v}"] = kernel_forward_scan.launch(cut, prepared, result, block_v, pieces).run
    return calls


def guarded(row: dict, name: str, run: Callable[[], object]) -> None:
    """row[name] = what `run` returns, or the reason why it failed."""
    try:
        row[name] = run()
    except Exception as failure:
        row[name] = None
        row.setdefault("failures", {})[name] = f"{type(failure).__name__}: {failure}"[:500]
        traceback.print_exc(limit=3)


def measure_problem(problem: tuple[int, int, int, int], norms: bool, report: Callable[[dict], None]) -> None:
    batch, num_tokens, num_heads, num_value_heads = problem
    arguments = random_arguments(
        *problem, dtype=torch.bfloat16, device="cuda", output_final_state=True, use_qk_l2norm=norms
    )
    name = f"{batch}x{num_tokens}, {num_heads}/{num_value_heads}"
    unsplit = {"problem": name, "norms": norms, "pieces": 1}
    truth = forward(arguments, 0, 64)
    if num_tokens <= MAX_FLOAT64_TOKENS:
        exact = chunked.forward(as_float64(arguments))
        unsplit["error"] = error(truth, exact)
        truth = exact
    for block_v in BLOCKS_OF_V:
        run = lambda block_v=block_v: microseconds(lambda: forward(arguments, 0, block_v))  # noqa: E731
        guarded(unsplit, f"whole, V block {block_v}", run)
    report(unsplit)
    num_chunks = -(-num_tokens // 64)
    for num_pieces in PIECES:
        chunks_per_piece = -(-num_chunks // num_pieces)
        row = {"problem": name, "norms": norms, "pieces": -(-num_chunks // chunks_per_piece)}
        row["chunks_per_piece"] = chunks_per_piece
        guarded(row, "ctas", lambda chunks=chunks_per_piece: ctas(arguments, chunks))
        for block_v, tolerance in itertools.product(BLOCKS_OF_V, (0.0, TOLERANCE)):
            key = f"V block {block_v}" + (f", tolerance {tolerance}" if tolerance else "")
            run = lambda chunks=chunks_per_piece, block_v=block_v, tolerance=tolerance: forward(  # noqa: E731
                arguments, chunks, block_v, tolerance
            )
            guarded(row, f"error, {key}", lambda run=run: error(run(), truth))
            value = row[f"error, {key}"]
            if value is not None and value <= LARGEST_ERROR:
                guarded(row, f"whole, {key}", lambda run=run: microseconds(run))
        calls: dict = {}
        guarded(row, "parts", lambda chunks=chunks_per_piece, calls=calls: calls.update(parts(arguments, chunks)))
        del row["parts"]
        for part, call in calls.items():
            guarded(row, part, lambda call=call: microseconds(call))
        report(row)


def ctas(arguments, chunks_per_piece: int) -> dict[str, int]:
    from tilecrew.gated_delta_rule import context_parallel

    plan = context_parallel.plan(arguments, chunks_per_piece)
    num_value_heads = arguments.v.shape[2]
    return {
        "states": plan.num_states_ctas(num_value_heads, arguments.initial_state is not None),
        "scan, V block 64": plan.num_scan_ctas(num_value_heads, 64),
        "scan, V block 128": plan.num_scan_ctas(num_value_heads, 128),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plain", action="store_true", help="unit keys from the caller too, not norms inside only")
    options = parser.parse_args()
    if not torch.cuda.is_available() or hardware_of("cuda").capability != (9, 0):
        sys.exit("bench/context_parallel.py needs a GPU of compute capability 9.0")
    rows: list[dict] = []

    def report(row: dict) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            record = {"device": hardware_of("cuda").name, "torch": torch.__version__, "rows": rows}
            options.json.write_text(json.dumps(record, indent=2) + "\n")

    for norms in (True, False) if options.plain else (True,):
        for problem in PROBLEMS:
            try:
                measure_problem(problem, norms, report)
            except Exception as failure:
                traceback.print_exc()
                report(
                    {"problem": str(problem), "norms": norms, "failed": f"{type(failure).__name__}: {failure}"[:500]}
                )
            torch.cuda.empty_cache()
    if any("failed" in row or "failures" in row for row in rows):
        sys.exit("a configuration failed")


if __name__ == "__main__":
    main()
