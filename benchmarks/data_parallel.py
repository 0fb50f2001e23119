"""Two CPU replicas side by side, against one replica with one thread and one with two, in one run.

    python benchmarks/data_parallel.py
    python benchmarks/data_parallel.py --replicas 4 --width 2048 --json result.json

A step is forward, backward and an SGD step of a chain of square layers. Blocks of steps take turns, so that whatever
else the machine does meets all three. The ratio of neighbouring blocks is one observation; the table has their median
with the quartiles. "replicas" has as many threads in all as "one, all threads".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measuring import describe_machine, ratios, spread
from torch import nn

import evenstep

TARGETS = {"one, one thread": 1.5, "one, all threads": 0.95}


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        replicas: Number of replicas, and of threads in all.
        width: Of the square layers.
        layers: How many.
        rows: Of a batch.
        steps: In a block.
        blocks: Of each kind.
    """

    replicas: int
    width: int
    layers: int
    rows: int
    steps: int
    blocks: int


@dataclass(frozen=True)
class Result:
    """Times are medians over blocks, in milliseconds per step.

    Attributes:
        step_ms: By kind.
        times_as_fast: The replicas, against each of the others: lower quartile, median, upper quartile.
    """

    step_ms: dict[str, float]
    times_as_fast: dict[str, list[float]]


def measure(setting: Setting) -> Result:
    """All three, in turns."""
    kinds = {
        "replicas": (setting.replicas, setting.replicas),
        "one, one thread": (1, 1),
        "one, all threads": (1, setting.replicas),
    }
    x = torch.randn(setting.rows, setting.width)
    steps = {name: build_step(setting, x, replicas) for name, (replicas, _) in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    before = torch.get_num_threads()
    try:
        for block in range(setting.blocks + 1):
            for name, (_, threads) in kinds.items():
                torch.set_num_threads(threads)
                started = time.perf_counter()
                for _ in range(setting.steps):
                    steps[name]()
                took = (time.perf_counter() - started) / setting.steps
                if block > 0:  # the first one warms up
                    seconds[name].append(took)
    finally:
        torch.set_num_threads(before)
    return Result(
        step_ms={name: statistics.median(each) * 1e3 for name, each in seconds.items()},
        times_as_fast={name: ratios(seconds[name], seconds["replicas"]) for name in TARGETS},
    )


def build_step(setting: Setting, x: torch.Tensor, num_replicas: int):
    """A training step of a model of its own."""
    layers = [[nn.Linear(setting.width, setting.width), nn.GELU()] for _ in range(setting.layers)]
    net = nn.Sequential(*(part for layer in layers for part in layer))
    model = evenstep.DataParallel(net, device_ids=["cpu"] * num_replicas)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        model.loss(nn.functional.mse_loss, x, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def table(setting: Setting, result: Result) -> str:
    """For people, and for the documentation. Pure."""
    lines = [
        f"{setting.layers} layers of {setting.width} x {setting.width}, {setting.rows} rows, "
        f"{setting.replicas} replicas",
        "",
        "| | step, ms | the replicas are so many times as fast | to reach |",
        "| --- | ---: | ---: | ---: |",
        f"| replicas | {result.step_ms['replicas']:,.1f} | | |",
    ]
    for name, target in TARGETS.items():
        times = result.times_as_fast[name]
        lines.append(f"| {name} | {result.step_ms[name]:,.1f} | {spread(times)} | {target} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, default=2, help="replicas, and threads in all")
    parser.add_argument("--width", type=int, default=1024, help="of the square layers")
    parser.add_argument("--layers", type=int, default=4, help="how many")
    parser.add_argument("--rows", type=int, default=512, help="of a batch")
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--blocks", type=int, default=11, help="of each kind")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = vars(parser.parse_args())
    path = arguments.pop("json")
    setting = Setting(**arguments)
    machine = describe_machine()
    result = measure(setting)
    print(f"{machine}\n\n{table(setting, result)}")
    if path is not None:
        whole = {"machine": machine, "setting": asdict(setting), "targets": TARGETS, **asdict(result)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
