"""What the benchmarks share: how spread is told, and what machine it was."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile. Pure."""
    if len(values) < 2:
        return list(values) * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Quartiles of the ratios of neighbouring observations. Pure."""
    return quartiles([a / b for a, b in zip(numerators, denominators, strict=True)])


def spread(three: Sequence[float], digits: int = 2) -> str:
    """1.52 (1.50 to 1.55): a median with its quartiles. Pure."""
    low, middle, high = (f"{value:.{digits}f}" for value in three)
    return f"{middle} ({low} to {high})"


def describe_machine() -> dict[str, object]:
    """What the figures belong to."""
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_1_min": os.getloadavg()[0],
    }
