"""Times AllGatherGemm and GemmReduceScatter beside the collectives of torch.distributed with torch.matmul.

    PYTHONPATH=. torchrun --nproc-per-node 8 bench/tensor_parallel.py --json tensor_parallel.json

Both halves of a tensor-parallel layer of I columns: x [rows of a rank, H] of all ranks @ w [H, I / W], and x [rows of
all ranks, I / W] @ w [I / W, H] summed over ranks. Each is called eagerly and as a CUDA graph, and so are the
collectives (NCCL on GPUs), in turns, with the L2 cache flushed before; the slowest rank of a round counts. Sampled rows
are compared with float64 in the same run, and a wrong result gets no time.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

# Multicast is not used, and setting it up fails on hosts whose switches do not offer it. Read when torch is imported,
# and when NCCL starts.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist

from tilecrew.benchmark.processes import Processes, graph_of, slowest_in_turn
from tilecrew.parallel import AllGatherGemm, GemmReduceScatter, World

# Rows of a rank, H, I: layers of dense models of about 8 and 70 billion parameters.
SHAPES = {
    "cuda": [(1024, 4096, 14336), (1024, 8192, 28672), (4096, 4096, 14336), (4096, 8192, 28672)],
    "cpu": [(130, 64, 96)],
}
# Norm of the difference over the norm of the truth, largest over rows: NCCL adds in bfloat16, rank after rank.
LARGEST_ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
SAMPLED_ROWS = 16  # of each rank
LONGEST_TIMING = 3.0  # seconds of a shape


class Layer:
    """One rank's inputs and calls, and the truth of sampled rows. Making one is collective."""

    def __init__(self, world, num_rows, hidden, intermediate):
        device = world.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        columns = intermediate // world.size
        torch.manual_seed(1 + world.rank)

        def random(*shape):
            return torch.randn(*shape, device=device).to(dtype)

        self.world, self.num_rows = world, num_rows
        self.x, self.w_up = random(num_rows, hidden), random(hidden, columns) / hidden**0.5
        self.h, self.w_down = random(world.size * num_rows, columns), random(columns, hidden) / intermediate**0.5
        self.gather = AllGatherGemm(world, self.w_up, num_rows)
        self.scatter = GemmReduceScatter(world, self.w_down, num_rows)
        self.gathered = self.x.new_empty(world.size * num_rows, hidden)
        self.summed = self.x.new_empty(num_rows, hidden)
        own = torch.linspace(0, num_rows - 1, min(SAMPLED_ROWS, num_rows)).long()
        self.sampled = torch.cat([rank * num_rows + own for rank in range(world.size)]).to(device)
        self.is_own = self.sampled // num_rows == world.rank

    def calls(self):
        """What is compared: by name, the call and the truth of its sampled rows, with where these are in its result."""
        x = self.x.new_zeros(len(self.sampled), self.x.shape[1], dtype=torch.float64)
        x[self.is_own] = self.x[self.sampled[self.is_own] % self.num_rows].double()
        dist.all_reduce(x)
        gathered = self.sampled, x @ self.w_up.double()
        summed = self.h[self.sampled].double() @ self.w_down.double()
        dist.all_reduce(summed)
        scattered = self.sampled[self.is_own] % self.num_rows, summed[self.is_own]
        return {
            "AllGatherGemm": (lambda: self.gather(self.x), *gathered),
            "all_gather, matmul": (self.all_gather_matmul, *gathered),
            "GemmReduceScatter": (lambda: self.scatter(self.h), *scattered),
            "matmul, reduce_scatter": (self.matmul_reduce_scatter, *scattered),
        }

    def all_gather_matmul(self):
        dist.all_gather_into_tensor(self.gathered, self.x)
        return self.gathered @ self.w_up

    def matmul_reduce_scatter(self):
        dist.reduce_scatter_tensor(self.summed, self.h @ self.w_down)
        return self.summed

    def destroy(self):
        self.gather.destroy()
        self.scatter.destroy()


PAIRS = {"AllGatherGemm": "all_gather, matmul", "GemmReduceScatter": "matmul, reduce_scatter"}


def require_right(out, places, wanted):
    if not out.isfinite().all():
        raise AssertionError("not all values are finite")
    error = float(((out[places].double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
    if not error <= LARGEST_ERROR[out.dtype]:
        raise AssertionError(f"error {error:.1e} is above {LARGEST_ERROR[out.dtype]:.0e}")


def measure(processes, shape, seconds):
    world = processes.world
    layer = Layer(world, *shape)
    runs, failures = {}, {}
    for name, (call, places, wanted) in layer.calls().items():

        def run_and_check(call=call, places=places, wanted=wanted):
            out = call()
            world.synchronize()
            require_right(out, places, wanted)

        failures[name] = processes.attempt(run_and_check)
        if failures[name]:
            continue
        runs[name] = call
        if world.device.type == "cuda":
            graphs = []
            name += ", graph"

            def replay_and_check(call=call, places=places, wanted=wanted, graphs=graphs):
                kept = []
                graphs.append(graph_of(lambda: kept.append(call()), world.device))
                kept[0].fill_(float("nan"))
                processes.gather(None)
                graphs[0]()
                world.synchronize()
                require_right(kept[0], places, wanted)

            failures[name] = processes.attempt(replay_and_check)
            if not failures[name]:
                runs[name] = graphs[0]
    times = slowest_in_turn(runs, processes, seconds)
    layer.destroy()
    num_rows, hidden, intermediate = shape
    flops = 2 * world.size * num_rows * hidden * (intermediate // world.size)
    return {
        "num_ranks": world.size,
        "num_rows": num_rows,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_comm_blocks": layer.gather.num_comm_blocks,
        "milliseconds": times,
        "teraflops": {name: 1e-9 * flops / value for name, value in times.items()},
        "ratios": {
            f"{other}{form} / {ours}{form}": times[other + form] / times[ours + form]
            for ours, other in PAIRS.items()
            for form in ("", ", graph")
            if ours + form in times and other + form in times
        },
        "failures": {name: reason for name, reason in failures.items() if reason},
    }


def show(row):
    print(
        f"{row['num_ranks']} ranks, {row['num_rows']} rows each, H {row['hidden_size']}, I {row['intermediate_size']}, "
        f"{row['num_comm_blocks']} communication blocks",
        flush=True,
    )
    for name, value in row["milliseconds"].items():
        print(f"    {name:52} {value:9.4f} ms {row['teraflops'][name]:7.1f} TFLOP/s", flush=True)
    for name, value in row["ratios"].items():
        print(f"    {name:52} {value:9.2f} x", flush=True)
    for name, reason in row["failures"].items():
        print(f"    {name:52} REFUSED {reason}", flush=True)


def run(processes, options):
    """Measures every shape that the time reaches; whether all were right, and none left out."""
    world, begin = processes.world, time.monotonic()
    shapes = SHAPES[world.device.type]
    report = {"torch": torch.__version__, "rows": [], "skipped": []}
    for number, shape in enumerate(shapes):
        left = min(processes.gather(options.seconds - (time.monotonic() - begin)))
        if left <= 0:
            report["skipped"].append(shape)
        else:
            report["rows"].append(measure(processes, shape, min(LONGEST_TIMING, left / (len(shapes) - number))))
        if world.rank == 0:
            if left > 0:
                show(report["rows"][-1])
            else:
                print(f"{shape}: no time left", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return not report["skipped"] and not any(row["failures"] for row in report["rows"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to write the figures, after every shape")
    parser.add_argument("--seconds", type=float, default=120.0, help="after this time no further shape is begun")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print("start this by torchrun: one process for each rank", file=sys.stderr)
        return 2
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    with World.from_group(device=options.device) as world, torch.no_grad():
        is_good = run(Processes(world), options)
    dist.destroy_process_group()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
