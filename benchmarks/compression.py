"""Compressed gradients over two nodes: evenstep beside torch's DDP with the same communication hook of torch's.

    python benchmarks/compression.py                 # two network namespaces, 1 Gbit/s between them; needs root

The wide MLP of the other benchmarks, trained by both in blocks of equally many steps that take turns within one run.
A block is timed from barrier to barrier, on the slowest rank. Both begin with the same parameters and see the same
batches, so that equal losses at the end show equal learning.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import Namespaces, describe_machine, ratios, run_on_hosts, spread, take_turns
from models import CASES
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import evenstep

CASE = CASES["wide MLP"]
SIDES = ["torch", "evenstep"]
NUM_BATCHES = 8


def power_sgd() -> tuple[object, Callable[..., object]]:
    """Rank 4, with error feedback, from the third step on."""
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


# torch refuses bf16_compress_hook without a GPU.
HOOKS: dict[str, Callable[[], tuple[object, Callable[..., object]]] | None] = {
    "none": None,
    "fp16_compress_hook": lambda: (dist.group.WORLD, default_hooks.fp16_compress_hook),
    "powerSGD_hook": power_sgd,
}


class Training:
    """One side's training, on a model of its own."""

    def __init__(self, side: str, hook: str, rank: int) -> None:
        torch.manual_seed(0)
        module = CASE.build()
        self.model: TorchDistributedDataParallel
        if side == "evenstep":
            self.model = evenstep.DistributedDataParallel(module)
        else:
            # On the CPU PowerSGD goes on in Gloo's threads, and with two buckets under way torch's ranks begin the next
            # collectives of the two in different orders, and abort. All gradients in one bucket it is, then.
            cap = {"bucket_cap_mb": 64.0} if hook == "powerSGD_hook" else {}
            self.model = TorchDistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True, **cap)
        made = HOOKS[hook]
        if made is not None:
            self.model.register_comm_hook(*made())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(1 + rank)
        self.batches = [CASE.draw() for _ in range(NUM_BATCHES)]
        self.num_steps = 0

    def step(self) -> None:
        """Forward, backward, and the optimizer's."""
        x, y = self.batches[self.num_steps % NUM_BATCHES]
        CASE.loss(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    @torch.no_grad()
    def loss(self, world: evenstep.World) -> float:
        """The mean over all batches of all ranks."""
        return world.mean(sum(CASE.loss(self.model(x), y).item() for x, y in self.batches) / NUM_BATCHES)


def measure(hook: str, world: evenstep.World, blocks: int, num_steps: int) -> dict[str, object]:
    """On a rank: seconds per step of each side, block by block, and both losses at the end."""
    trainings = {side: Training(side, hook, world.rank) for side in SIDES}
    steps = {side: training.step for side, training in trainings.items()}
    return {
        "seconds": take_turns(steps, world, blocks, num_steps),
        "loss": {side: training.loss(world) for side, training in trainings.items()},
    }


def on_rank(hooks: list[str], blocks: int, num_steps: int, out: Path) -> None:
    """On every rank; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    with evenstep.init(seed=0, quiet=True) as world:
        measured = {hook: measure(hook, world, blocks, num_steps) for hook in hooks}
        if world.is_main:
            out.write_text(json.dumps(measured))


def table(measured: dict[str, dict[str, dict[str, object]]]) -> str:
    """For people, and for the documentation. Pure."""
    lines = [
        "| hook | torch, ms | evenstep, ms | torch / evenstep | loss, torch | loss, evenstep |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for hook, each in measured.items():
        torchs, ours = (each["seconds"][side] for side in SIDES)
        times = f"{statistics.median(torchs) * 1e3:,.0f} | {statistics.median(ours) * 1e3:,.0f}"
        losses = " | ".join(f"{each['loss'][side]:.5f}" for side in SIDES)
        lines.append(f"| {hook} | {times} | {spread(ratios(torchs, ours))} | {losses} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rate-mbit", type=float, default=1000.0, help="of each node's wire")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--hooks", nargs="+", choices=list(HOOKS), default=list(HOOKS))
    parser.add_argument("--blocks", type=int, default=15, help="of each side and hook")
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank is not None:
        on_rank(arguments.hooks, arguments.blocks, arguments.steps, arguments.as_rank)
        return
    machine = describe_machine()
    print(machine)
    own = ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps), "--hooks", *arguments.hooks]
    with Namespaces(2, rate_mbit=arguments.rate_mbit) as hosts:
        measured = run_on_hosts(hosts, arguments.ranks_per_host, __file__, own)
    print(f"\n2 hosts of {arguments.ranks_per_host} ranks, {arguments.rate_mbit:g} Mbit/s\n\n{table(measured)}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine, "measured": measured}, indent=1))


if __name__ == "__main__":
    main()
