"""`tilecrew bench gated-delta-rule`: all cases, with a progress bar, into a folder."""

import datetime
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tilecrew
from tilecrew._hardware import hardware_of
from tilecrew.benchmark import report
from tilecrew.benchmark.cases import DECODE, FORWARD, DecodeCase, ForwardCase
from tilecrew.benchmark.measure import OURS, Row, measure_decode, measure_forward
from tilecrew.benchmark.peers import Peer, choose


@dataclass(frozen=True)
class Settings:
    """What to measure where; seconds: spent on each measured point."""

    device: torch.device
    dtype: torch.dtype
    forward: tuple[ForwardCase, ...]
    decode: tuple[DecodeCase, ...]
    peers: tuple[Peer, ...]
    output: Path
    seconds: float


def settings_of(device: torch.device, cases: str, peers: str, output: Path, seconds: float) -> Settings:
    """cases: "targets", "small", or "" for targets on a GPU and small elsewhere. Raises ValueError for unknown names.

    bfloat16 on a GPU, float32 elsewhere: a CPU's bfloat16 products are not what anyone would compare.
    """
    cases = cases or ("targets" if device.type == "cuda" else "small")
    if cases not in FORWARD:
        raise ValueError(f"--cases must be one of {', '.join(FORWARD)}, got {cases!r}")
    return Settings(
        device,
        torch.bfloat16 if device.type == "cuda" else torch.float32,
        tuple(FORWARD[cases]),
        tuple(DECODE[cases]),
        tuple(choose(peers)),
        output,
        seconds,
    )


@torch.inference_mode()
def run_benchmark(settings: Settings, console: Any) -> bool:
    """Measures, prints the table, writes bench.json, bench.md and bench.png. False where a result of ours was wrong."""
    from rich.progress import Progress

    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=2 * len(settings.forward) + len(settings.decode))
        for case in settings.forward:
            for inside in (False, True):
                progress.update(task, description=f"forward {case.name}{', inside' if inside else ''}")
                rows += measure_forward(
                    case, inside, list(settings.peers), settings.dtype, settings.device, settings.seconds
                )
                progress.advance(task)
        for decode_case in settings.decode:
            progress.update(task, description=f"decode {decode_case.name}")
            rows += measure_decode(decode_case, settings.dtype, settings.device, settings.seconds)
            progress.advance(task)
    setting = setting_of(settings)
    subtitle = f"{setting['device']}, {setting['dtype']}, torch {setting['torch']}, triton {setting['triton']}"
    console.print(report.table(rows, subtitle))
    for row in rows:
        place = f"{row.operator} {row.case}{', inside' if row.inside else ''}"
        if row.chosen:
            console.print(f"{place}: {row.chosen}", markup=False)
        if row.refused:
            console.print(f"{place}: no time for {row.name}: {row.refused}", markup=False)
    settings.output.mkdir(parents=True, exist_ok=True)
    report.write_json(rows, setting, settings.output / "bench.json")
    (settings.output / "bench.md").write_text(f"{subtitle}\n\n{report.markdown(rows)}", encoding="utf-8")
    report.draw(rows, subtitle, settings.output / "bench.png")
    console.print(f"written: {settings.output}/bench.json, bench.md, bench.png", markup=False)
    return not any(row.refused for row in rows if row.name == OURS)


def setting_of(settings: Settings) -> dict[str, Any]:
    """What stands above the rows of a record: device, dtype, versions, date."""
    versions = {OURS: tilecrew.__version__} | {peer.name: peer.version for peer in settings.peers}
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    return {
        "device": hardware_of(settings.device).name,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "triton": triton,
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
