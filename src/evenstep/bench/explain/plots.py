"""The report as pictures, drawn by matplotlib: efficiency against replicas, the step in parts, one step per rank."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.bench.explain.report import CURVE_TITLES, PART_NAMES

INK, GRID = "#3a3f47", "#e6e8eb"
PART_COLOURS = {
    "compute": "#2f6db3",
    "contention": "#8fb7e3",
    "data": "#e0a32e",
    "imbalance": "#c8453b",
    "exposed": "#e5794a",
    "engine": "#7d67ad",
    "optimizer": "#4f9d69",
}
_PHASE_COLOURS = {
    "data": PART_COLOURS["data"],
    "sync": PART_COLOURS["engine"],
    "forward": "#5b93cf",
    "backward": PART_COLOURS["compute"],
    "wait": "#f3c3ad",
    "engine": PART_COLOURS["engine"],
    "optimizer": PART_COLOURS["optimizer"],
    "script": "#b9c0c9",
}
_CURVE_COLOURS = {"weak": "#2f6db3", "strong": "#e5794a"}
MISSING = "pictures and report.html need matplotlib: pip install 'evenstep[bench]'"


def is_available() -> bool:
    """Whether there is a matplotlib to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a report, by name."""
    return {
        "efficiency": draw_efficiency(report["curves"]),
        "parts": draw_parts(report["curves"]),
        "timeline": draw_timeline(report["timeline"]),
    }


def draw_efficiency(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Efficiency against replicas: medians, and a band between the quartiles."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = _figure(7.2, 3.6)
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
    axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(ticks)), [str(tick) for tick in sorted(set(ticks))])
    axes.minorticks_off()
    axes.set_xlim(min(ticks) * 0.92, max(ticks) * 1.12)
    axes.set_ylim(0, highest * 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("replicas")
    axes.set_ylabel("efficiency")
    axes.legend(frameon=False, loc="lower left")
    return figure


def draw_parts(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """The average step of each number of replicas as a stacked bar, in milliseconds."""
    figure, all_axes = _figure(7.2, 3.9, len(curves))
    for axes, (name, points) in zip(all_axes if len(curves) > 1 else [all_axes], curves.items(), strict=True):
        bottoms = [0.0] * len(points)
        for part, words in PART_NAMES.items():
            heights = [point["parts"][part] * 1e3 for point in points]
            axes.bar(
                range(len(points)), heights, bottom=bottoms, width=0.62, color=PART_COLOURS[part], label=words,
                edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set_xticks(range(len(points)), [str(point["num_replicas"]) for point in points])
        axes.set_xlim(-0.6, len(points) - 0.4)
        axes.set_xlabel("replicas")
        axes.set_title(CURVE_TITLES[name].split(":")[0], fontsize="medium", color=INK)
    first = all_axes[0] if len(curves) > 1 else all_axes
    first.set_ylabel("milliseconds of a step")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize="small")
    return figure


def draw_timeline(timeline: Mapping[str, Any]) -> Any:
    """One step: what every rank was at, and below that its buckets in flight."""
    from matplotlib.patches import Patch

    ranks = timeline["ranks"]
    figure, axes = _figure(7.2, 1.4 + 0.62 * len(ranks))
    seen: dict[str, None] = {}
    for row, rank in enumerate(ranks):
        for phase, began, ended in rank["phases"]:
            seen[phase] = None
            axes.barh(row - 0.12, (ended - began) * 1e3, left=began * 1e3, height=0.42, color=_PHASE_COLOURS[phase])
        lanes = max(1, len(rank["buckets"]))
        height = 0.3 / lanes
        for lane, (_, began, ended) in enumerate(rank["buckets"]):
            axes.barh(
                row + 0.14 + height * (lane + 0.5), (ended - began) * 1e3, left=began * 1e3, height=height * 0.8,
                color=PART_COLOURS["exposed"],
            )  # fmt: skip
    axes.set_yticks(range(len(ranks)), [f"rank {rank['rank']}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds since the step began")
    handles = [Patch(color=_PHASE_COLOURS[phase], label=phase) for phase in _PHASE_COLOURS if phase in seen]
    if any(rank["buckets"] for rank in ranks):
        handles.append(Patch(color=PART_COLOURS["exposed"], label="bucket in flight"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize="small")
    return figure


def save_png(figure: Any, path: Path) -> None:
    """A picture for slides and mails."""
    figure.savefig(path, dpi=160, format="png")


def as_svg(figure: Any, name: str) -> str:
    """An `<svg>` element to stand in a page; the same figure gives the same text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # names of clip paths would clash in one page
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # It is as wide as the page lets it be.
    return re.sub(r'<svg ([^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)


def _figure(width: float, height: float, num_axes: int = 1) -> tuple[Any, Any]:
    # Without pyplot: nothing global is set, and nothing has to be closed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, num_axes, sharey=True)
    for each in axes if num_axes > 1 else [axes]:
        each.grid(color=GRID, linewidth=0.8)
        each.set_axisbelow(True)
        each.tick_params(colors=INK, length=3)
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color("#aab0b8")
        each.xaxis.label.set_color(INK)
        each.yaxis.label.set_color(INK)
    return figure, axes
