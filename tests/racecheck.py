"""Reads the report of `compute-sanitizer --tool racecheck`, and knows what it reports although it is no race.

Triton hands each worker warp its next role, and its captured values, through shared memory, ordered by barriers that
racecheck does not connect: it reports the kernel's entry, where workers read what to do, against the line of
`warp_specialize` and against the statement behind it, where the first warp group tells them that all is done.

A role of one warp orders its lanes' stores before the arrival of one lane by `bar.warp.sync`, for which ptxas makes no
instruction where the warp is converged. So racecheck, which reads instructions, reports what the other 31 lanes wrote
against who waited for that arrival.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

Location = tuple[str, int]  # file name without its folder, line; ("", 0) where the report has none
UNKNOWN: Location = ("", 0)


@dataclass(frozen=True)
class Hazard:
    """Two or more accesses that nothing orders."""

    text: str
    locations: tuple[Location, ...]


def hazards_of(report: str) -> list[Hazard]:
    """Raises ValueError for a report whose summary is missing or counts other hazards than those that were read."""
    blocks: list[list[str]] = []
    for line in report.splitlines():
        text = line.removeprefix("=========").strip()
        if re.match(r"(Error|Warning): .*(Race|hazard)", text):
            blocks.append([text])
        elif blocks and re.match(r"and .*access at", text):
            blocks[-1].append(text)
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", report)
    if summary is None or int(summary[1]) != len(blocks):
        raise ValueError(f"read {len(blocks)} hazards, the report says {summary and summary[0]}:\n{report}")
    return [Hazard("\n".join(block), tuple(_location(line) for line in block)) for block in blocks]


def _location(line: str) -> Location:
    found = re.search(r"([^\s/]+\.py):(\d+)", line)
    return (found[1], int(found[2])) if found else UNKNOWN


def dispatch_lines(path: Path) -> set[Location]:
    """Entries of the functions that call warp_specialize (decorator to def), the lines of those calls, and the first
    line of the statement behind."""
    lines: set[Location] = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "warp_specialize":
                entry = range(min(d.lineno for d in function.decorator_list), function.lineno + 1)
                lines.update((path.name, line) for line in (*entry, *range(call.lineno, call.end_lineno + 1)))
                behind = [statement.lineno for statement in function.body if statement.lineno > call.end_lineno]
                lines.update((path.name, line) for line in behind[:1])
    return lines


def line_of(path: Path, function: str, text: str) -> Location:
    """The one line of that function that has this text."""
    (definition,) = (node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", None) == function)
    lines = enumerate(path.read_text().splitlines()[definition.lineno - 1 : definition.end_lineno], definition.lineno)
    (number,) = (number for number, line in lines if text in line)
    return path.name, number


def unexplained(hazards: list[Hazard], paths: list[Path], one_warp: tuple[Location, Location]) -> list[Hazard]:
    """The hazards that are not of the dispatch of these files, nor between a store of a role of one warp and the load
    that is known to wait for its arrival: one_warp, their lines."""
    dispatch = set().union(*(dispatch_lines(path) for path in paths))
    return [
        hazard
        for hazard in hazards
        if not dispatch.issuperset(hazard.locations) and set(hazard.locations) != set(one_warp)
    ]
