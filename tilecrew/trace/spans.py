"""Proton's Chrome trace, read into spans of roles and chunks, and written as a Chrome trace with a track per role."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# What Proton calls a program and a warp, and what tilecrew.device.trace calls a scope.
PROGRAM = re.compile(r"(?P<kernel>.*) Core(?P<core>\d+) CTA(?P<program>\d+)")
WARP = re.compile(r"warp (?P<warp>\d+)\b.*")
SCOPE = re.compile(r"(?P<role>[^:]+): (?P<stage>.+?)(?P<before> \[-1\])?")
CYCLES_PER_UNIT = 1000  # Proton writes cycles as if the clock ran at 1 GHz: its microsecond is 1000 cycles


class TraceError(RuntimeError):
    """A trace without what it should hold."""


@dataclass(frozen=True)
class Span:
    """One stage of one chunk in one role: from `start` to `end`, in cycles since the CTA's first span."""

    role: str
    stage: str
    chunk: int
    start: int
    end: int

    @property
    def is_wait(self) -> bool:
        return self.stage.startswith("wait")


def read(path: Path | str, program: int, num_chunks: int) -> list[Span]:
    """The spans of one program of a launch, by start. A role of several warps is represented by its first one.

    path: what Proton wrote of a session with one launch of `num_chunks` chunks. Raises TraceError where a scope was
    not entered once for every chunk.
    """
    events: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))  # scope -> warp
    # A line is a trace; Proton writes one for a session with instrumentation alone.
    for line in Path(path).read_text().splitlines():
        for event in json.loads(line)["traceEvents"] if line else ():
            place, track = PROGRAM.fullmatch(str(event.get("pid"))), WARP.fullmatch(str(event.get("tid")))
            if event.get("ph") == "X" and place and track and int(place["program"]) == program:
                start = round(event["ts"] * CYCLES_PER_UNIT)
                end = start + round(event["dur"] * CYCLES_PER_UNIT)
                events[event["name"]][int(track["warp"])].append((start, end))
    if not events:
        raise TraceError(f"{path} holds no span of program {program}")
    first_warps: dict[str, int] = {}
    for scope, by_warp in events.items():
        role = _scope(scope)["role"]
        first_warps[role] = min(first_warps.get(role, min(by_warp)), *by_warp)
    spans = []
    for scope, by_warp in events.items():
        match = _scope(scope)
        warp = first_warps[match["role"]]
        if len(by_warp[warp]) != num_chunks:
            raise TraceError(f"{scope}: {len(by_warp[warp])} spans in warp {warp} for {num_chunks} chunks")
        for step, (start, end) in enumerate(sorted(by_warp[warp])):
            chunk = step - (match["before"] is not None)
            if chunk >= 0:  # at the first chunk there is none before
                spans.append(Span(match["role"], match["stage"], chunk, start, end))
    origin = min(span.start for span in spans)
    spans = [Span(span.role, span.stage, span.chunk, span.start - origin, span.end - origin) for span in spans]
    return sorted(spans, key=lambda span: (span.start, span.end))


def _scope(name: str) -> re.Match[str]:
    match = SCOPE.fullmatch(name)
    if match is None:
        raise TraceError(f"scope {name!r} names no role")
    return match


def roles_of(spans: Iterable[Span]) -> list[str]:
    """In the order of the pipeline: roles that load, that compute, that store; among those, by their first span."""
    roles = dict.fromkeys(span.role for span in spans)
    return sorted(roles, key=lambda role: (not role.startswith("load")) + role.startswith("store"))


@dataclass(frozen=True)
class Row:
    """Median cycles of a stage, and of a role from one chunk to the next, over all chunks."""

    role: str
    stage: str
    cycles: float
    period: float


def summary(spans: Sequence[Span]) -> list[Row]:
    """A row for each stage, in a role's order; the medians leave out that the first chunks fill the pipeline."""
    rows = []
    for role in roles_of(spans):
        stages: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            if span.role == role:
                stages[span.stage].append(span)
        for stage, members in stages.items():
            starts = [span.start for span in members]
            periods = [after - before for before, after in zip(starts, starts[1:], strict=False)]
            cycles = median(span.end - span.start for span in members)
            rows.append(Row(role, stage, cycles, median(periods) if periods else 0.0))
    return rows


def write_chrome(spans: Sequence[Span], title: str, path: Path | str) -> None:
    """A Chrome trace (chrome://tracing, ui.perfetto.dev) with one process, `title`, and a track for each role.

    A displayed nanosecond is a clock cycle. `args` of an event holds its chunk and its cycles.
    """
    tracks = {role: number for number, role in enumerate(roles_of(spans))}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for role, number in tracks.items():
        events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": role}})
        events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for span in spans:
        cycles = span.end - span.start
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[span.role],
                "name": span.stage,
                "cat": "wait" if span.is_wait else "work",
                "ts": span.start / CYCLES_PER_UNIT,
                "dur": cycles / CYCLES_PER_UNIT,
                "args": {"chunk": span.chunk, "cycles": cycles},
            }
        )
    Path(path).write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}))
