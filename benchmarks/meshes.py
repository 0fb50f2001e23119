"""What evenstep adds to a step of torch's FSDP2, and what its backend takes off it.

    python benchmarks/meshes.py                      # 2 CPU ranks, the GPT
    python benchmarks/meshes.py --ranks 4 --models GPT --json result.json

Four sides of the same training take turns within one run, in blocks of equally many steps:

    bare       the module itself, whole on each rank: nothing is exchanged
    gloo       torch's fully_shard over Gloo
    plain      torch's fully_shard over the backend "evenstep"
    attached   the same under evenstep.attach, with model.backward(loss, weight=)

Each of the model's parts is sharded by itself (for the GPT its layers). A block is timed from barrier to barrier, on
the slowest rank. Ratios and differences are of neighbouring blocks; the tables have medians with quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import describe_machine, quartiles
from models import CASES, Case, shard_parts

import evenstep

SIDES = ("bare", "gloo", "plain", "attached")


def build_step(case: Case, side: str, world: evenstep.World, gloo: dist.ProcessGroup) -> Callable[[], None]:
    """One side's training step, on a model of its own."""
    from torch.distributed.device_mesh import DeviceMesh

    torch.manual_seed(0)
    module = case.build()
    x, y = case.draw()
    if side != "bare":
        assert world.mesh is not None
        over_gloo = DeviceMesh.from_group(gloo, "cpu", mesh_dim_names=("shard",))
        shard_parts(module, over_gloo if side == "gloo" else world.mesh)
    model = evenstep.attach(module, world) if side == "attached" else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = case.loss(model(x), y)
        if side == "attached":
            model.backward(loss, weight=len(x))
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, blocks: int, block_s: float) -> dict[str, list[float]]:
    """On a rank: seconds per step of each side, block by block, on the slowest rank."""
    torch.set_num_threads(1)  # a rank that is alone would have all cores
    with evenstep.init(quiet=True, mesh={"shard": -1}) as world:
        gloo = dist.new_group(backend="gloo")
        steps = {side: build_step(CASES[name], side, world, gloo) for side in SIDES}
        for step in steps.values():
            for _ in range(5):
                step()
        world.barrier()
        started = time.perf_counter()
        for _ in range(5):
            steps["plain"]()
        num_steps = int(world.broadcast_object(max(3, round(block_s / ((time.perf_counter() - started) / 5)))))
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for block in range(blocks + 1):
            for side in SIDES if block % 2 else SIDES[::-1]:
                world.barrier()
                started = time.perf_counter()
                for _ in range(num_steps):
                    steps[side]()
                world.barrier()
                if block > 0:  # the first one warms up
                    seconds[side].append((time.perf_counter() - started) / num_steps)
        return {side: world.gather(torch.tensor([each])).amax(0).tolist() for side, each in seconds.items()}


def summarise(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Quartiles: milliseconds per step, and what neighbouring blocks say of one side beside another. Pure."""
    found = {f"{side}, ms": quartiles([each * 1e3 for each in values]) for side, values in seconds.items()}
    pairs = list(zip(seconds["attached"], seconds["plain"], strict=True))
    found["attached adds to plain, us"] = quartiles([(one - other) * 1e6 for one, other in pairs])
    found["attached over plain"] = quartiles([one / other for one, other in pairs])
    found["gloo over plain"] = quartiles([a / b for a, b in zip(seconds["gloo"], seconds["plain"], strict=True)])
    found["gloo over attached"] = quartiles([a / b for a, b in zip(seconds["gloo"], seconds["attached"], strict=True)])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=["GPT"])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block-seconds", type=float, default=0.4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe_machine())
    results = {}
    for name in options.models:
        seconds = evenstep.launch(measure, options.ranks, args=(name, options.blocks, options.block_seconds))
        results[name] = {"seconds": seconds, "summary": summarise(seconds)}
        print(f"\n{name}, {options.ranks} ranks")
        for what, (low, middle, high) in results[name]["summary"].items():
            print(f"  {what:28} {middle:10.3f}  ({low:.3f} to {high:.3f})")
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
