"""The demo's measurements as a PNG."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # A command writes files and opens no window.

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from tilecrew.demo.timing import Timing, speed_up

TITLES = {"operator": "Gated delta rule, one layer", "model": "Whole model, prefill"}
COLOURS = {"tilecrew": "#0b6e8a", "transformers": "#c4662b"}
LABELS = {"tilecrew": "tilecrew", "transformers": "transformers, torch path"}
GREY = "#5a5f66"
RATIO_NOTE = "Beside each point: time of transformers divided by time of tilecrew."


def draw(timings: list[Timing], subtitle: str, path: Path) -> None:
    """Two panels, time over sequence length on logarithmic axes, with the ratio of the two paths at each length."""
    with plt.rc_context({"font.size": 10, "font.family": "DejaVu Sans", "axes.edgecolor": "#b8bcc2"}):
        figure, panels = plt.subplots(1, len(TITLES), figsize=(11.5, 5.6), layout="constrained")
        figure.text(0.015, 0.955, "Prefill time against sequence length", fontsize=15, fontweight="bold", va="center")
        figure.text(0.015, 0.905, subtitle, fontsize=9.5, color=GREY, va="center")
        figure.text(0.015, 0.870, RATIO_NOTE, fontsize=9.5, color=GREY, va="center")
        figure.get_layout_engine().set(rect=(0.008, 0.01, 0.98, 0.83), wspace=0.06)
        for panel, what in zip(panels, TITLES, strict=True):
            _draw_panel(panel, timings, what)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _draw_panel(panel: Any, timings: list[Timing], what: str) -> None:
    panel.set_title(TITLES[what], loc="left", fontsize=11.5, pad=10)
    for name, colour in COLOURS.items():
        points = sorted((t.num_tokens, t.milliseconds) for t in timings if t.what == what and t.path == name)
        lengths, values = zip(*points, strict=True)
        panel.plot(lengths, values, color=colour, marker="o", markersize=6, linewidth=2.2, label=LABELS[name])
    ratios = speed_up(timings, what)
    tilecrew = {t.num_tokens: t.milliseconds for t in timings if t.what == what and t.path == "tilecrew"}
    for num_tokens, ratio in ratios:
        panel.annotate(
            f"{ratio:.1f}×",
            (num_tokens, tilecrew[num_tokens]),
            xytext=(5, -15),
            textcoords="offset points",
            ha="left",
            color=COLOURS["tilecrew"],
            fontweight="bold",
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([num_tokens for num_tokens, _ in ratios])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    panel.set_xlabel("tokens in the prompt", color=GREY)
    panel.set_ylabel("milliseconds (median)", color=GREY)
    panel.margins(x=0.09, y=0.12)
    panel.grid(True, which="major", color="#e6e8eb", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=GREY)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, loc="upper left")
