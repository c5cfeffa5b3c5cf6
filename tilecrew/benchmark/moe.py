"""`tilecrew bench moe`: the expert-parallel mixture of experts, its parts, and what stands beside it.

Emulated, ranks share one GPU's multiprocessors and memory, and only the link is missing: what is compared is the work
of all ranks with the same layer of all their tokens on one rank, from torch._grouped_mm and index copies. With a
process and a GPU for each rank the layer stands beside all-to-all of NCCL with torch._grouped_mm, and the slowest rank
of a round counts. Parts are timed too: each product alone, rows moved alone, results summed alone, and either product
with what runs beside it, which at best takes as long as the slower of both.

On a GPU calls are captured in CUDA graphs that run in turns, with the L2 cache flushed before each; the layer over
all-to-all, which reads sizes on the host, cannot be captured, so between processes the layer is called eagerly as well.
A wrong result gets no time.

moe_cases.py      shapes, routing, what a measured case says
moe_torch.py      the layer of torch's functions, and errors
moe_parts.py      the parts as calls of one rank, and their checks
moe_measure.py    times of a case
processes.py      graphs, and processes that measure together
"""

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import tilecrew
from tilecrew._hardware import hardware_of
from tilecrew.benchmark.moe_cases import ROUTINGS, SHAPES, TARGETS, Case, Row
from tilecrew.benchmark.moe_measure import measure_emulated, measure_process
from tilecrew.benchmark.processes import Processes
from tilecrew.moe.schedule import COMBINES, DISPATCHES

LONGEST_TIMING = 3.0  # seconds of a case
DEFAULT_RANKS = {"cuda": "1,2,4,8", "cpu": "1,2"}
DEFAULT_TOKENS = {"cuda": 1024, "cpu": 64}


@dataclass(frozen=True)
class Settings:
    """What is measured; made by `settings_of`. dispatch, combine and num_comm_blocks: None as tilecrew chooses."""

    device: torch.device
    shapes: tuple[str, ...]
    routings: tuple[str, ...]
    ranks: tuple[int, ...]
    num_tokens: int
    dispatch: str | None
    combine: str | None
    num_comm_blocks: int | None
    seconds: float
    json: Path | None


def settings_of(
    device: torch.device,
    *,
    shapes: str = "",
    routing: str = "both",
    ranks: str = "",
    tokens: int | None = None,
    dispatch: str = "",
    combine: str = "",
    num_comm_blocks: int | None = None,
    seconds: float = 120.0,
    json: Path | None = None,
) -> Settings:
    """Settings from the options of the command, lists with commas; "" and None choose. Raises ValueError for what is
    not known."""
    named = tuple(part.strip() for part in shapes.split(",") if part.strip())
    if unknown := [name for name in named if name not in SHAPES]:
        raise ValueError(f"--shapes must be some of {', '.join(SHAPES)}, got {unknown[0]!r}")
    if routing not in (*ROUTINGS, "both"):
        raise ValueError(f"--routing must be {', '.join(ROUTINGS)} or both, got {routing!r}")
    if dispatch and dispatch not in DISPATCHES:
        raise ValueError(f"--dispatch must be one of {', '.join(DISPATCHES)}, got {dispatch!r}")
    if combine and combine not in COMBINES:
        raise ValueError(f"--combine must be one of {', '.join(COMBINES)}, got {combine!r}")
    numbers = [part.strip() for part in (ranks or DEFAULT_RANKS[device.type]).split(",")]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"--ranks must be positive numbers with commas, got {ranks!r}")
    if tokens is not None and tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {tokens}")
    return Settings(
        device,
        named or (TARGETS if device.type == "cuda" else ("small",)),
        ROUTINGS if routing == "both" else (routing,),
        tuple(int(number) for number in numbers),
        tokens or DEFAULT_TOKENS[device.type],
        dispatch or None,
        combine or None,
        num_comm_blocks,
        seconds,
        json,
    )


def run_benchmark(settings: Settings, say: Callable[[str], None], processes: Processes | None = None) -> bool:
    """Measures, says every case as text, and writes the record after each; False where a result was wrong, or a case
    left out. When the time is over no further case is begun.

    processes: this process is one rank, and settings.ranks are not read; collective. Rank 0 says and writes.
    """
    is_first = processes is None or processes.world.rank == 0
    say = say if is_first else lambda line: None
    setting = {
        "device": hardware_of(settings.device).name,
        "ranks are": "emulated" if processes is None else "processes",
        "torch": torch.__version__,
        "tilecrew": tilecrew.__version__,
    }
    say(", ".join(f"{name} {value}" for name, value in setting.items()))
    torch.manual_seed(0)
    cases = _cases(settings, processes)
    begin, rows, skipped = time.monotonic(), list[Row](), dict[str, str]()
    for number, case in enumerate(cases):
        left = settings.seconds - (time.monotonic() - begin)
        left = left if processes is None else min(processes.gather(left))
        if left <= 0:
            skipped[str(case)] = "no time left"
        else:
            seconds = min(LONGEST_TIMING, left / (len(cases) - number))
            try:
                rows.append(_measure(case, settings, processes, seconds))
                for line in lines_of(rows[-1]):
                    say(line)
            except Exception as error:  # the cases that follow are still of use
                if processes is not None:
                    raise  # other ranks wait in what this one has left
                traceback.print_exc()
                skipped[str(case)] = f"{type(error).__name__}: {error}"[:500]
        if str(case) in skipped:
            say(f"{case}: {skipped[str(case)]}")
        if settings.json is not None and is_first:
            record = {**setting, "rows": [row.as_dict() for row in rows], "skipped": skipped}
            settings.json.parent.mkdir(parents=True, exist_ok=True)
            settings.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if settings.device.type == "cuda":
            gc.collect()  # workspaces and worlds refer to each other
            torch.cuda.empty_cache()
    say(f"{time.monotonic() - begin:.0f} s" + (f", written: {settings.json}" if settings.json is not None else ""))
    return not skipped and not any(row.failures for row in rows)


def _cases(settings: Settings, processes: Processes | None) -> list[Case]:
    ranks = settings.ranks if processes is None else (processes.world.size,)
    return [
        Case(shape, routing, num_ranks, settings.num_tokens)
        for shape in settings.shapes
        for routing in settings.routings
        for num_ranks in ranks
    ]


def _measure(case: Case, settings: Settings, processes: Processes | None, seconds: float) -> Row:
    forms = {
        "dispatch": settings.dispatch,
        "combine": settings.combine,
        "num_comm_blocks": settings.num_comm_blocks,
    }
    if processes is not None:
        return measure_process(case, processes, forms, seconds)
    return measure_emulated(case, settings.device, forms, seconds)


def lines_of(row: Row) -> list[str]:
    """A case as text."""
    form = "on the CPU" if row.dispatch is None else f"{row.num_comm_blocks} communication blocks"
    if row.predicted is not None:
        form += f", predicted dispatch_gemm {row.predicted:.3f} ms"
    lines = [
        f"{row.case}, dispatch {row.dispatch or 'by torch'}, combine {row.combine or 'by torch'}, {form}; "
        f"routes of the hottest expert {row.hottest_expert:.1f}, of the busiest rank {row.busiest_rank:.2f} times the "
        "mean"
    ]
    for name, value in row.milliseconds.items():
        rate = row.teraflops.get(name)
        lines.append(f"    {name:52} {value:9.4f} ms" + ("" if rate is None else f" {rate:7.1f} TFLOP/s"))
    lines += [f"    {name:52} {value:9.4f} ms" for name, value in row.bounds.items()]
    lines += [f"    {name:52} {value:9.2f} x" for name, value in row.ratios.items()]
    lines += [f"    {name:52} REFUSED {reason}" for name, reason in row.failures.items()]
    return lines
