"""What evenstep adds to a step of torch's FSDP2, and what its backend takes off it.

    python benchmarks/meshes.py                      # 2 CPU ranks, the GPT
    python benchmarks/meshes.py --ranks 4 --models GPT --json result.json

Four sides of the same training take turns within one run, in blocks of equally many steps:

    bare       the module itself, whole on each rank: nothing is exchanged
    gloo       torch's fully_shard over Gloo
    plain      torch's fully_shard over the backend "evenstep"
    attached   the same under evenstep.attach, with model.backward(loss, weight=)

Each of the model's parts is sharded by itself (for the GPT its layers). A block is timed from barrier to barrier, on
the slowest rank. While others run than `attached`, torch's global optimizer hooks are taken off, through which evenstep
sees optimizers. Ratios and differences are of neighbouring blocks; the tables have medians with quartiles. At the end
some steps of each side are made once more, and the time within FSDP2's collectives is added up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import describe_machine, only_torchs_own, quartiles, ratios, spread, steps_within, take_turns
from models import CASES, Case, shard_parts

import evenstep
from evenstep.bench.measure.fsdp import ShardWatch
from evenstep.observe.patching import Patches

SIDES = ("bare", "gloo", "plain", "attached")
DIVIDED = SIDES[1:]
WATCHED_STEPS = 10


def build_step(
    case: Case, side: str, world: evenstep.World, gloo: dist.ProcessGroup
) -> tuple[torch.nn.Module, Callable[[], None]]:
    """One side's model, and its training step."""
    from torch.distributed.device_mesh import DeviceMesh

    torch.manual_seed(0)
    module = case.build()
    x, y = case.draw()
    if side != "bare":
        assert world.mesh is not None
        mesh = DeviceMesh.from_group(gloo, "cpu", mesh_dim_names=("shard",)) if side == "gloo" else world.mesh
        shard_parts(module, mesh)
    model: Any = evenstep.attach(module, world) if side == "attached" else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = case.loss(model(x), y)
        if side == "attached":
            model.backward(loss, weight=len(x))
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, step


def within_collectives(module: torch.nn.Module, step: Callable[[], None]) -> tuple[float, float]:
    """On a rank: seconds of a step within all-gathers, and within reduce-scatters, of a model that FSDP2 divides."""
    watch = ShardWatch([])
    with Patches() as patches:
        watch.install(patches)
        watch.attach(module)
        for _ in range(WATCHED_STEPS):
            step()
    blocks = watch.blocks(WATCHED_STEPS)
    return sum(gathering for _, gathering, _ in blocks), sum(scattering for *_, scattering in blocks)


def measure(name: str, blocks: int, block_s: float) -> dict[str, Any]:
    """On a rank: seconds per step of each side, block by block, on the slowest rank; and rank 0's in collectives."""
    torch.set_num_threads(1)  # a rank that is alone would have all cores
    with evenstep.init(quiet=True, mesh={"shard": -1}) as world:
        gloo = dist.new_group(backend="gloo")
        assert isinstance(gloo, dist.ProcessGroup)
        built = {side: build_step(CASES[name], side, world, gloo) for side in SIDES}
        steps = {side: step for side, (_, step) in built.items()}
        for step in steps.values():
            for _ in range(5):
                step()
        num_steps = steps_within(steps["plain"], block_s, world)

        def around(side: str) -> contextlib.AbstractContextManager[object]:
            return contextlib.nullcontext() if side == "attached" else only_torchs_own()

        seconds = take_turns(steps, world, blocks, num_steps, around)
        return {"seconds": seconds, "collectives": {side: within_collectives(*built[side]) for side in DIVIDED}}


def summarise(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Quartiles: milliseconds per step, and what neighbouring blocks say of one side beside another. Pure."""
    found = {f"{side}, ms": quartiles([each * 1e3 for each in values]) for side, values in seconds.items()}
    pairs = list(zip(seconds["attached"], seconds["plain"], strict=True))
    found["attached adds to plain, us"] = quartiles([(one - other) * 1e6 for one, other in pairs])
    found["attached over plain"] = ratios(seconds["attached"], seconds["plain"])
    found["gloo over plain"] = ratios(seconds["gloo"], seconds["plain"])
    found["gloo over attached"] = ratios(seconds["gloo"], seconds["attached"])
    return found


def table(name: str, num_ranks: int, measured: dict[str, Any]) -> str:
    """For people, and for the documentation. Pure."""
    lines = [f"{name}, {num_ranks} ranks", "", "| | median (quartiles) |", "| --- | ---: |"]
    lines += [f"| {what} | {spread(three, 3)} |" for what, three in summarise(measured["seconds"]).items()]
    lines += ["", "| of a step, ms | in all-gathers | in reduce-scatters |", "| --- | ---: | ---: |"]
    for side, (gathering, scattering) in measured["collectives"].items():
        lines.append(f"| {side} | {gathering * 1e3:.2f} | {scattering * 1e3:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=["GPT"])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block-seconds", type=float, default=0.4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = describe_machine()
    print(machine)
    results = {}
    for name in options.models:
        given = (name, options.blocks, options.block_seconds)
        measured = evenstep.launch(measure, options.ranks, args=given)
        results[name] = {**measured, "summary": summarise(measured["seconds"])}
        print(f"\n{table(name, options.ranks, measured)}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "ranks": options.ranks, "models": results}, indent=1))


if __name__ == "__main__":
    main()
