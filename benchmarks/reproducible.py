"""What reproducible mode costs: virtual ranks beside the ordinary step, and beside accumulation with the same
micro-batches.

    python benchmarks/reproducible.py                                   # 1, 2 and 4 ranks, virtual ranks 1, 4 and 8
    python benchmarks/reproducible.py --ranks 2 --models GPT --blocks 5 --json result.json

Three sides of the same training, on the same global batch:

    ordinary      one micro-batch per rank
    accumulated   `model.microbatches(batch, virtual_ranks / ranks)` in ordinary mode: the fair rival, whose kernels
    have the
                  same shapes
    virtual ranks         reproducible mode

Where the numbers of virtual ranks and ranks are equal, accumulation is the ordinary step. A process computes in one of
the two modes at a time, because the switches of torch are the process's; so modes take turns in blocks of equally many
steps, and between two blocks the switches are changed and not counted. Times are from barrier to barrier, on the
slowest rank; the table has medians of the ratios of neighbouring blocks, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import describe_machine, quartiles, ratios, spread
from models import CASES, Case

import evenstep
from evenstep import determinism
from evenstep.virtual_ranks import VirtualRanks

Step = Callable[[], None]
_COPIES = 8  # a global batch is that many batches of a case


def build_step(case: Case, world: evenstep.World, num_parts: int) -> Step:
    """One side's training step, on a model of its own, over this rank's share of the global batch."""
    torch.manual_seed(0)
    model = evenstep.DistributedDataParallel(case.build(), world=world)
    drawn = [case.draw() for _ in range(_COPIES // world.world_size)]
    batch = tuple(torch.cat(each) for each in zip(*drawn, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for x, y in model.microbatches(batch, num_parts):
            model.backward(case.loss(model(x), y), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()

    return step


class Mode:
    """One side, and the mode in which it computes."""

    def __init__(self, case: Case, world: evenstep.World, side: str, num_virtual_ranks: int) -> None:
        self.world, self.virtual_ranks = world, None
        if side == "virtual_ranks":
            self.virtual_ranks = VirtualRanks(num_virtual_ranks, world.rank, world.world_size, 0)
        num_parts = num_virtual_ranks // world.world_size if side == "accumulated" else 1
        undo = self.enter()
        self.step = build_step(case, world, num_parts)
        undo()

    def enter(self) -> Callable[[], None]:
        """Switch the mode on; returns what switches it off."""
        self.world.virtual_ranks = self.virtual_ranks
        undo: list[Callable[[], object]] = [lambda: setattr(self.world, "virtual_ranks", None)]
        if self.virtual_ranks is not None:
            assert self.world.transport_name in ("local", "shared memory")  # whose order is a tree
            undo.append(determinism.switch_on(self.world.device, threads=torch.get_num_threads()))

        def leave() -> None:
            for each in undo:
                each()

        return leave

    def timed(self, num_steps: int) -> float:
        """Seconds per step."""
        undo = self.enter()
        try:
            self.world.barrier()
            started = time.perf_counter()
            for _ in range(num_steps):
                self.step()
            self.world.barrier()
            return (time.perf_counter() - started) / num_steps
        finally:
            undo()


def measure(name: str, num_virtual_ranks: int, blocks: int, block_s: float) -> dict[str, list[float]]:
    """On a rank: seconds per step of each side, block by block."""
    world = evenstep.init(quiet=True)
    sides = (
        ["ordinary", "virtual_ranks"]
        if num_virtual_ranks == world.world_size
        else ["ordinary", "accumulated", "virtual_ranks"]
    )
    modes = {side: Mode(CASES[name], world, side, num_virtual_ranks) for side in sides}
    for mode in modes.values():
        mode.timed(3)
    num_steps = int(world.broadcast_object(max(2, round(block_s / modes["ordinary"].timed(3)))))
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(blocks + 1):
        for side in sides if block % 2 else sides[::-1]:
            took = modes[side].timed(num_steps)
            if block > 0:  # the first one warms up
                seconds[side].append(took)
    return {side: world.gather(torch.tensor([each])).amax(0).tolist() for side, each in seconds.items()}


def on_ranks(
    names: list[str], all_virtual_ranks: list[int], blocks: int, block_s: float
) -> dict[str, dict[str, list[float]]]:
    """On a rank: all models and numbers of virtual ranks that the ranks divide."""
    try:
        num_ranks = evenstep.init(quiet=True).world_size
        return {
            f"{name}, {num_virtual_ranks} virtual ranks": measure(name, num_virtual_ranks, blocks, block_s)
            for name in names
            for num_virtual_ranks in all_virtual_ranks
            if num_virtual_ranks % num_ranks == 0
        }
    finally:
        if dist.is_initialized():
            evenstep.init(quiet=True).close()


def summarise(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Quartiles of the ordinary step, and of the ratios of virtual ranks to it and to accumulation. Pure."""
    rival = seconds.get("accumulated", seconds["ordinary"])
    return {
        "ordinary_ms": quartiles([each * 1e3 for each in seconds["ordinary"]]),
        "times_ordinary": ratios(seconds["virtual_ranks"], seconds["ordinary"]),
        "times_accumulated": ratios(seconds["virtual_ranks"], rival),
    }


def table(num_ranks: int, results: dict[str, dict[str, list[float]]]) -> str:
    """For people, and for the documentation. Pure."""
    lines = [
        f"{num_ranks} rank{'s' if num_ranks > 1 else ''}, one thread each",
        "",
        "| model | ordinary step, ms | virtual ranks, times ordinary | virtual ranks, times accumulation |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, each in results.items():
        ordinary = f"{each['ordinary_ms'][1]:,.1f}"
        lines.append(
            f"| {name} | {ordinary} | {spread(each['times_ordinary'])} | {spread(each['times_accumulated'])} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="world sizes")
    parser.add_argument("--virtual-ranks", type=int, nargs="+", default=[1, 4, 8], help="numbers of virtual ranks")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(CASES),
        default=["wide MLP", "small ResNet", "GPT"],
        help="which of the five",
    )
    parser.add_argument("--blocks", type=int, default=11, help="of each side")
    parser.add_argument("--block-s", type=float, default=0.5, help="about how long a block of ordinary steps takes")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    whole: dict[str, object] = {"machine": describe_machine()}
    print(whole["machine"])
    for num_ranks in arguments.ranks:
        measured = evenstep.launch(
            on_ranks,
            num_ranks,
            (arguments.models, arguments.virtual_ranks, arguments.blocks, arguments.block_s),
            device="cpu",
        )
        results = {name: summarise(seconds) for name, seconds in measured.items()}
        print(f"\n{table(num_ranks, results)}", flush=True)
        whole[f"{num_ranks} ranks"] = results
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
