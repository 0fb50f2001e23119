"""The report as a picture, drawn by matplotlib: efficiency against replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evenstep import checks

_CURVE_COLOURS = {"weak": "#2f6db3", "strong": "#e5794a"}
MISSING = checks.needs("a picture", "matplotlib", "bench")


def is_available() -> bool:
    """Whether there is a matplotlib to draw with."""
    return find_spec("matplotlib") is not None


def draw_efficiency(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Efficiency against replicas, as a PNG: medians, and a band between the quartiles."""
    # Without pyplot: nothing global is set, and nothing has to be closed.
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    for name, points in curves.items():
        x = [point["num_replicas"] for point in points]
        low, median, high = ([point["efficiency"][key] for point in points] for key in ("low", "median", "high"))
        colour = _CURVE_COLOURS[name]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(x, median, color=colour, marker="o", linewidth=2, label=f"{name} scaling")
    ticks = sorted({point["num_replicas"] for points in curves.values() for point in points})
    axes.axhline(1.0, color="#3a3f47", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("replicas")
    axes.set_ylabel("efficiency")
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=160, format="png")
