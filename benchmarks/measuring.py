"""What the benchmarks share: how spread is told, what machine it was, and ranks on several hosts."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evenstep.testing.namespaces import Namespaces


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


def run_on_hosts(hosts: Namespaces, ranks_per_host: int, script: str, arguments: Sequence[str]) -> Any:
    """Start the ranks of a benchmark, and return what its rank 0 has written: JSON, to the file behind `--as-rank`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rank0.json"
        command = ["--nproc-per-node", str(ranks_per_host), script, "--as-rank", str(out), *arguments]
        started = [
            subprocess.Popen(
                hosts.evenstep_run(host, command),
                env={**os.environ, **hosts.environment(host), "OMP_NUM_THREADS": "1"},
            )
            for host in range(len(hosts.addresses))
        ]
        statuses = [process.wait() for process in started]
        if any(statuses) or not out.exists():
            raise SystemExit(f"ranks failed: {statuses}")
        return json.loads(out.read_text())
