"""A simulated block as a picture: what each role waits for, and what it has in flight meanwhile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # A command writes files and opens no window.

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from tilecrew.simulator.machine import Event

ASYNCHRONOUS = {"copy": "#c4662b", "store": "#7a8a3c", "product": "#8a5a9e"}
NAMES = {"copy": "TMA copy in flight", "store": "TMA store in flight", "product": "wgmma product in flight"}
RUNNING, WAITING, HATCH, GREY = "#0b6e8a", "#f1f2f4", "#c3c7cd", "#5a5f66"
LABEL_SIZE, POINTS_PER_CHARACTER = 6.5, 4.3
ROLE_HEIGHT, FLIGHT_HEIGHT, GAP = 0.5, 0.4, 0.22  # a role's lane, the lane under it, the space behind it


@dataclass(frozen=True)
class Lanes:
    """Where a role is drawn: the upper edges of its lane, and of that of its asynchronous operations (or None)."""

    role: str
    top: float
    flight_top: float | None

    @property
    def bottom(self) -> float:
        return self.top - ROLE_HEIGHT if self.flight_top is None else self.flight_top - FLIGHT_HEIGHT


def draw(events: Sequence[Event], title: str, path: Path | str, block: int = 0, window: int = 500) -> None:
    """Writes a PNG of one block (a program of the grid), 12 inches wide and for six roles 6 high.

    A lane for each role, in the order in which they first appear, shows when it waits for a barrier; the lane under it
    shows its asynchronous operations from issue to completion. window: the picture ends after so many steps.

    Raises ValueError where there is no event of this block.
    """
    events = [event for event in events if event.block == block]
    if not events:
        raise ValueError(f"no event of block {block}")
    end = min(max(event.end for event in events), window)
    lanes = _lanes(events)
    style = {"font.size": 9, "font.family": "DejaVu Sans", "axes.edgecolor": "#b8bcc2", "hatch.linewidth": 0.6}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(12, max(1.4 - 0.75 * lanes[-1].bottom, 2.4)), layout="constrained")
        points_per_step = 12 * 72 * 0.86 / end  # the axes take that part of the figure's width
        for lane in lanes:
            _draw_role(axes, lane, [event for event in events if event.actor == lane.role], end, points_per_step)
        axes.set_xlim(0, end)
        axes.set_ylim(lanes[-1].bottom - GAP / 2, GAP / 2)
        axes.set_xlabel("scheduler steps")
        centres = [(lane.top + lane.bottom) / 2 for lane in lanes]
        axes.set_yticks(centres, [lane.role for lane in lanes], fontsize=10)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e3e5e8", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        figure.legend(handles=_legend(events), loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)


def _lanes(events: Iterable[Event]) -> list[Lanes]:
    """From top to bottom. The order in which roles first appear is that of their first starts, not of first ends."""
    in_order = sorted(events, key=lambda event: event.start)
    with_flights = {event.actor for event in in_order if event.kind in ASYNCHRONOUS}
    lanes, top = [], 0.0
    for role in dict.fromkeys(event.actor for event in in_order):
        lane = Lanes(role, top, top - ROLE_HEIGHT if role in with_flights else None)
        lanes.append(lane)
        top = lane.bottom - GAP
    return lanes


def _draw_role(axes: Any, lane: Lanes, events: list[Event], end: int, points_per_step: float) -> None:
    waits = sorted((event for event in events if event.kind == "wait"), key=lambda event: event.start)
    flights = sorted((event for event in events if event.kind in ASYNCHRONOUS), key=lambda event: event.start)
    # A role is seen where it waits and where it issues something; after the last of that nothing is known.
    seen = [x for event in waits for x in (event.start, event.end)] + [event.start for event in flights]
    axes.broken_barh(
        [(min(seen), max(seen) - min(seen))], (lane.top - ROLE_HEIGHT, ROLE_HEIGHT), facecolor=RUNNING, linewidth=0
    )
    spans = [(wait.start, wait.end - wait.start) for wait in waits]
    style = {"facecolor": WAITING, "edgecolor": HATCH, "hatch": "////", "linewidth": 0.4}
    axes.broken_barh(spans, (lane.top - ROLE_HEIGHT, ROLE_HEIGHT), **style)
    for wait in waits:
        left, right = wait.start, min(wait.end, end)
        label = barrier_label(wait.detail)
        if (right - left) * points_per_step >= len(label) * POINTS_PER_CHARACTER:
            box = {"facecolor": WAITING, "edgecolor": "none", "pad": 0.8}
            place = ((left + right) / 2, lane.top - ROLE_HEIGHT / 2)
            axes.text(*place, label, size=LABEL_SIZE, ha="center", va="center", color="#33373d", bbox=box)
    if lane.flight_top is not None:
        rows = _rows(flights)
        height = FLIGHT_HEIGHT / (max(rows) + 1)
        for flight, row in zip(flights, rows, strict=True):
            vertical = (lane.flight_top - (row + 1) * height, height)
            span = (flight.start, max(flight.end - flight.start, 1))
            colour = ASYNCHRONOUS[flight.kind]
            axes.broken_barh([span], vertical, facecolor=colour, edgecolor="white", linewidth=0.3)


def _rows(flights: Iterable[Event]) -> list[int]:
    """For each operation, by its start, the first row in which none before it is still in flight."""
    rows: list[int] = []
    ends: list[int] = []
    for flight in flights:
        row = next((row for row, end in enumerate(ends) if end <= flight.start), len(ends))
        if row == len(ends):
            ends.append(0)
        ends[row] = max(flight.end, flight.start + 1)
        rows.append(row)
    return rows


def barrier_label(location: str) -> str:
    """What stands in the picture: "full 2" for "full of ring.py:28, barrier 2"."""
    name, _, rest = location.partition(" of ")
    return f"{name} {rest.rpartition('barrier ')[2]}"


def _legend(events: Iterable[Event]) -> list[Patch]:
    kinds = {event.kind for event in events}
    handles = [
        Patch(facecolor=RUNNING, label="role runs"),
        Patch(facecolor=WAITING, edgecolor=HATCH, hatch="////", label="role waits for a barrier"),
    ]
    return handles + [Patch(facecolor=ASYNCHRONOUS[kind], label=NAMES[kind]) for kind in NAMES if kind in kinds]
