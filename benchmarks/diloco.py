"""DDP, plain averaging and DiLoCo on two hosts with a slow wire: time per sample, and loss at equal samples.

    python benchmarks/diloco.py                      # two network namespaces, 100 Mbit/s between them; needs root

Each side trains the same small language model on the same text, from the same seed, for equally many samples. A time is
that of a step without the evaluation, on rank 0. Sides take turns over the seeds, so that a busy machine slows all.

The first 3 of 11 steps are DDP's on each side, as in the paper of DiLoCo (24,000 of 88,000), and count in the times.
The outer momentum is 0.8: the paper's 0.9 wants a longer run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring import describe_machine, markdown, parser_of, write_json

import evenstep
from hosts import run_on_hosts

sys.path.append(str(Path(__file__).parents[1]))  # where `tests` is, also when this runs from elsewhere
from tests.namespaces import Namespaces

ROOT = Path(__file__).parents[1]
SIDES = ("DDP", "averaging", "DiLoCo", "DiLoCo, bfloat16")


def example() -> Any:
    """The language model of the examples."""
    sys.path.append(str(ROOT / "examples"))
    return importlib.import_module("language_model")


def train(side: str, seed: int, num_steps: int, every: int, world: evenstep.World) -> dict[str, float]:
    """On every rank: seconds a sample, and the held-out loss in bits a byte."""
    lm, batch = example(), 32
    texts, held_out = lm.read_texts(300_000)
    loader = evenstep.DataLoader(lm.windows_of(texts, 64), global_batch_size=batch, shuffle=True, seed=seed)
    test_loader = evenstep.DataLoader(lm.windows_of(held_out, 64), global_batch_size=120)
    torch.manual_seed(seed)
    model = evenstep.DistributedDataParallel(lm.GPT(width=128, num_layers=2, num_heads=4, context=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lm.learning_rate(step, num_steps))
    local = outer = None
    if side != "DDP":
        if side.startswith("DiLoCo"):
            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.8, nesterov=True)
        dtype = torch.bfloat16 if side.endswith("bfloat16") else None
        local = evenstep.LocalSGD(
            model, optimizer, every=every, warmup_steps=num_steps * 3 // 11, outer=outer, transfer_dtype=dtype
        )
    world.barrier()
    started = time.perf_counter()
    for _, (x, y) in zip(range(num_steps), lm.batches(loader), strict=False):
        loss, num_bytes = lm.loss_of(model, x, y)
        model.backward(loss, weight=num_bytes)
        optimizer.step() if local is None else local.step()
        optimizer.zero_grad()
        schedule.step()
    if local is not None:
        local.close()
    world.barrier()
    took = (time.perf_counter() - started) / (num_steps * batch)
    return {"seconds": took, "loss": float(lm.evaluate(model, test_loader, world))}


def on_rank(out: Path, seeds: int, num_steps: int, every: int) -> None:
    """All sides for each seed; rank 0 writes the result."""
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with evenstep.init(quiet=True, device="cpu") as world:
        for seed in range(seeds):
            for side in SIDES if seed % 2 else reversed(SIDES):
                found[side].append(train(side, seed, num_steps, every, world))
        if world.is_main:
            out.write_text(json.dumps(found))


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """For people, and for the documentation. Pure."""
    rows = []
    ddp = found["DDP"]
    for side, runs in found.items():
        took = statistics.median(each["seconds"] for each in runs)
        faster = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(ddp, runs, strict=True))
        losses = ", ".join(f"{each['loss']:.4f}" for each in runs)
        over = statistics.mean(b["loss"] / a["loss"] - 1 for a, b in zip(ddp, runs, strict=True))
        rows.append([side, f"{took * 1e3:.3f}", f"{faster:.2f}", losses, f"{over:+.2%}"])
    return markdown("side | ms a sample | times faster than DDP | bits a byte, each seed | over DDP's", rows)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--rate-mbit", type=float, default=100.0, help="of each node's wire")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="of each side and seed")
    parser.add_argument("--every", type=int, default=20, help="local steps between two exchanges")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank is not None:
        on_rank(arguments.as_rank, arguments.seeds, arguments.steps, arguments.every)
        return
    print(describe_machine())
    flags = [f"--{name}={getattr(arguments, name)}" for name in ("seeds", "steps", "every")]
    with Namespaces(2, rate_mbit=arguments.rate_mbit) as hosts:
        found = run_on_hosts(hosts, 1, __file__, *flags)
    print(f"\n2 hosts of 1 rank, {arguments.rate_mbit:g} Mbit/s, an exchange every {arguments.every} steps\n")
    print(table(found))
    write_json(arguments.json, sides=found)


if __name__ == "__main__":
    main()
