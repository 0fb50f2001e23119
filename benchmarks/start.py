"""How long ranks take to start: `evenstep run` beside torchrun, and what the imports take.

    python benchmarks/start.py
    python benchmarks/start.py --ranks 4 --rounds 11 --json build/start.json

A start is the time from the command to the moment at which the last rank is past its first barrier; *whole* is the
time until the command has ended. The script makes nothing but a process group and a barrier. *torchrun* and *evenstep
run* start the same script, with torch's own `init_process_group` over Gloo; *evenstep.init* is that script with
evenstep's in its place. Processor time is that of the launcher and all its ranks. The sides take turns; the ratio of
neighbours is one observation. Imports are timed in fresh interpreters, in processor time, and their memory is the
resident size.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from measuring import alternate, describe_machine, markdown, parser_of, ratios, spread, write_json

TORCHS = """
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(repr(time.time()))
dist.destroy_process_group()
"""
OURS = """
import sys, time
import evenstep
with evenstep.init(device="cpu", quiet=True) as world:
    world.barrier()
    open(f"{sys.argv[1]}/{world.rank}", "w").write(repr(time.time()))
"""
REFERENCE = "torchrun"
IMPORTED = """
import resource, sys, time
began = time.process_time()
__import__(sys.argv[1])
took = time.process_time() - began
pages = int(open("/proc/self/statm").read().split()[1])
print(took, pages * resource.getpagesize() / 2**20)
"""


@dataclass(frozen=True)
class Start:
    """One start of all ranks, in seconds.

    Attributes:
        start_s: From the command to the moment at which the last rank is past its barrier.
        whole_s: From the command to its end.
        cpu_s: Processor time of the launcher and its ranks.
    """

    start_s: float
    whole_s: float
    cpu_s: float


def commands(num_ranks: int, folder: Path) -> dict[str, list[str]]:
    """What starts the ranks, by side. Writes the two scripts."""
    (torchs := folder / "torchs.py").write_text(TORCHS)
    (ours := folder / "ours.py").write_text(OURS)
    run = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", str(num_ranks)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return {
        REFERENCE: [*torchrun, str(torchs)],
        "evenstep run": [*run, str(torchs)],
        "evenstep run, evenstep.init": [*run, str(ours)],
    }


def start_once(command: list[str], num_ranks: int) -> Start:
    """Start the ranks, and wait for their end.

    Raises:
        SystemExit: They failed, or one has not reached its barrier.
    """
    with tempfile.TemporaryDirectory() as reached:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.time()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run([*command, reached], env=environment, capture_output=True, text=True)
        whole = time.time() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times = [float(path.read_text()) for path in Path(reached).iterdir()]
    if ended.returncode != 0 or len(times) != num_ranks:
        raise SystemExit(f"{' '.join(command)}: status {ended.returncode}, {len(times)} ranks\n{ended.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(start_s=max(times) - began, whole_s=whole, cpu_s=cpu)


def time_import(module: str, repeats: int = 7) -> tuple[float, float]:
    """Processor seconds, the least of some runs, and MiB that are resident afterwards."""
    runs = [
        [float(word) for word in subprocess.check_output([sys.executable, "-c", IMPORTED, module], text=True).split()]
        for _ in range(repeats)
    ]
    return min(run[0] for run in runs), statistics.median(run[1] for run in runs)


def table(starts: dict[str, list[Start]]) -> str:
    """For people, and for the documentation. Pure."""
    rows = []
    reference = starts[REFERENCE]
    for side, runs in starts.items():
        columns = [statistics.median(getattr(run, name) for run in runs) for name in ("start_s", "whole_s", "cpu_s")]
        words = [f"{value:.2f}" for value in columns]
        for name in ("start_s", "whole_s"):
            times = ratios([getattr(run, name) for run in reference], [getattr(run, name) for run in runs])
            words.append("" if side == REFERENCE else spread(times))
        rows.append([side, *words])
    return markdown(" | start, s | whole, s | processor, s | start, times as fast | whole, times as fast", rows)


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="on this host")
    parser.add_argument("--rounds", type=int, default=9, help="starts of each side")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = commands(arguments.ranks, Path(folder))
        starts = alternate(sides, arguments.rounds, lambda side: start_once(sides[side], arguments.ranks))
    imports = {module: time_import(module) for module in ("torch", "evenstep")}
    print(f"{describe_machine()}\n\n{arguments.ranks} ranks\n\n{table(starts)}\n")
    for module, (took, memory) in imports.items():
        print(f"import {module}: {took:.2f} s of processor, {memory:,.0f} MiB")
    by_side = {side: [asdict(run) for run in runs] for side, runs in starts.items()}
    write_json(arguments.json, ranks=arguments.ranks, starts=by_side, imports=imports)


if __name__ == "__main__":
    main()
