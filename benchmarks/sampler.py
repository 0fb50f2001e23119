"""The order of an epoch and a loader's own time, against torch's `DistributedSampler` and `DataLoader`.

    python benchmarks/sampler.py                             # 10^5 to 10^9 samples; torch's as far as memory reaches
    python benchmarks/sampler.py --max-samples 1000000 --json result.json

*First index*: seconds until a new epoch's sampler has given its first index, and by how much that raised the process's
peak memory; each in a process of its own. *Index through a loader*: nanoseconds of CPU time per index over an epoch of
10^6 samples, in batches of 64, that cost nothing to load: torch's loader with torch's sampler, torch's loader with
ours, our loader, both with a script's own sampler; they take turns.
*Throughput*: samples a second of a data set of small samples, with torch's loader
and with ours, with 0, 1 and 2 workers. Ratios are of neighbouring turns: median, with quartiles.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import alternate, describe_machine, markdown, parser_of, ratios, spread, write_json
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

import evenstep

BYTES_PER_INDEX = 60  # of torch's sampler: a permutation, and a list of python's numbers
BATCH = 64


def bytes_of(file: str, field: str) -> int:
    """One of the kernel's figures on this process's or the machine's memory."""
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    return bytes_of("/proc/self/status", "VmHWM")


def first_index(kind: str, num_samples: int, connection: Any) -> None:
    """In a process of its own: seconds and bytes until the first index of rank 0 of 2."""
    make = {"torch": TorchDistributedSampler, "evenstep": evenstep.DistributedSampler}[kind]
    next(iter(make(range(1000), 2, 0)))  # what is imported or allocated once
    sampler = make(range(num_samples), 2, 0)
    before = peak_bytes()
    started = time.perf_counter()
    next(iter(sampler))
    connection.send((time.perf_counter() - started, peak_bytes() - before))


def measure_first_index(kind: str, num_samples: int) -> tuple[float, int] | None:
    """None where torch's would not fit into memory."""
    if kind == "torch" and num_samples * BYTES_PER_INDEX > bytes_of("/proc/meminfo", "MemAvailable") * 0.8:
        return None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=first_index, args=(kind, num_samples, theirs))
    process.start()
    theirs.close()
    seconds, num_bytes = ours.recv()
    process.join()
    return seconds, num_bytes


def first_indices(max_samples: int) -> list[dict[str, Any]]:
    """10^5 to `max_samples`, by factors of 10."""
    rows = []
    num_samples = 100_000
    while num_samples <= max_samples:
        row: dict[str, Any] = {"num_samples": num_samples}
        for kind in ("torch", "evenstep"):
            found = measure_first_index(kind, num_samples)
            row[f"{kind}_s"], row[f"{kind}_bytes"] = found if found is not None else (None, None)
        rows.append(row)
        num_samples *= 10
    return rows


def as_it_is(samples: list[int]) -> list[int]:
    """A collate function that costs nothing."""
    return samples


def run_through(loader: Any) -> float:
    """CPU seconds of an epoch."""
    started = time.process_time()
    for _ in loader:
        pass
    return time.process_time() - started


class Foreign(Sampler[int]):
    """A script's own sampler: shuffles by torch's stream."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.num_samples).tolist()

    def __len__(self) -> int:
        return self.num_samples


def per_index(num_samples: int, num_turns: int) -> dict[str, Any]:
    """Nanoseconds of CPU time per index, through a loader."""
    data = range(num_samples)
    world = evenstep.World.alone(device="cpu")
    torchs = TorchDistributedSampler(data, 1, 0)
    ours = evenstep.DistributedSampler(data, 1, 0)
    loaders: dict[str, Any] = {
        "torch": TorchDataLoader(data, batch_size=BATCH, sampler=torchs, collate_fn=as_it_is),
        "our_sampler": TorchDataLoader(data, batch_size=BATCH, sampler=ours, collate_fn=as_it_is),
        "our_loader": evenstep.DataLoader(data, BATCH, shuffle=True, collate_fn=as_it_is, world=world),
        "foreign_torch": TorchDataLoader(data, batch_size=BATCH, sampler=Foreign(num_samples), collate_fn=as_it_is),
        "foreign_ours": evenstep.DataLoader(
            data, BATCH, sampler=Foreign(num_samples), collate_fn=as_it_is, world=world
        ),
    }
    epochs = itertools.count()

    def one(name: str) -> float:
        ours.set_epoch(next(epochs))
        return run_through(loaders[name])

    seconds = alternate(loaders, num_turns, one)
    result: dict[str, Any] = {
        f"{name}_ns": statistics.median(each) / num_samples * 1e9 for name, each in seconds.items()
    }
    result["sampler_ratio"] = ratios(seconds["torch"], seconds["our_sampler"])
    result["foreign_ratio"] = ratios(seconds["foreign_torch"], seconds["foreign_ours"])
    result["loader_ratio"] = ratios(seconds["torch"], seconds["our_loader"])
    return result


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Small samples, one at a time."""

    def __init__(self, num_samples: int) -> None:
        self.x = torch.randn(num_samples, 16)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], index


def throughput(num_samples: int, num_turns: int) -> list[dict[str, Any]]:
    """Samples a second, by kind of data set and number of workers."""
    world = evenstep.World.alone(device="cpu")
    rows = []
    sets = {"one by one": Rows(num_samples), "tensors": TensorDataset(torch.randn(num_samples, 16))}
    for name, data in sets.items():
        for num_workers in (0, 1, 2):
            loaders = {
                "torch": TorchDataLoader(data, batch_size=BATCH, shuffle=True, num_workers=num_workers),
                "evenstep": evenstep.DataLoader(data, BATCH, shuffle=True, num_workers=num_workers, world=world),
            }
            seconds = alternate(loaders, num_turns, lambda name, loaders=loaders: wall(loaders[name]))
            rows.append(
                {
                    "data": name,
                    "num_workers": num_workers,
                    **{f"{kind}_per_s": num_samples / statistics.median(each) for kind, each in seconds.items()},
                    "ratio": ratios(seconds["torch"], seconds["evenstep"]),
                }
            )
    return rows


def wall(loader: Any) -> float:
    """Seconds of an epoch."""
    started = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - started


def tables(result: dict[str, Any]) -> str:
    """For people. Pure."""
    first = []
    for row in result["first_index"]:
        if row["torch_s"] is None:
            theirs, faster, memory = "does not fit", "", ""
        else:
            faster = f"{row['torch_s'] / row['evenstep_s']:,.0f}"
            theirs, memory = f"{row['torch_s']:.4f}", f"{row['torch_bytes'] / 2**20:,.1f}"
        ours = (f"{row['evenstep_s']:.4f}", faster, memory, f"{row['evenstep_bytes'] / 2**20:,.1f}")
        first.append([f"{row['num_samples']:,}", theirs, *ours])
    each = result["per_index"]
    speeds = []
    for row in result["throughput"]:
        both = [f"{row[f'{kind}_per_s']:,.0f}" for kind in ("torch", "evenstep")]
        speeds.append([row["data"], row["num_workers"], *both, spread(row["ratio"])])
    return f"""
{markdown("samples | torch, s | evenstep, s | times faster | torch, MiB | evenstep, MiB", first)}

An index through a loader: torch {each["torch_ns"]:.0f} ns, our sampler in torch's loader {each["our_sampler_ns"]:.0f}
(torch/ours {spread(each["sampler_ratio"])}), our loader {each["our_loader_ns"]:.0f} ({spread(each["loader_ratio"])}).
With a script's own sampler torch {each["foreign_torch_ns"]:.0f}, ours {each["foreign_ours_ns"]:.0f}
({spread(each["foreign_ratio"])}).

{markdown("data | workers | torch, samples/s | evenstep, samples/s | evenstep/torch", speeds)}"""


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--max-samples", type=int, default=10**9, help="largest data set")
    parser.add_argument("--epoch", type=int, default=10**6, help="samples of the epoch that is run through")
    parser.add_argument("--turns", type=int, default=7, help="turns per loader")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    result = {
        "first_index": first_indices(arguments.max_samples),
        "per_index": per_index(arguments.epoch, arguments.turns),
        "throughput": throughput(min(arguments.epoch, 100_000), arguments.turns),
    }
    print(describe_machine(), tables(result), sep="\n")
    write_json(arguments.json, **result)


if __name__ == "__main__":
    main()
