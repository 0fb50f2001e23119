"""What the benchmarks share: spreads, the machine's description, and ranks on several nodes."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # where `tests` is, also when a benchmark runs from elsewhere
from tests.namespaces import Namespaces


@dataclass(frozen=True)
class Device:
    """Where the ranks of a benchmark compute, and what carries their gradients.

    Attributes:
        name: As `evenstep.init(device=)` takes it.
        transport: As `evenstep.init(transport=)` takes it; None: the one that is chosen.
        label: How tables name it.
    """

    name: str
    transport: str | None
    label: str

    @property
    def is_cuda(self) -> bool:
        """Whether work is queued, and has to be awaited before a clock is read."""
        return self.name.startswith("cuda")


def choose_devices(requested: Sequence[str] | None, num_ranks: int, num_gpus: int) -> list[Device]:
    """Where so many ranks are measured. Pure.

    Args:
        requested: "cpu" and "cuda", or None for all that there are.
        num_ranks: Ranks, on this node.
        num_gpus: GPUs that torch can use.

    Raises:
        SystemExit: A GPU is requested, and there is none.
    """
    cpu = Device("cpu", None, "on the CPU, one thread each")
    if num_gpus == 0:
        if requested is not None and "cuda" in requested:
            raise SystemExit("--device cuda: this node has no GPU that torch can use.")
        return [cpu]
    if num_ranks <= num_gpus:
        cuda = Device("cuda", None if num_ranks == 1 else "nccl", "one GPU each, over NCCL" if num_ranks > 1 else "GPU")
    else:
        cuda = Device("cuda:0", None, "which share a GPU")
    return [each for each, name in ((cpu, "cpu"), (cuda, "cuda")) if requested is None or name in requested]


def synchronise(device: torch.device) -> None:
    """Return when all that was queued on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
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
