"""Times the expert-parallel mixture of experts, and checks its results in the same run.

    PYTHONPATH=. python bench/moe.py --json moe.json --seconds 120            ranks emulated on one GPU
    PYTHONPATH=. torchrun --nproc-per-node 8 bench/moe.py --json moe.json     one GPU a rank

Emulated, the ranks share the GPU's multiprocessors and memory, and only the link is missing: what is compared is the
work of all ranks with the same layer of all their tokens on one rank, from torch._grouped_mm and index copies. Parts
are timed too: each product alone, rows moved alone, dispatch with the first product, the second with combine. With
torchrun the layer stands beside NCCL's all-to-all with torch._grouped_mm, and the slowest rank counts.

Calls of one shape are captured in CUDA graphs that run in turns, with the L2 cache flushed before each; with torchrun
they run as they are. A wrong result gets no time. Shapes that the time does not reach are left out, and said to be.
"""

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

# Emulated ranks have two streams each; CUDA reads this when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
import torch.distributed as dist

import tilecrew
from tilecrew._hardware import hardware_of
from tilecrew.grouped_gemm import operators
from tilecrew.grouped_gemm.schedule import pick
from tilecrew.moe import expert_range, fused
from tilecrew.moe.experts import SWIGLU
from tilecrew.moe.workspace import MoESizes, MoEWorkspace
from tilecrew.parallel import World, on_every_rank

# Experts, routes a token, hidden size, intermediate size.
SHAPES = {"DeepSeek-V3": (256, 8, 7168, 2048), "Qwen3-30B": (128, 8, 2048, 768), "Qwen3-Next": (512, 10, 2048, 512)}
BF16 = torch.bfloat16
LARGEST_ERROR = 1.5e-2
MAX_ROUNDS = 30


def weights_of(num_experts, hidden, intermediate):
    def random(*shape):
        return torch.empty(shape, dtype=BF16, device="cuda").normal_(std=shape[1] ** -0.5)

    return random(num_experts, hidden, 2 * intermediate), random(num_experts, intermediate, hidden)


def tokens_of(num_tokens, num_experts, top_k, hidden):
    """x, ids of different experts drawn uniformly, and weights that add up to one."""
    x = torch.randn(num_tokens, hidden, dtype=BF16, device="cuda")
    values, ids = torch.randn(num_tokens, num_experts, device="cuda").topk(top_k, 1)
    return x, ids, values.softmax(1)


def baseline(x, ids, weights, w_gate_up, w_down):
    """The layer on one rank, of torch._grouped_mm and index copies."""
    flat = ids.flatten()
    order = flat.argsort()
    counts = torch.zeros(w_gate_up.shape[0], dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    y = experts_of_torch(x[order // ids.shape[1]], w_gate_up, w_down, counts.cumsum(0).to(torch.int32))
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=x.device)
    return (y[back].unflatten(0, ids.shape) * weights[..., None]).sum(1).to(x.dtype)


def experts_of_torch(rows, w_gate_up, w_down, offs):
    gate, up = torch._grouped_mm(rows, w_gate_up, offs=offs).unflatten(-1, (-1, 2, SWIGLU.run)).unbind(-2)
    hidden = (torch.nn.functional.silu(gate) * up).flatten(-2)
    return torch._grouped_mm(hidden, w_down, offs=offs)


def error_of(out, tokens, w_gate_up, w_down):
    """Of up to 16 tokens, relative to float64; NaN anywhere gives NaN."""
    x, ids, weights = tokens
    chosen = torch.linspace(0, x.shape[0] - 1, min(16, x.shape[0])).long().tolist()
    worst = 0.0
    for token in chosen:
        wanted = 0
        for k, expert in enumerate(ids[token].tolist()):
            hidden = SWIGLU.reference((x[token].double() @ w_gate_up[expert].double())[None], None)
            wanted = wanted + weights[token, k].double() * (hidden @ w_down[expert].double())[0]
        worst = max(worst, float((out[token].double() - wanted).norm() / wanted.norm()))
    return worst if out.isfinite().all() else float("nan")


class Rank:
    """One emulated rank: its workspace, its tables, and the parts of the layer as calls on its stream."""

    def __init__(self, world, tokens, w_gate_up, w_down, sizes, options):
        own = expert_range(world.rank, sizes.num_experts, world.size)
        self.world, self.tokens = world, tokens
        self.w_gate_up, self.w_down = w_gate_up[own.start : own.stop], w_down[own.start : own.stop]
        self.workspace = MoEWorkspace(world, sizes, dispatch=options.dispatch, num_comm_blocks=options.num_comm_blocks)
        num_rows = self.workspace.num_rows
        self.rows = self.tokens[0].new_empty(num_rows, sizes.hidden_size)
        self.hidden = self.tokens[0].new_empty(num_rows, sizes.intermediate_size)
        self.out = None

    def route(self, world):
        self.routing = self.workspace.share_tokens(*self.tokens)

    def dispatch_gemm(self, world):
        self.workspace.counters.zero_()
        fused.dispatch_gemm(self.workspace, self.routing, self.w_gate_up, SWIGLU, self.rows, self.hidden)

    def copy(self, world):
        self.workspace.counters.zero_()
        fused.launch_dispatch(self.workspace, self.routing, self.rows)

    def first_gemm(self, world):
        self._gemm(self.rows, self.w_gate_up, self.hidden, SWIGLU)

    def second_gemm(self, world):
        self._gemm(self.hidden, self.w_down, self.workspace.results.local[: self.rows.shape[0]], None)

    def gemm_combine(self, world):
        self.workspace.epoch.add_(1)
        weights, num_tokens = self.tokens[2], self.tokens[0].shape[0]
        self.out = fused.gemm_combine(self.workspace, self.routing, self.hidden, self.w_down, weights, None, num_tokens)

    def layer(self, world):
        sizes = self.workspace.sizes
        self.out = tilecrew.moe_forward(
            *self.tokens,
            self.w_gate_up,
            self.w_down,
            world=world,
            capacity=sizes.capacity,
            num_experts=sizes.num_experts,
        )

    def _gemm(self, x, w, out, epilogue):
        kernel = importlib.import_module("tilecrew.grouped_gemm.kernel_grouped_gemm")
        schedule = pick(operators.problem_of(x, w, None, epilogue), hardware_of(x.device))
        num_programs = min(schedule.num_programs, self.world.num_sms)
        hooks = kernel.hooks_of(None, epilogue)
        kernel.launch(x, w, self.routing.offs, out, schedule.tiles, num_programs, hooks, writes_tail=False).run()


def call_all(worlds, ranks, name):
    on_every_rank(worlds, lambda world: getattr(ranks[world.rank], name)(world))


def capture(call, worlds=()):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for world in worlds:
            world.stream.wait_stream(torch.cuda.current_stream())
        call()
        for world in worlds:
            torch.cuda.current_stream().wait_stream(world.stream)
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


def require(is_right, what):
    if not is_right:
        raise AssertionError(what)


def check_part(name, worlds, ranks, layer_outs, w_all):
    """Raises where what a part has just computed is wrong."""
    for world in worlds:
        world.synchronize()
    for rank in ranks:
        if name in ("copy", "dispatch_gemm"):
            num_rows = int(rank.routing.offs[-1])
            sources, token = rank.routing.pull_dispatch_indices[:num_rows].long().unbind(1)
            x = torch.stack([other.tokens[0] for other in ranks])
            wanted = torch.where((sources >= 0)[:, None], x[sources.clamp_min(0), token.clamp_min(0)], 0)
            require(torch.equal(rank.rows[:num_rows], wanted), "rows are not those of their tokens")
        if name == "gemm_combine":
            require(torch.equal(rank.out, layer_outs[rank.world.rank]), "sums are not those of the layer")
        if name == "layer":
            error = error_of(rank.out, rank.tokens, *w_all)
            require(error <= LARGEST_ERROR, f"error {error:.1e} is above {LARGEST_ERROR:.0e}")


def measure_emulated(name, size, seconds, options):
    num_experts, top_k, hidden, intermediate = SHAPES[name]
    w_all = weights_of(num_experts, hidden, intermediate)
    sizes = MoESizes(options.tokens, top_k, num_experts, hidden, intermediate, BF16)
    worlds = World.emulated(size, device="cuda")
    tokens = [tokens_of(options.tokens, num_experts, top_k, hidden) for _ in range(size)]
    ranks = on_every_rank(worlds, lambda world: Rank(world, tokens[world.rank], *w_all, sizes, options))
    torch.cuda.synchronize()
    everything = [torch.cat(parts) for parts in zip(*tokens, strict=True)]
    graphs, failures, layer_outs = {}, {}, []
    call_all(worlds, ranks, "route")
    # The layer first: what the parts are compared with. Its rows are those of the workspace's own call.
    for part in ("layer", "copy", "dispatch_gemm", "first_gemm", "second_gemm", "gemm_combine"):
        try:
            if part in ("copy", "dispatch_gemm"):
                for rank in ranks:
                    rank.rows.fill_(float("nan"))
                torch.cuda.synchronize()
            call_all(worlds, ranks, part)
            check_part(part, worlds, ranks, layer_outs, w_all)
            if part == "layer":
                layer_outs = [rank.out.clone() for rank in ranks]
            graphs[part] = capture(lambda part=part: call_all(worlds, ranks, part), worlds)
            check_part(part, worlds, ranks, layer_outs, w_all)
        except Exception as error:  # the other parts are still of use
            failures[part] = f"{type(error).__name__}: {error}"[:500]
    try:
        error = error_of(baseline(*everything, *w_all), everything, *w_all)
        require(error <= LARGEST_ERROR, f"error {error:.1e} is above {LARGEST_ERROR:.0e}")
        graphs["torch, one rank"] = capture(lambda: baseline(*everything, *w_all))
    except Exception as error:
        failures["torch, one rank"] = f"{type(error).__name__}: {error}"[:500]
    times = milliseconds(graphs, seconds)
    for world in worlds:
        world.synchronize()
    operations = 6 * size * options.tokens * top_k * hidden * intermediate
    return {
        "shape": name,
        "ranks": size,
        "tokens": options.tokens,
        "dispatch": ranks[0].workspace.dispatch,
        "num_comm_blocks": ranks[0].workspace.num_comm_blocks,
        "milliseconds": times,
        "layer_teraflops": {n: 1e-9 * operations / times[n] for n in ("layer", "torch, one rank") if n in times},
        "failures": failures,
    }


def nccl_layer(tokens, w_gate_up, w_down, num_experts, rank, size):
    """The layer over NCCL's all-to-all: rows sorted by expert, products of torch._grouped_mm."""
    x, ids, weights = tokens
    flat = ids.flatten()
    order = flat.argsort()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    own = expert_range(rank, num_experts, size)
    all_counts = torch.empty(size, num_experts, dtype=torch.int64, device=x.device)
    dist.all_gather_into_tensor(all_counts, counts[None])
    ranges = [expert_range(r, num_experts, size) for r in range(size)]
    send = [int(n) for n in torch.stack([counts[e.start : e.stop].sum() for e in ranges]).tolist()]
    received_counts = all_counts[:, own.start : own.stop]
    receive = received_counts.sum(1).tolist()
    rows = x.new_empty(sum(receive), x.shape[1])
    dist.all_to_all_single(rows, x[order // ids.shape[1]], receive, send)
    expert = torch.arange(len(own), device=x.device).repeat(size)
    by_expert = torch.repeat_interleave(expert, received_counts.flatten()).argsort(stable=True)
    offs = received_counts.sum(0).cumsum(0).to(torch.int32)
    y = torch.empty_like(rows)
    y[by_expert] = experts_of_torch(rows[by_expert], w_gate_up, w_down, offs)
    returned = x.new_empty(order.shape[0], x.shape[1])
    dist.all_to_all_single(returned, y, send, receive)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=x.device)
    return (returned[back].unflatten(0, ids.shape) * weights[..., None]).sum(1).to(x.dtype)


def measure_real(name, world, seconds, options):
    num_experts, top_k, hidden, intermediate = SHAPES[name]
    torch.manual_seed(0)  # all ranks have the weights of all experts while results are checked
    w_all = weights_of(num_experts, hidden, intermediate)
    torch.manual_seed(1 + world.rank)
    tokens = tokens_of(options.tokens, num_experts, top_k, hidden)
    sizes = MoESizes(options.tokens, top_k, num_experts, hidden, intermediate, BF16)
    rank = Rank(world, tokens, *w_all, sizes, options)
    calls = {
        "layer": lambda: rank.layer(world),
        "NCCL": lambda: nccl_layer(tokens, rank.w_gate_up, rank.w_down, num_experts, world.rank, world.size),
    }
    times, failures, end = {}, {}, time.monotonic() + seconds
    for label, call in calls.items():
        out = call()
        world.synchronize()
        out = rank.out if label == "layer" else out
        errors = [None] * world.size
        dist.all_gather_object(errors, error_of(out, tokens, *w_all))
        if not all(error <= LARGEST_ERROR for error in errors):
            failures[label] = f"errors {errors} are above {LARGEST_ERROR:.0e}"
            continue
        values = []
        for number in range(MAX_ROUNDS):
            stops = [None] * world.size
            dist.all_gather_object(stops, number >= 5 and time.monotonic() > end)
            if any(stops):
                break
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            everybody = [None] * world.size
            dist.all_gather_object(everybody, start.elapsed_time(stop))
            values.append(max(everybody))
        times[label] = sorted(values)[len(values) // 2]
    rank.workspace.destroy()
    return {
        "shape": name,
        "ranks": world.size,
        "tokens": options.tokens,
        "dispatch": rank.workspace.dispatch,
        "num_comm_blocks": rank.workspace.num_comm_blocks,
        "milliseconds": times,
        "layer_teraflops": {
            n: 6e-9 * options.tokens * top_k * hidden * intermediate / value for n, value in times.items()
        },
        "failures": failures,
    }


def show(row):
    print(
        f"{row['shape']}, {row['ranks']} ranks, {row['tokens']} tokens each, dispatch {row['dispatch']}, "
        f"{row['num_comm_blocks']} communication blocks",
        flush=True,
    )
    for name, value in row["milliseconds"].items():
        rate = row["layer_teraflops"].get(name)
        shown = "" if rate is None else f" {rate:7.1f} TFLOP/s"
        print(f"    {name:20} {value:8.4f} ms{shown}", flush=True)
    for name, failure in row["failures"].items():
        print(f"    {name:20} FAILED {failure}", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures, after every shape")
    parser.add_argument("--seconds", type=float, default=120.0, help="after this time no further shape is begun")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of emulated ranks")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--dispatch", choices=["warps", "blocks"], help="how rows are moved; default: as tilecrew chooses"
    )
    parser.add_argument(
        "--num-comm-blocks", type=int, help="communication blocks of a rank; default: as tilecrew chooses"
    )
    return parser.parse_args()


def run(cases, measure, options, report, is_first):
    """measure(*case, seconds) for each case; whether all ran and were right."""
    begin, rows = time.monotonic(), report["rows"]
    for number, case in enumerate(cases):
        left = options.seconds - (time.monotonic() - begin)
        if dist.is_initialized():
            lefts = [None] * dist.get_world_size()
            dist.all_gather_object(lefts, left)
            left = min(lefts)
        if left <= 0:
            report["skipped"].append(case)
            continue
        try:
            rows.append(measure(*case, min(3.0, left / (len(cases) - number))))
        except Exception:  # the shapes that follow are still of use
            report["skipped"].append(case)
            traceback.print_exc()
            if dist.is_initialized():
                raise  # other ranks wait
            torch.cuda.empty_cache()
            continue
        torch.cuda.empty_cache()
        if is_first:
            show(rows[-1])
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
    if is_first:
        for case in report["skipped"]:
            print(f"{case}: left out", flush=True)
        print(f"{time.monotonic() - begin:.0f} s", flush=True)
    return bool(rows) and not report["skipped"] and not any(row["failures"] for row in rows)


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    report = {"torch": torch.__version__, "rows": [], "skipped": []}
    if "RANK" not in os.environ:
        report["device"] = torch.cuda.get_device_name()
        torch.manual_seed(0)
        cases = [(name, size) for name in options.shapes for size in options.ranks]
        is_good = run(cases, lambda *case: measure_emulated(*case, options), options, report, True)
        return 0 if is_good else 1
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    report["device"] = torch.cuda.get_device_name()
    dist.init_process_group("nccl")
    with World.from_group() as world:
        cases = [(name,) for name in options.shapes]
        is_good = run(
            cases, lambda name, left: measure_real(name, world, left, options), options, report, world.rank == 0
        )
    dist.destroy_process_group()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
