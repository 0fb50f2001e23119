"""What `faults.py` and the soak run on every rank: a small training that fails on purpose, and keeps a diary.

    evenstep run ... faulty_training.py --diary DIR --fault kill:rank=1,step=7,phase=backward
    torchrun     ... faulty_training.py --diary DIR --fault ... --engine ddp

The diary has, per rank and attempt, a line for every step that the optimizer has taken (step, samples, time), and when
the fault was made (`fault`) and when a survivor noticed (`noticed-RANK`), in seconds of the monotonic clock.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenstep
from evenstep.testing import faults
from evenstep.world import current

NUM_SAMPLES = 96
GLOBAL_BATCH = 8


class Numbered(torch.utils.data.Dataset):
    """Samples that know their number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.sin(torch.arange(16.0) * (index + 1)), index


def build_model(width: int) -> nn.Module:
    """A little of everything that has a state."""
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 1))


def prepare(kind: str, width: int, world: evenstep.World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer: replicas, with "sharded" optimizer state, or all divided ("fsdp2")."""
    model = build_model(width)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=world.mesh)
        return evenstep.attach(model, world), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model = evenstep.DistributedDataParallel(model)
    if kind == "sharded":
        return model, evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Diary:
    """What a rank writes down."""

    def __init__(self, directory: Path, rank: int, attempt: int) -> None:
        self.directory, self.rank = directory, rank
        self._steps = (directory / f"steps-{attempt}-{rank}").open("a", buffering=1)

    def stepped(self, step: int, samples: list[int]) -> None:
        """The optimizer has taken a step."""
        self._steps.write(f"{step} {','.join(map(str, samples))} {time.monotonic()!r}\n")

    def note(self, name: str) -> None:
        """Something happens now, for the first time."""
        with contextlib.suppress(FileExistsError), (self.directory / name).open("x") as file:
            file.write(repr(time.monotonic()))


def install(fault: str, diary: Diary) -> None:
    """The fault of this attempt, with a note of when it strikes.

    Two kinds are made here: `shape`, one more collective, of a shape that no other rank has; and `close`, which shuts
    down all TCP connections. The injector then counts for a `raise`, in place of which they happen.
    """
    kind, _, where = fault.partition(":")
    perform = {"shape": one_more_collective, "close": shut_connections}.get(kind, faults._perform)

    def noted(*args: object) -> None:
        diary.note("fault")
        perform(*args)  # type: ignore[arg-type]

    faults._perform = noted  # type: ignore[assignment]
    faults.install(fault if kind in faults.KINDS else f"raise:{where}", rank=diary.rank)


def one_more_collective(*_: object) -> None:
    """A collective that no other rank calls."""
    current().transport.all_reduce(torch.ones(3, 5, 7)).wait()


def shut_connections(*_: object) -> None:
    """Shut down all TCP connections of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)


def train_with_evenstep(args: argparse.Namespace) -> None:
    """The loop under `evenstep run`; resumes."""
    attempt = evenstep.ground.environment.current_placement().restart_count
    options: dict[str, Any] = {
        "reproducible": {"reproducible": True, "virtual_ranks": 4},
        "fsdp2": {"mesh": {"shard": -1}},
    }
    options = options.get(args.kind, {})
    with evenstep.init(seed=5, device="cpu", transport=args.transport, quiet=True, **options) as world:
        diary = Diary(args.diary, world.rank, attempt)
        model, optimizer = prepare(args.kind, args.width, world)
        loader = evenstep.DataLoader(Numbered(), global_batch_size=GLOBAL_BATCH, shuffle=True)
        checkpoint = None
        if args.save_every:
            directory = args.diary / "checkpoints"
            parts = {"model": model, "optimizer": optimizer, "loader": loader}
            local = {"local": args.diary / "local", "local_every_steps": args.local_every} if args.local_every else {}
            every = {"every_steps": args.save_every, "every_minutes": None}
            checkpoint = evenstep.Checkpointer(directory, **every, **local, **parts)
            checkpoint.resume()
        step = 0 if checkpoint is None else checkpoint.num_steps
        if args.fault and (attempt == 0 or args.every_attempt):
            install(args.fault, diary)
        if args.soak_seed is not None:
            draw_of_chance(args, attempt, world.rank, world.world_size, diary)
        ends_at = args.steps
        try:
            while step < ends_at:
                for x, samples in loader:
                    time.sleep(args.pause_s)
                    for part, _ in model.microbatches((x, samples)) if args.kind == "reproducible" else [(x, samples)]:
                        model.backward(model(part).square().mean(), weight=len(part))
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    diary.stepped(step, samples.tolist())
                    if checkpoint is not None:
                        checkpoint.step()
                    if args.pauses and step % 5000 == 2500:
                        pause_by_right(world, model, step)
                    # Rank 0's word counts: the file may appear between two ranks' looks.
                    if step % 25 == 0 and world.broadcast_object((args.diary / "end").exists()):
                        ends_at = step
                    if step >= ends_at:
                        break
        except evenstep.EvenstepError as error:
            diary.note(f"noticed-{world.rank}")
            raise error
        wholes = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        values = b"".join(p.detach().numpy().tobytes() for p in wholes)
        world.print(f"ended at step {step} with {hashlib.sha256(values).hexdigest()}")


def pause_by_right(world: evenstep.World, model: nn.Module, step: int) -> None:
    """What may keep the others waiting: rank 0 prepares something, or one rank evaluates for longer than a step may."""
    if step % 10000 == 2500:
        with world.main_first() as is_main:
            if is_main:
                time.sleep(40)
    elif world.rank == 1:
        with torch.no_grad():
            model(torch.ones(4, 16))
            time.sleep(40)


def draw_of_chance(args: argparse.Namespace, attempt: int, rank: int, num_ranks: int, diary: Diary) -> None:
    """A fault of chance, after a time of chance, in whatever the victim does at that moment."""
    draw = random.Random(args.soak_seed * 1_000_003 + attempt)
    kind = draw.choice(args.faults.split(","))
    after_s, victim = draw.uniform(0.5, 1.5) * args.fault_every_s, draw.randrange(num_ranks)
    if rank != victim:
        return

    def strike(*_: object) -> None:
        diary.note(f"fault-{attempt}")
        print(f"soak: attempt {attempt}: {kind} on rank {rank}", file=sys.stderr, flush=True)
        if kind == "raise":
            raise RuntimeError("soak")
        if kind == "exit":
            raise SystemExit(0)
        number = {"kill": 9, "segfault": 11, "stop": 19, "terminate": 15, "launcher": 9}[kind]
        os.kill(os.getppid() if kind in ("terminate", "launcher") else os.getpid(), number)

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, after_s)


def train_with_ddp(args: argparse.Namespace) -> None:
    """The same loop with torch's own classes, as its tutorials write it."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.ddp_timeout_s))
    rank = dist.get_rank()
    diary = Diary(args.diary, rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    torch.manual_seed(5)
    model = nn.parallel.DistributedDataParallel(build_model(args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler: torch.utils.data.DistributedSampler[Numbered] = torch.utils.data.DistributedSampler(Numbered())
    loader = torch.utils.data.DataLoader(Numbered(), batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    install(args.fault, diary)
    step = 0
    try:
        while step < args.steps:
            for x, samples in loader:
                time.sleep(args.pause_s)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                diary.stepped(step, samples.tolist())
                if step >= args.steps:
                    break
    except RuntimeError:
        diary.note(f"noticed-{rank}")
        raise
    dist.destroy_process_group()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--engine", choices=("evenstep", "ddp"), default="evenstep")
    parser.add_argument("--transport")
    parser.add_argument("--fault", default="")
    parser.add_argument("--every-attempt", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.005)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--ddp-timeout-s", type=float, default=20.0)
    parser.add_argument("--pauses", action="store_true", help="of 40 s, where they are allowed")
    parser.add_argument("--soak-seed", type=int)
    parser.add_argument("--faults", default="kill,raise,exit,segfault,stop,terminate,launcher")
    parser.add_argument("--fault-every-s", type=float, default=10.0)
    parser.add_argument("--kind", choices=("plain", "sharded", "fsdp2", "reproducible"), default="plain")
    parser.add_argument("--local-every", type=int, default=0, help="steps between local saves; 0: none")
    args = parser.parse_args()
    if args.engine == "ddp":
        train_with_ddp(args)
    else:
        train_with_evenstep(args)


if __name__ == "__main__":
    main()
