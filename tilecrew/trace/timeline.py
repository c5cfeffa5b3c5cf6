"""A traced CTA as a picture: a lane for each role, a colour for each chunk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # A command writes files and opens no window.

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from tilecrew.trace.spans import Span, roles_of

COLOURS = ("#0b6e8a", "#c4662b", "#7a8a3c", "#8a5a9e", "#b8863b", "#4a7fb5", "#a84860", "#5a5f66")  # by turns
WAITING, HATCH = "#f1f2f4", "#c3c7cd"
LANE, GAP = 0.7, 0.2
LABEL_SIZE, POINTS_PER_CHARACTER = 6.5, 3.9


def draw(spans: Sequence[Span], title: str, path: Path | str, chunks: tuple[int, int]) -> None:
    """Writes a PNG, 14 inches wide and for seven roles 5 high.

    chunks: first and behind the last. The picture reaches from the first start to the last end that a role that
    neither loads nor stores has in them; what the other roles do meanwhile for chunks before and behind is shown too.

    Raises ValueError where there is no span of these chunks.
    """
    inside = [span for span in spans if chunks[0] <= span.chunk < chunks[1] and not _moves_data(span.role)]
    if not inside:
        raise ValueError(f"no span of chunks {chunks[0]}:{chunks[1]}")
    left, right = _window(inside)
    shown = [span for span in spans if span.end > left and span.start < right]
    roles = roles_of(spans)
    style = {"font.size": 9, "font.family": "DejaVu Sans", "axes.edgecolor": "#b8bcc2", "hatch.linewidth": 0.6}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(14, 1.3 + 0.55 * len(roles)), layout="constrained")
        points_per_cycle = 14 * 72 * 0.88 / (right - left)  # the axes take that part of the figure's width
        for lane, role in enumerate(roles):
            own = [span for span in shown if span.role == role]
            _draw_lane(axes, -lane * (LANE + GAP), own, (left, right), points_per_cycle)
        axes.set_xlim(left, right)
        axes.set_ylim(-len(roles) * (LANE + GAP) + GAP / 2, GAP)
        axes.set_xlabel("clock cycles since the first span of the CTA")
        axes.set_yticks([-lane * (LANE + GAP) - LANE / 2 for lane in range(len(roles))], roles, fontsize=10)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e3e5e8", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        figure.legend(handles=_legend(shown), loc="outside lower center", ncols=9, frameon=False)
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)


def colour_of(chunk: int) -> str:
    """Neighbouring chunks, as many as can be under way at once, have different colours."""
    return COLOURS[chunk % len(COLOURS)]


def _moves_data(role: str) -> bool:
    return role.startswith(("load", "store"))


def _window(inside: Sequence[Span]) -> tuple[int, int]:
    """From the first start to the last end, of the role that ends last: others may be chunks ahead of it."""
    role = max(inside, key=lambda span: span.end).role
    own = [span for span in inside if span.role == role]
    return min(span.start for span in own), max(span.end for span in own)


def _draw_lane(axes: Any, top: float, spans: list[Span], limits: tuple[int, int], points_per_cycle: float) -> None:
    for span in spans:
        place = ([(span.start, max(span.end - span.start, 1))], (top - LANE, LANE))
        if span.is_wait:
            axes.broken_barh(*place, facecolor=WAITING, edgecolor=HATCH, hatch="////", linewidth=0.4)
        else:
            axes.broken_barh(*place, facecolor=colour_of(span.chunk), edgecolor="white", linewidth=0.4)
        left, right = max(span.start, limits[0]), min(span.end, limits[1])
        width = (right - left) * points_per_cycle
        # A name that does not fit gives way to the chunk's number, and that to nothing.
        for label in (f"{span.stage}  {span.chunk}", str(span.chunk)):
            if width >= len(label) * POINTS_PER_CHARACTER:
                colour = "#33373d" if span.is_wait else "white"
                box = {"facecolor": WAITING, "edgecolor": "none", "pad": 0.8} if span.is_wait else None
                centre = ((left + right) / 2, top - LANE / 2)
                axes.text(*centre, label, size=LABEL_SIZE, ha="center", va="center", color=colour, bbox=box)
                break


def _legend(spans: Sequence[Span]) -> list[Patch]:
    chunks = sorted({span.chunk for span in spans if not span.is_wait})
    handles = [Patch(facecolor=colour_of(chunk), label=f"chunk {chunk}") for chunk in chunks]
    return [*handles, Patch(facecolor=WAITING, edgecolor=HATCH, hatch="////", label="role waits")]
