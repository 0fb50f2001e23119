"""What the benchmarks share: sides that take turns, spreads, tables, and the machine's description."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import optimizer as torch_optimizer

import evenstep

T = TypeVar("T")


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


@contextlib.contextmanager
def only_torchs_own() -> Iterator[None]:
    """Without the hooks by which evenstep marks the steps of all optimizers of a process."""
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


def alternate(sides: Iterable[str], rounds: int, measure: Callable[[str], T]) -> dict[str, list[T]]:
    """What is measured of each side, round by round.

    The order of the sides is reversed in every other round. One more round, the first, warms up and doesn't count.
    """
    found: dict[str, list[T]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in list(found) if number % 2 else list(found)[::-1]:
            one = measure(side)
            if number > 0:
                found[side].append(one)
    return found


def take_turns(
    steps: Mapping[str, Callable[[], object]],
    world: evenstep.World,
    blocks: int,
    num_steps: int,
    around: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> dict[str, list[float]]:
    """On a rank: time several sides of the same training, in blocks of equally many steps that take turns.

    A block is timed from barrier to barrier, on the slowest rank: what a side puts off until later counts.

    Args:
        steps: By side, what makes a step.
        world: Of the ranks.
        blocks: Of each side; one more, the first, warms up.
        num_steps: Of a block.
        around: Surrounds a block of a side.

    Returns:
        By side, seconds of a step in each block.
    """

    def block_of(side: str) -> float:
        with around(side):
            synchronise(world.device)
            world.barrier()
            started = time.perf_counter()
            for _ in range(num_steps):
                steps[side]()
            synchronise(world.device)
            world.barrier()
            return (time.perf_counter() - started) / num_steps

    seconds = alternate(steps, blocks, block_of)
    return {side: world.gather(torch.tensor([each])).amax(0).tolist() for side, each in seconds.items()}


def steps_within(step: Callable[[], object], seconds: float, world: evenstep.World) -> int:
    """On a rank: how many steps take about so long, at least 3; the same on all ranks."""
    synchronise(world.device)
    world.barrier()
    started = time.perf_counter()
    for _ in range(5):
        step()
    synchronise(world.device)
    return int(world.broadcast_object(max(3, round(seconds / ((time.perf_counter() - started) / 5)))))


def seconds_a_step(step: Callable[[], object], num_steps: int, warmup: int = 5) -> float:
    """Of so many steps, behind some that warm up."""
    for number in range(-warmup, num_steps):
        if number == 0:
            began = time.perf_counter()
        step()
    return (time.perf_counter() - began) / num_steps


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


def markdown(columns: str, rows: Iterable[Sequence[object]], num_words: int = 1) -> str:
    """A table for people, and for the documentation; the first columns have words, the others numbers. Pure.

    Args:
        columns: Their titles, with | between them.
        rows: Cells, as they are shown.
        num_words: Columns of words.
    """
    num_columns = columns.count("|") + 1
    lines = [f"| {columns} |", "| " + " | ".join(["---"] * num_words + ["---:"] * (num_columns - num_words)) + " |"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, whose docstring is its help; `--json` names the file of `write_json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser


def write_json(path: Path | None, **found: Any) -> None:
    """Write a result with the machine's description, whole or not at all; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.part")
        beside.write_text(json.dumps({"machine": describe_machine(), **found}, indent=1))
        beside.replace(path)


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
