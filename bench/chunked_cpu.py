"""The chunked torch path beside transformers' own torch fallback, on this machine's CPU.

    OMP_NUM_THREADS=2 PYTHONPATH=. python bench/chunked_cpu.py --json bench/results/chunked_cpu.json

Per problem and implementation: time (both alternate in one process; minimum and median of the repeats), processor time
on one thread (which other load on the machine hardly changes), growth of the peak resident memory during one call (each
in a process of its own, the results included; Linux only), and the relative error of the outputs against float64.
transformers' fallback knows no packed sequences: it gets one call for each. Inputs are float32.
"""

import argparse
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next

from tilecrew.gated_delta_rule import chunked, reference
from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.testing import as_float64, random_arguments, relative_error

TOKEN_FIELDS = ("q", "k", "v", "g", "beta")
MIB = 2**20


@dataclass(frozen=True)
class Case:
    batch: int
    num_tokens: int
    num_heads: int
    num_value_heads: int
    head_dim: int
    lengths: tuple[int, ...] | None = None
    backward: bool = False

    def __str__(self) -> str:
        packed = f" in {len(self.lengths)} sequences" if self.lengths else ""
        direction = "forward+backward" if self.backward else "forward"
        heads = f"{self.num_heads}/{self.num_value_heads}"
        return f"{self.batch}x{self.num_tokens}{packed}, heads {heads}, {self.head_dim}, {direction}"

    def arguments(self) -> ForwardArguments:
        return random_arguments(
            self.batch,
            self.num_tokens,
            self.num_heads,
            self.num_value_heads,
            self.head_dim,
            self.head_dim,
            lengths=list(self.lengths) if self.lengths else None,
        )


CASES = [
    Case(1, 4096, 16, 32, 128),
    Case(8, 512, 16, 32, 128),
    Case(1, 512, 16, 32, 128),
    Case(1, 64, 16, 32, 128),
    Case(4, 256, 2, 4, 32),
    Case(1, 4096, 16, 32, 128, lengths=(1500, 3, 64, 700, 129, 1000, 1, 500, 199)),
    Case(1, 4096, 16, 32, 128, backward=True),
    Case(4, 256, 2, 4, 32, backward=True),
]


def run_tilecrew(arguments: ForwardArguments, backward: bool) -> list[torch.Tensor]:
    """The output, and with `backward` the gradients of its sum weighted with v."""
    o = chunked.forward(arguments).o
    if not backward:
        return [o]
    gradients = chunked.backward(arguments, arguments.v)
    return [o, *(getattr(gradients, name) for name in TOKEN_FIELDS)]


def run_transformers(arguments: ForwardArguments, backward: bool) -> list[torch.Tensor]:
    function = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    inputs = [getattr(arguments, name).detach().requires_grad_(backward) for name in TOKEN_FIELDS]
    with torch.set_grad_enabled(backward):
        if arguments.cu_seqlens is None:
            o = function(*inputs)[0]
        else:
            lengths = arguments.cu_seqlens.diff().tolist()
            pieces = zip(*(x.split(lengths, 1) for x in inputs), strict=True)
            o = torch.cat([function(*piece)[0] for piece in pieces], 1)
        return [o.detach(), *(torch.autograd.grad(o, inputs, arguments.v) if backward else [])]


IMPLEMENTATIONS: dict[str, Callable[[ForwardArguments, bool], list[torch.Tensor]]] = {
    "transformers": run_transformers,
    "tilecrew": run_tilecrew,
}


def float64_results(case: Case) -> list[torch.Tensor]:
    arguments = as_float64(case.arguments())
    inputs = [getattr(arguments, name).requires_grad_(case.backward) for name in TOKEN_FIELDS]
    o = reference.chunk_gated_delta_rule(arguments).o
    return [o.detach(), *(torch.autograd.grad(o, inputs, arguments.v) if case.backward else [])]


def times_in_ms(case: Case, repeats: int) -> dict[str, list[float]]:
    arguments = case.arguments()
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    for repeat in range(repeats + 1):
        for name, run in IMPLEMENTATIONS.items():
            start = time.perf_counter()
            run(arguments, case.backward)
            if repeat:  # the first is the warm-up
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def processor_ms(case: Case, repeats: int = 3) -> dict[str, float]:
    """Processor time on one thread, the least of the repeats: unlike time on the clock, it stands other load."""
    arguments, num_threads = case.arguments(), torch.get_num_threads()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    for _ in range(repeats):
        for name, run in IMPLEMENTATIONS.items():
            start = time.process_time()
            run(arguments, case.backward)
            times[name].append(1000 * (time.process_time() - start))
    torch.set_num_threads(num_threads)
    return {name: min(values) for name, values in times.items()}


def peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def memory_growth_in_mib(case: Case, implementation: str) -> float:
    """Runs in a process of its own: the growth of the peak by one call, after a small call has loaded the libraries."""
    run = IMPLEMENTATIONS[implementation]
    run(random_arguments(1, 64), case.backward)
    arguments = case.arguments()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = peak_resident_bytes()
    results = run(arguments, case.backward)
    growth = peak_resident_bytes() - before
    del results
    return growth / MIB


def measure_memory(case_index: int, implementation: str) -> float:
    command = [sys.executable, __file__, "--memory-of", str(case_index), implementation]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.split()[-1])


def measure(case_index: int, repeats: int) -> dict[str, object]:
    case = CASES[case_index]
    truth = float64_results(case)
    errors = {
        name: max(relative_error(x, y) for x, y in zip(run(case.arguments(), case.backward), truth, strict=True))
        for name, run in IMPLEMENTATIONS.items()
    }
    del truth
    times = times_in_ms(case, repeats)
    processor = processor_ms(case)
    minimum = {name: min(values) for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "case": str(case),
        **asdict(case),
        "minimum_ms": minimum,
        "median_ms": median,
        "ratio_of_minima": minimum["transformers"] / minimum["tilecrew"],
        "ratio_of_medians": median["transformers"] / median["tilecrew"],
        "load_average": os.getloadavg()[0],  # well above the threads: something else ran, and times are uncertain
        "one_thread_processor_ms": processor,
        "ratio_of_processor_times": processor["transformers"] / processor["tilecrew"],
        "peak_memory_mib": {name: measure_memory(case_index, name) for name in IMPLEMENTATIONS},
        "error": errors,
    }


def print_row(row: dict) -> None:
    times, memory, errors = row["minimum_ms"], row["peak_memory_mib"], row["error"]
    print(
        f"{row['case']:58s} {times['transformers']:8.1f} {times['tilecrew']:8.1f} {row['ratio_of_minima']:6.2f} "
        f"{row['ratio_of_processor_times']:6.2f} "
        f"{memory['transformers']:7.0f} {memory['tilecrew']:7.0f} "
        f"{errors['transformers']:8.1e} {errors['tilecrew']:8.1e}",
        flush=True,
    )


def write_json(path: Path, rows: list[dict]) -> None:
    """Written after every case, so that an interrupted run keeps what it has."""
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-of", nargs=2, metavar=("CASE", "IMPLEMENTATION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(memory_growth_in_mib(CASES[int(options.memory_of[0])], options.memory_of[1]))
        return
    print(f"{'':58s} {'time, ms':^31s} {'peak, MiB':^15s} {'error':^17s}")
    print(
        f"{'batch x tokens, heads q/v, head size':58s} {'transf.':>8s} {'tilecrew':>8s} {'ratio':>6s} {'1 thr.':>6s} "
        f"{'transf.':>7s} {'tilecr.':>7s} {'transf.':>8s} {'tilecrew':>8s}"
    )
    rows = []
    for case_index in range(len(CASES)):
        rows.append(measure(case_index, options.repeats))
        print_row(rows[-1])
        if options.json:
            write_json(options.json, rows)


if __name__ == "__main__":
    main()
