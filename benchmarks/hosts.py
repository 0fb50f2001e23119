"""All-reduce over two nodes of two ranks: shared memory and Gloo together, against Gloo alone.

    python benchmarks/hosts.py                       # two network namespaces, 1 Gbit/s between them; needs root

The nodes are network namespaces with process numbers of their own, so that ranks of different ones can't share memory;
`tc tbf` slows what each sends. Both sides take turns in every repetition; a time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import alternate, describe_machine, markdown, parser_of, ratios, spread, write_json

from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
from evenstep.transport.factory import open_transports

sys.path.append(str(Path(__file__).parents[1]))  # where `tests` is, also when this runs from elsewhere
from tests.namespaces import Namespaces

SIZES = [64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]


def measure_on_rank(repeats: int) -> dict[str, dict[str, list[float]]]:
    """On every rank: seconds of each side and size, repetition by repetition, of the slowest rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    sides: dict[str, Transport] = {
        "evenstep": open_transports(None, cpu, timeout_s=60).gradients,
        "gloo": open_transports("gloo", cpu, timeout_s=60).gradients,
    }
    assert sides["evenstep"].name == "shared memory + gloo", sides["evenstep"]
    result: dict[str, dict[str, list[float]]] = {}
    for size in SIZES:
        num_calls = max(1, min(50, (4 << 20) // size))
        tensors = {
            name: transport.allocate(size // 4, dtype=torch.float32, device=cpu) for name, transport in sides.items()
        }

        def one(name: str, num_calls: int = num_calls, tensor: Any = tensors) -> float:
            sides[name].barrier().wait()
            started = time.perf_counter()
            for _ in range(num_calls):
                sides[name].all_reduce(tensor[name]).wait()
            return max(exchange(sides["gloo"], (time.perf_counter() - started) / num_calls))

        result[str(size)] = alternate(sides, repeats, one)
    for transport in sides.values():
        transport.close()
    dist.destroy_process_group()
    return result


def run_on_hosts(hosts: Namespaces, ranks_per_host: int, *command: str) -> Any:
    """Start a program's ranks, and return what rank 0 has written: JSON, to the file behind `--as-rank`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rank0.json"
        arguments = ["--nproc-per-node", str(ranks_per_host), *command, "--as-rank", str(out)]
        started = [
            subprocess.Popen(
                hosts.evenstep_run(host, arguments),
                env={**os.environ, **hosts.environment(host), "OMP_NUM_THREADS": "1"},
            )
            for host in range(len(hosts.addresses))
        ]
        statuses = [process.wait() for process in started]
        if any(statuses) or not out.exists():
            raise SystemExit(f"ranks failed: {statuses}")
        return json.loads(out.read_text())


def table(measured: dict[str, dict[str, list[float]]]) -> str:
    """For people, and for the documentation. Pure."""
    rows = []
    for size, seconds in measured.items():
        times = [f"{statistics.median(seconds[name]) * 1e6:,.0f}" for name in ("gloo", "evenstep")]
        rows.append([f"{int(size):,}", *times, spread(ratios(seconds["gloo"], seconds["evenstep"]))])
    return markdown("bytes | Gloo, us | evenstep, us | times faster", rows)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--rate-mbit", type=float, default=1000.0, help="of each node's wire")
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15, help="of each side and size")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank is not None:
        measured = measure_on_rank(arguments.repeats)
        if os.environ["RANK"] == "0":
            arguments.as_rank.write_text(json.dumps(measured))
        return
    print(describe_machine())
    with Namespaces(2, rate_mbit=arguments.rate_mbit) as hosts:
        measured = run_on_hosts(hosts, arguments.ranks_per_host, __file__, "--repeats", str(arguments.repeats))
    print(f"\n2 hosts of {arguments.ranks_per_host} ranks, {arguments.rate_mbit:g} Mbit/s\n\n{table(measured)}")
    write_json(arguments.json, seconds=measured)


if __name__ == "__main__":
    main()
