"""The rows of a benchmark as a table, as JSON and as a picture."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilecrew.benchmark.measure import BESIDE, OURS, Row

COLUMNS = ("operator", "case", "norms, gates", "library", "graph ms", "eager ms", "to best other", "of floor", "error")


def groups(rows: Iterable[Row]) -> dict[tuple[str, str, bool], list[Row]]:
    """Rows of one problem, in order."""
    grouped: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.operator, row.case, row.inside), []).append(row)
    return grouped


def ratio_to_best_other(rows: list[Row]) -> float | None:
    """Time of the fastest other library over tilecrew's, of one problem; None where either has no time."""
    ours = [row.milliseconds for row in rows if row.name == OURS and row.milliseconds is not None]
    others = [row.milliseconds for row in rows if row.name not in (OURS, *BESIDE) and row.milliseconds is not None]
    return min(others) / ours[0] if ours and others else None


def cells(rows: list[Row]) -> list[tuple[str, ...]]:
    """One line for each row of one problem, under COLUMNS."""
    ratio = ratio_to_best_other(rows)
    lines: list[tuple[str, ...]] = []
    for row in rows:
        percent = None
        if row.floor_milliseconds is not None and row.milliseconds is not None:
            percent = 100 * row.floor_milliseconds / row.milliseconds
        lines.append(
            (
                row.operator,
                row.case,
                "inside" if row.inside else "",
                row.name,
                _number(row.graph_milliseconds, ".3f"),
                _number(row.eager_milliseconds, ".3f") if not row.refused else "refused",
                _number(ratio, ".2f") if row.name == OURS else "",
                "" if percent is None else f"{percent:.0f} %",
                f"{row.error:.1e}",
            )
        )
    return lines


def markdown(rows: Iterable[Row]) -> str:
    """The table for a document."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for group in groups(rows).values():
        lines += ["| " + " | ".join(line) + " |" for line in cells(group)]
    return "\n".join(lines) + "\n"


def table(rows: Iterable[Row], title: str) -> Any:
    """The table for a terminal."""
    from rich.table import Table

    drawn = Table(*COLUMNS, title=title, title_justify="left")
    for group in groups(rows).values():
        for line in cells(group):
            drawn.add_row(*line)
        drawn.add_section()
    return drawn


def write_json(rows: list[Row], setting: dict[str, Any], path: Path) -> None:
    """setting: device, versions and options of the run."""
    record = {**setting, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def draw(rows: list[Row], subtitle: str, path: Path) -> None:
    """A bar for every library and problem: milliseconds, and the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")  # a command writes files and opens no window
    import matplotlib.pyplot as plt

    grouped = groups(row for row in rows if row.operator == "forward")
    names = list(dict.fromkeys(row.name for group in grouped.values() for row in group))
    colours = dict(zip(names, ("#0b6e8a", "#c4662b", "#7a8a3c", "#8a5a9e"), strict=False))
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.32 * sum(map(len, grouped.values()))), layout="constrained")
    position, ticks = 0.0, []
    for (_, case, inside), group in grouped.items():
        first = position
        for row in group:
            if row.milliseconds is not None:
                axes.barh(position, row.milliseconds, height=0.8, color=colours[row.name])
                axes.text(row.milliseconds, position, f" {row.milliseconds:.3f}", va="center")
            position += 1
        floor = group[0].floor_milliseconds
        if floor is not None:
            axes.plot([floor, floor], [first - 0.5, position - 0.5], color="#5a5f66", linewidth=1.5)
        ticks.append(((first + position - 1) / 2, case + (", norms and gates inside" if inside else "")))
        position += 0.8
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds (grey line: least time that the device's peaks allow)")
    axes.set_title(f"Gated delta rule, forward\n{subtitle}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    axes.legend(handles, names, frameon=False, loc="lower right")
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
