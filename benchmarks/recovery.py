"""What a lost rank costs: from its death to the next whole step, restarted from disk, replaced, or left out.

    python benchmarks/recovery.py --json build/recovery.json

A multilayer perceptron with AdamW on two ranks, of 5 and of 500 MB of parameters. Rank 1 kills itself in the backward
pass of a step that isn't saved on disk. In turn: `--max-restarts 1` with a checkpoint on disk every five steps,
`--recover replace`, `--recover shrink`. Of each run: seconds from the death to the next step that is new, how many
steps were repeated until then, and where the time went:

    noticed    the other rank's exchange ends with an error; without recovery it may be stopped before that
    saved      it has left its world, and saved its state if it recovers
    started    the ranks run the script again: the launcher has seen all of them end, and has forked new ones
    joined     they have met
    resumed    model and optimizer are built, and have their state
    stepped    the first step that is new is finished

Then what `--recover` costs a step while nothing happens, by accounting: the time of its calls, over that of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import describe_machine

WAYS = {
    "restart": ["--max-restarts", "1"],
    "replace": ["--recover", "replace"],
    "shrink": ["--recover", "shrink"],
}
DIES_AT, ENDS_AT = 8, 11
TRAINS = """
import os, sys, time
import evenstep, torch
from torch import nn

width, depth = int(sys.argv[1]), int(sys.argv[2])
marks = [("started", time.monotonic())]
is_first = not os.path.exists("died")


def mark(name):
    marks.append((name, time.monotonic()))


def write():
    if os.environ["RANK"] == "0":
        with open("marks", "a") as file:
            file.writelines(f"{name} {at!r}\\n" for name, at in marks)


def train(world):
    mark("joined")
    net = nn.Sequential(nn.Linear(64, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 1))
    model = evenstep.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = evenstep.DataLoader(torch.randn(4096, 64), global_batch_size=16, shuffle=True)
    checkpoint = evenstep.Checkpointer(
        "saved", every_steps=5, every_minutes=None, model=model, optimizer=optimizer, loader=loader
    )
    checkpoint.resume()
    mark("resumed")
    if world.is_main:
        size = sum(p.nbytes for p in net.parameters())
        print(f"bytes {size}", flush=True)

    def die(_):
        if is_first and world.rank == 1 and checkpoint.num_steps == DIES_AT:
            with open("died", "w") as file:
                file.write(repr(time.monotonic()))
            os.kill(os.getpid(), 9)

    for epoch in loader.epochs(100):
        for x in loader:
            began = time.perf_counter()
            y = model(x)
            y.register_hook(die)
            model.backward(y.square().mean(), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            if checkpoint.num_steps == DIES_AT + 1:
                mark("stepped")
            if world.is_main:
                print(f"step {checkpoint.num_steps} {time.monotonic()!r} {time.perf_counter() - began!r}", flush=True)
            if checkpoint.num_steps == ENDS_AT:
                break
        if checkpoint.num_steps == ENDS_AT:
            break
    last_step = checkpoint._last_step
    if world.is_main and last_step is not None:
        times = []
        for _ in range(20):
            began = time.perf_counter()
            last_step.remember(ENDS_AT, {})
            last_step._exchange_begins()
            times.append(time.perf_counter() - began)
        print(f"calls {sorted(times)[10]!r}", flush=True)


try:
    with evenstep.init(seed=1, quiet=True) as world:
        try:
            train(world)
        except BaseException:
            mark("noticed")
            raise
finally:
    if is_first:
        mark("saved")
    write()
"""
PARTS = ("noticed", "saved", "started", "joined", "resumed", "stepped")


def run(way: str, width: int, depth: int) -> dict[str, float]:
    """One run of one way."""
    with tempfile.TemporaryDirectory(prefix="evenstep-bench-recovery-") as name:
        directory = Path(name)
        (directory / "tmp").mkdir()
        text = TRAINS.replace("DIES_AT", str(DIES_AT)).replace("ENDS_AT", str(ENDS_AT))
        (directory / "train.py").write_text(text)
        flags = ["--nproc-per-node", "2", "--device", "cpu", "--threads-per-rank", "1", *WAYS[way]]
        command = [sys.executable, "-m", "evenstep", "run", *flags, "train.py", str(width), str(depth)]
        env = {**os.environ, "TMPDIR": str(directory / "tmp")}
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        died_s = float((directory / "died").read_text())
        steps = [(int(n), float(at), float(took)) for n, at, took in re.findall(r"step (\d+) (\S+) (\S+)", done.stdout)]
        marks = [(name, float(at)) for name, at in map(str.split, (directory / "marks").read_text().splitlines())]
        reached = {name: at for name, at in marks if at > died_s}  # the last of each: of the ranks that went on
        parts = [died_s]
        for name in PARTS:  # without recovery the other rank may be stopped before it notices anything
            parts.append(reached.get(name, parts[-1]))
        numbers = [number for number, _, _ in steps]
        calls = re.search(r"calls (\S+)", done.stdout)
        return {
            "bytes": float(re.findall(r"bytes (\d+)", done.stdout)[0]),
            "lost_s": reached["stepped"] - died_s,
            **{name: end - begin for name, begin, end in zip(PARTS, parts, parts[1:], strict=False)},
            "repeated": len(numbers) - len(set(numbers)) + 1,
            "step_s": statistics.median(took for number, _, took in steps if number > 2),
            "calls_s": float(calls[1]) if calls is not None else 0.0,
        }


def main() -> None:
    """Print a table and write it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", default="5,500", help="MB of parameters")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shapes = {"5": (512, 4), "500": (4096, 7)}
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for size in args.sizes.split(","):
            for way in WAYS:
                found.setdefault(f"{size} MB, {way}", []).append(run(way, *shapes[size]))
    print(describe_machine())
    print(f"{'':18} {'lost s':>8} {'range':>14} {'repeated':>9}  " + " ".join(f"{part:>8}" for part in PARTS))
    for name, runs in found.items():
        lost = sorted(each["lost_s"] for each in runs)
        share = statistics.median(each["calls_s"] / each["step_s"] for each in runs)
        spread = f"{lost[0]:.2f} to {lost[-1]:.2f}"
        parts = " ".join(f"{statistics.median(each[part] for each in runs):8.2f}" for part in PARTS)
        accounted = f"  calls {share:.2%} of a step" if share else ""
        repeated = max(each["repeated"] for each in runs)
        print(f"{name:18} {statistics.median(lost):8.2f} {spread:>14} {repeated:9.0f}  {parts}{accounted}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": describe_machine(), "runs": found}, indent=1))


if __name__ == "__main__":
    main()
