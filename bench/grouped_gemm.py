"""Times the grouped GEMM on a GPU beside torch's grouped GEMM and cuBLAS, and checks its results in the same run.

    PYTHONPATH=. python bench/grouped_gemm.py --json bench/results/grouped_gemm.json --seconds 50

First the large shapes, with skewed groups: ours (w as [E, K, N] and as a view of [E, N, K]), torch._grouped_mm, and
one dense product of the same M, N, K; then few rows over 128 groups, where reading the weights is what takes time.
Calls are captured in CUDA graphs; the graphs of a shape run in turns, so that all meet the same temperature and power,
with the L2 cache flushed before each. A result whose error against float64, on sampled rows, is too large gets no time.
Shapes that the time does not reach are left out, and said to be.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch

import tilecrew

LARGE = [
    (8, 16384, 7168, 4096),
    (32, 16384, 7168, 4096),
    (32, 16384, 2048, 7168),
    (64, 32768, 2048, 1536),
    (128, 32768, 2048, 1536),
]
SMALL = [(128, num_rows, 2048, 1536) for num_rows in (1, 16, 128, 1024, 4096)]
LARGEST_ERROR = 4e-3
COPY_TERABYTES = 4.27  # of an H200, measured
MAX_ROUNDS = 30


def lengths_of(num_groups, num_rows):
    """Rows of each group: skewed, any number; few rows go to random groups."""
    generator = torch.Generator().manual_seed(0)
    if num_rows < 64 * num_groups:
        groups = torch.randint(0, num_groups, (num_rows,), generator=generator)
        return torch.bincount(groups, minlength=num_groups)
    shares = torch.rand(num_groups, generator=generator) + 0.2
    lengths = (shares / shares.sum() * num_rows).long()
    lengths[-1] += num_rows - lengths.sum()
    return lengths


def make(num_groups, num_rows, num_inner, num_columns):
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(num_rows, num_inner, **options)
    w = torch.empty(num_groups, num_inner, num_columns, **options).normal_(std=num_inner**-0.5)
    lengths = lengths_of(num_groups, num_rows)
    return x, w, lengths, lengths.cumsum(0).to(torch.int32).cuda()


def variants_of(x, w, offs):
    transposed = w.transpose(1, 2).contiguous().transpose(1, 2)
    dense = w[0].contiguous()
    return {
        "tilecrew": lambda: tilecrew.grouped_gemm(x, w, offs),
        "tilecrew transposed": lambda: tilecrew.grouped_gemm(x, transposed, offs),
        "torch._grouped_mm": lambda: torch._grouped_mm(x, w, offs=offs),
        "dense": lambda: x @ dense,
    }


def error_of(result, x, w, lengths):
    """Of up to 64 rows that are spread over the groups, relative to float64; NaN anywhere gives NaN."""
    groups = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rows = torch.linspace(0, len(groups) - 1, min(64, len(groups))).long()
    wanted = torch.stack([x[row].double() @ w[int(groups[row])].double() for row in rows.tolist()])
    actual = result[rows.to(result.device)].double()
    worst = ((actual - wanted).norm(dim=1) / wanted.norm(dim=1)).max()
    return float(worst) if result.isfinite().all() else float("nan")


def capture(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def milliseconds(graphs, seconds):
    """Median of each graph; round after round, until the time or the rounds are over (at least three)."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times = {name: [] for name in graphs}
    deadline = time.monotonic() + seconds
    for number in range(MAX_ROUNDS):
        if number >= 3 and time.monotonic() > deadline:
            break
        for name, graph in graphs.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def measure(shape, seconds):
    num_groups, num_rows, num_inner, num_columns = shape
    x, w, lengths, offs = make(*shape)
    graphs, errors, failures = {}, {}, {}
    for name, call in variants_of(x, w, offs).items():
        try:
            if name != "dense":
                errors[name] = error_of(call(), x, w, lengths)
                if not errors[name] <= LARGEST_ERROR:
                    raise AssertionError(f"error {errors[name]:.1e} is above {LARGEST_ERROR:.0e}")
            graphs[name] = capture(call)
        except Exception as error:  # the other variants are still of use
            failures[name] = f"{type(error).__name__}: {error}"[:500]
    result = milliseconds(graphs, seconds)
    used = w[(lengths > 0).to(w.device)].numel()
    num_bytes = 2 * (x.numel() + used + num_rows * num_columns)
    return {
        "E": num_groups,
        "M": num_rows,
        "K": num_inner,
        "N": num_columns,
        "schedule": str(tilecrew.explain_grouped_gemm(x, w, offs)),
        "milliseconds": result,
        "teraflops": {name: 2e-9 * num_rows * num_inner * num_columns / value for name, value in result.items()},
        "share_of_copy_rate": {name: num_bytes * 1e-9 / value / COPY_TERABYTES for name, value in result.items()},
        "errors": errors,
        "failures": failures,
    }


def show(row):
    names = row["milliseconds"]
    print(f"E {row['E']} M {row['M']} K {row['K']} N {row['N']}  ({row['schedule']})", flush=True)
    for name, value in names.items():
        rate, share = row["teraflops"][name], row["share_of_copy_rate"][name]
        error = row["errors"].get(name)
        shown = "" if error is None else f"  error {error:.1e}"
        print(f"    {name:20} {value:8.4f} ms {rate:7.1f} TFLOP/s {100 * share:5.1f} % of copy rate{shown}", flush=True)
    for name, failure in row["failures"].items():
        print(f"    {name:20} FAILED {failure}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures, after every shape")
    parser.add_argument("--seconds", type=float, default=50.0, help="after this time no further shape is begun")
    parser.add_argument("--only", choices=["large", "small"], help="one of the two tables")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    begin, rows = time.monotonic(), []
    shapes = {"large": LARGE, "small": SMALL, None: [*LARGE[:2], *SMALL[2:], *LARGE[2:], *SMALL[:2]]}[options.only]
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "skipped": []}
    print(f"{report['device']}, torch {report['torch']}", flush=True)
    for number, shape in enumerate(shapes):
        left = options.seconds - (time.monotonic() - begin)
        if left <= 0:
            report["skipped"].append(shape)
            print(f"{shape}: no time left", flush=True)
            continue
        try:
            rows.append(measure(shape, min(2.0, left / (len(shapes) - number))))
            show(rows[-1])
        except Exception:  # the shapes that follow are still of use
            report["skipped"].append(shape)
            traceback.print_exc()
            sys.stderr.flush()
        torch.cuda.empty_cache()
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    is_good = bool(rows) and not report["skipped"] and not any("tilecrew" in row["failures"] for row in rows)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
