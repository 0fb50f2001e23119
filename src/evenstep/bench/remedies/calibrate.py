"""What exchanges and optimizers cost here, apart from the script.

`python -m evenstep.bench.remedies.calibrate REQUEST` is one rank of it.

All ranks of a run measure at the same time, with as many threads as the script's, on tensors of the sizes of its
gradients and parameters. Sides take turns; what is kept is the ratio of each remedy to what the script does now.
REQUEST is a file of JSON: `bucket_bytes`, `shapes`, `optimizer`, `optimizer_options`, `changes`, `out`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import evenstep.transport.backend.backend  # noqa: F401 - registers the backend
from evenstep.bench.measure.scaling import Spread

_ROUNDS = 11
_MOST_BYTES = 1 << 30  # of all gradients: more would take too much memory beside the script's own figures
_SECONDS = 20.0
_BLOCK_S = 0.03
_MOST_REPEATS = 200
_OPTIONS = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "amsgrad", "eps")


def ratios_of(seconds: Mapping[str, list[float]], base: str) -> dict[str, list[float]]:
    """Of each side but the base, round by round, its time over that of the base. Pure."""
    return {
        side: [its / others for its, others in zip(times, seconds[base], strict=True)]
        for side, times in seconds.items()
        if side != base
    }


def read_costs(found: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, Spread]]:
    """By change and by what it does: ratios with quartiles. Pure."""
    return {change: {what: Spread.of(each) for what, each in ratios.items()} for change, ratios in found.items()}


def repeats_of(seconds: float) -> int:
    """How often something is done between two looks at the clock, if once takes so long. Pure."""
    return max(1, min(_MOST_REPEATS, round(_BLOCK_S / max(seconds, 1e-9))))


def _in_turn(sides: Mapping[str, Callable[[], object]], group: Any) -> dict[str, list[float]]:
    """Seconds of each side by round, measured in blocks."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    repeats = dict.fromkeys(sides, 1)
    began = time.perf_counter()
    for number in range(_ROUNDS + 2):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            # Ranks leave a barrier one after the other, by as much as a small exchange takes: so blocks are timed.
            dist.barrier(group)
            started = time.perf_counter()
            for _ in range(repeats[name]):
                sides[name]()
            once_s = (time.perf_counter() - started) / repeats[name]
            if number > 1:  # the first one warms up, the second one says how long a side takes
                seconds[name].append(once_s)
            elif number == 1:
                repeats[name] = repeats_of(_agreed(once_s, group))
        if number >= 4 and _agreed(time.perf_counter() - began, group) > _SECONDS:
            break
    return seconds


def _agreed(seconds: float, group: Any) -> float:
    """The longest time of all ranks, so that all do the same. Collective."""
    longest = torch.tensor(seconds, device="cpu", dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    return float(longest)


def measure_exchange(bucket_bytes: list[int], changes: list[str]) -> dict[str, dict[str, list[float]]]:
    """All-reduce of the script's buckets over Gloo, over ours, and over Gloo in 16 bits."""
    gloo: Any = dist.group.WORLD
    ours = dist.new_group(backend="evenstep")
    sizes = [max(1, size // 4) for size in bucket_bytes]
    buckets = [torch.ones(size, device="cpu") for size in sizes]
    halves = [torch.ones(size, dtype=torch.float16, device="cpu") for size in sizes]

    def exchange(group: Any) -> Callable[[], object]:
        def run() -> None:
            works = [dist.all_reduce(each, group=group, async_op=True) for each in buckets]
            for work in works:
                if work is not None:
                    work.wait()
            for each in buckets:
                each.fill_(1.0)

        return run

    def in_16_bits() -> None:
        for bucket, half in zip(buckets, halves, strict=True):
            half.copy_(bucket)
            dist.all_reduce(half, group=gloo)
            bucket.copy_(half)

    sides: dict[str, Callable[[], object]] = {"gloo": exchange(gloo), "ours": exchange(ours)}
    if "16-bit" in changes:
        sides["16-bit"] = in_16_bits
    found = ratios_of(_in_turn(sides, gloo), "gloo")
    result = {name: {"exchange": found["ours"]} for name in ("backend", "wrapper", "sharded")}
    if "16-bit" in found:
        result["16-bit"] = {"exchange": found["16-bit"]}
    return result


def measure_optimizer(
    shapes: list[list[int]], kind: str, options: Mapping[str, Any], changes: list[str], world_size: int
) -> dict[str, dict[str, list[float]]]:
    """A step of the script's optimizer, of its fused form, and of a rank's share of one that is divided."""
    make: Any = getattr(torch.optim, kind)
    given = {name: value for name, value in options.items() if name in _OPTIONS and value is not None}

    def stepping(sizes: list[list[int]], **more: Any) -> Callable[[], object]:
        parameters = [torch.nn.Parameter(torch.zeros(size, device="cpu")) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        return make(parameters, **given, **more).step  # type: ignore[no-any-return]

    now = {"fused": True} if options.get("fused") else {}
    sides = {"now": stepping(shapes, **now)}
    can_fuse = "fused" in changes or bool(now)
    if "fused" in changes:
        sides["fused"] = stepping(shapes, fused=True)
    if "sharded" in changes:
        share = -(-sum(torch.Size(size).numel() for size in shapes) // world_size)
        fastest = {"fused": True} if can_fuse or kind in ("SGD", "Adam", "AdamW", "Adagrad") else {}
        sides["sharded"] = stepping([[share]], **fastest)
    found = ratios_of(_in_turn(sides, dist.group.WORLD), "now")
    return {name: {"optimizer": each} for name, each in found.items()}


def main(arguments: list[str]) -> None:
    """Measure, and leave rank 0's ratios."""
    (file,) = arguments
    asked = json.loads(Path(file).read_text())
    dist.init_process_group("gloo")
    changes = asked["changes"]
    found: dict[str, dict[str, list[float]]] = {}
    try:
        parts = []
        if asked["bucket_bytes"] and sum(asked["bucket_bytes"]) <= _MOST_BYTES:
            parts.append(measure_exchange(asked["bucket_bytes"], changes))
        num_bytes = 4 * sum(torch.Size(size).numel() for size in asked["shapes"])
        if asked["optimizer"] and {"fused", "sharded"} & set(changes) and num_bytes <= _MOST_BYTES:
            parts.append(
                measure_optimizer(
                    asked["shapes"], asked["optimizer"], asked["optimizer_options"], changes, dist.get_world_size()
                )
            )
        for part in parts:
            for change, ratios in part.items():
                found.setdefault(change, {}).update(ratios)
        if dist.get_rank() == 0:
            Path(asked["out"]).write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
