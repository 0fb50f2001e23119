"""Staleness, drawn: how many gradients were applied how many updates late."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep import checks
from evenstep.errors import ConfigurationError

_WHO = "evenstep.parameter_servers.staleness.plot: "


def plot(staleness: Mapping[int, Any], path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Draw a histogram, or one for each worker.

    Args:
        staleness: What `ps.staleness()` returns, or `ps.staleness(by_worker=True)`.
        path: The picture, as matplotlib knows its ending: .png, .svg, .pdf.
        title: Above it.

    Returns:
        The path.

    Raises:
        ConfigurationError: matplotlib isn't installed, or this is no such histogram.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(f"{_WHO}matplotlib is missing: pip install 'evenstep[bench]'.")
    if not isinstance(staleness, Mapping):
        raise checks.refuse(f"{_WHO}staleness", staleness, "what ps.staleness() returns")
    from matplotlib.figure import Figure  # an extra

    by_worker = any(isinstance(value, Mapping) for value in staleness.values())
    workers: dict[str, Mapping[int, int]] = {"": staleness}
    if by_worker:
        workers = {f"worker {number}": counts for number, counts in sorted(staleness.items())}
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / max(1, len(workers))
    for index, (label, counts) in enumerate(workers.items()):
        shift = (index - (len(workers) - 1) / 2) * width
        axes.bar([late + shift for late in counts], list(counts.values()), width=width, label=label)
    axes.set_xlabel("updates between a gradient's parameters and its own update")
    axes.set_ylabel("gradients")
    axes.set_title(title)
    if by_worker:
        axes.legend()
    figure.savefig(os.fspath(path))
    return Path(path)
