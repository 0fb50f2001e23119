"""Reading 2 GiB of records, shuffled, in little memory: how fast against reading them in order, and how much memory.

    python benchmarks/records.py                             # writes build/records.bin and .jsonl, 2 GiB each
    python benchmarks/records.py --mib 64 --json result.json
    python benchmarks/records.py --cold --only 16k:0 --only jsonl:2
    make bench-records                                       # the first, into build/records.json

Each kind of pass has a process of its own, with 0 or 2 workers: epochs through `evenstep.DataLoader(shards=...)`, in
order and shuffled with `locality`, take turns. *Warm*: the file is in the page cache, so that only the reader is
measured; *cold*: it was dropped from there before. *RssAnon* is what the rank and its workers hold together, at most,
above what each of these processes held before it began to read; sampled every 20 ms. Windows of `locality` have 16 MiB,
whatever the size of a record, and batches 256 KiB or 1 MiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import describe_machine, quartiles, ratios, spread

import evenstep

RECORD_BYTES = 1024


class Kind(NamedTuple):
    """How a file is read.

    Attributes:
        title: For people.
        record_bytes: Size of a record; None: lines of JSON.
        global_batch_size: Records of a batch.
        locality: The loader's.
    """

    title: str
    record_bytes: int | None
    global_batch_size: int
    locality: tuple[int, int]


KINDS = {
    "1k": Kind("1 KiB each", RECORD_BYTES, 256, (1024, 16)),
    "16k": Kind("16 KiB each", 16 * RECORD_BYTES, 64, (64, 16)),
    "jsonl": Kind("lines of JSON", None, 256, (1024, 16)),
}
PASSES = [(kind, num_workers) for kind in KINDS for num_workers in (0, 2)]


def write_files(directory: Path, num_bytes: int) -> dict[str, Path]:
    """Random records, and lines of JSON, unless they are there already."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {"bytes": directory / "records.bin", "jsonl": directory / "records.jsonl"}
    if not paths["bytes"].exists() or paths["bytes"].stat().st_size != num_bytes:
        with paths["bytes"].open("wb") as file:
            for _ in range(num_bytes >> 20):
                file.write(os.urandom(1 << 20))
    if not paths["jsonl"].exists() or not 0 <= paths["jsonl"].stat().st_size - num_bytes < 1 << 20:
        with paths["jsonl"].open("w") as file:
            number = written = 0
            while written < num_bytes:
                line = json.dumps({"number": number, "text": "lorem ipsum " * (20 + number * 7919 % 130)}) + "\n"
                written += file.write(line)
                number += 1
    return paths


def drop_from_cache(path: Path) -> None:
    """Let the system forget the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def anonymous_bytes(pid: int | str) -> int:
    """RssAnon of a process; 0 if it has gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


class Watch:
    """Samples the memory of this process and its children."""

    def __init__(self, baseline: int) -> None:
        self.baseline = baseline
        self.excess = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        own = os.getpid()
        while not self._ended.wait(0.02):
            tasks = Path(f"/proc/{own}/task").glob("*/children")
            children = [pid for path in tasks for pid in path.read_text().split()]
            # A forked worker begins with what the rank held: the baseline is every process's own.
            held = [anonymous_bytes(pid) for pid in (own, *children)]
            self.excess = max(self.excess, sum(each - self.baseline for each in held if each))

    def end(self) -> int:
        """Bytes above the baselines, all processes together, at most."""
        self._ended.set()
        self._thread.join()
        return self.excess


def one_pass(path: Path, kind: Kind, num_workers: int, is_shuffled: bool, baseline: int) -> tuple[float, int]:
    """An epoch: seconds, and bytes above the baseline."""
    watch = Watch(baseline)
    try:
        loader = evenstep.DataLoader(
            shards=evenstep.Records(path, record_bytes=kind.record_bytes),
            global_batch_size=kind.global_batch_size,
            shuffle=is_shuffled,
            locality=kind.locality if is_shuffled else None,
            num_workers=num_workers,
            world=evenstep.World.alone(device="cpu"),
        )
        started = time.perf_counter()
        num_samples = 0
        for batch in loader:
            num_samples += len(batch["number"]) if kind.record_bytes is None else len(batch)
        took = time.perf_counter() - started
        assert num_samples == len(loader.dataset)
    finally:
        excess = watch.end()
    return took, excess


def all_passes(path: Path, kind: str, num_workers: int, is_cold: bool, num_turns: int, connection: Any) -> None:
    """In a process of its own: passes in order and shuffled take turns."""
    torch.set_num_threads(1)
    baseline = anonymous_bytes("self")
    passes = []
    for turn in range(num_turns + 1):
        for is_shuffled in (False, True):
            if is_cold:
                drop_from_cache(path)
            passes.append((turn, is_shuffled, *one_pass(path, KINDS[kind], num_workers, is_shuffled, baseline)))
    connection.send(passes)


def measure(
    paths: dict[str, Path], wanted: list[tuple[str, int]], caches: list[bool], num_turns: int
) -> list[dict[str, Any]]:
    """All passes; the first turn of each warms up."""
    rows = []
    context = multiprocessing.get_context("spawn")
    for is_cold in caches:
        for kind, num_workers in wanted:
            path = paths["jsonl" if kind == "jsonl" else "bytes"]
            ours, theirs = context.Pipe(duplex=False)
            given = (path, kind, num_workers, is_cold, num_turns, theirs)
            process = context.Process(target=all_passes, args=given)
            process.start()
            theirs.close()
            passes = ours.recv()
            process.join()
            seconds = {each: [p[2] for p in passes if p[0] and p[1] is each] for each in (False, True)}
            memory = {each: max(p[3] for p in passes if p[1] is each) for each in (False, True)}
            speeds = {each: path.stat().st_size / 2**20 / quartiles(seconds[each])[1] for each in seconds}
            rows.append(
                {
                    "records": KINDS[kind].title,
                    "num_workers": num_workers,
                    "cache": "cold" if is_cold else "warm",
                    "in_order_mib_per_s": speeds[False],
                    "shuffled_mib_per_s": speeds[True],
                    "speed_kept": ratios(seconds[False], seconds[True]),
                    "in_order_excess_bytes": memory[False],
                    "shuffled_excess_bytes": memory[True],
                }
            )
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """For people. Pure."""
    lines = [
        "| records | workers | page cache | in order, MiB/s | shuffled, MiB/s | shuffled/in order | RssAnon, MiB |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        speeds = f"{row['in_order_mib_per_s']:,.0f} | {row['shuffled_mib_per_s']:,.0f} | {spread(row['speed_kept'])}"
        where = f"| {row['records']} | {row['num_workers']} | {row['cache']} |"
        lines.append(f"{where} {speeds} | {row['shuffled_excess_bytes'] / 2**20:,.0f} |")
    return "\n".join(lines)


def _pass(text: str) -> tuple[str, int]:
    found = next((each for each in PASSES if f"{each[0]}:{each[1]}" == text), None)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(f'{k}:{n}' for k, n in PASSES)}")
    return found


def main() -> None:
    """Write the files, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=2048, help="size of each file")
    parser.add_argument("--turns", type=int, default=3, help="turns per pass")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="where the files are written")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--only", action="append", type=_pass, help="1k:0, 1k:2, 16k:0, ... jsonl:2; repeat it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--warm", action="store_true", help="only with the file in the page cache")
    which.add_argument("--cold", action="store_true", help="only with the file dropped from there")
    arguments = parser.parse_args()
    caches = [is_cold for is_cold in (False, True) if not (arguments.warm if is_cold else arguments.cold)]
    paths = write_files(arguments.directory, arguments.mib << 20)
    try:
        rows = measure(paths, arguments.only or PASSES, caches, arguments.turns)
    finally:
        if not arguments.keep:
            for path in paths.values():
                path.unlink()
    machine = describe_machine()
    print(f"{machine}\n\n{table(rows)}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
