"""The report as a picture, drawn by matplotlib: efficiency against replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep import checks

_INK, _GRID = "#3a3f47", "#e6e8eb"
_CURVE_COLOURS = {"weak": "#2f6db3", "strong": "#e5794a"}
MISSING = checks.needs("a picture", "matplotlib", "bench")


def is_available() -> bool:
    """Whether there is a matplotlib to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw_efficiency(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Efficiency against replicas, as a PNG: medians, and a band between the quartiles."""
    # Without pyplot: nothing global is set, and nothing has to be closed.
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab0b8")
    ticks: list[int] = []
    highest = 1.0
    for name, points in curves.items():
        x = [point["num_replicas"] for point in points]
        low, median, high = ([point["efficiency"][key] for point in points] for key in ("low", "median", "high"))
        colour = _CURVE_COLOURS[name]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(x, median, color=colour, marker="o", linewidth=2, label=f"{name} scaling")
        axes.annotate(
            f"{median[-1]:.0%}", (x[-1], median[-1]), (9, 0), textcoords="offset points", va="center", color=colour
        )
        ticks += x
        highest = max(highest, *high)
    axes.axhline(1.0, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(ticks)), [str(tick) for tick in sorted(set(ticks))])
    axes.minorticks_off()
    axes.set_xlim(min(ticks) * 0.92, max(ticks) * 1.12)
    axes.set_ylim(0, highest * 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("replicas", color=_INK)
    axes.set_ylabel("efficiency", color=_INK)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=160, format="png")
