"""Saving and loading a large state: evenstep beside torch.save on rank 0, torch.distributed.checkpoint and torch.load.

    python benchmarks/checkpoint.py                              # 500 MB on two ranks
    python benchmarks/checkpoint.py --megabytes 100 --rounds 3 --json result.json

The state is a model with the two moments of AdamW, the same on all ranks. In each round all sides take turns:

    blocked       how long the loop stands still: the copy to memory for evenstep and for the `async_save` of
                  torch.distributed.checkpoint (DCP), which has a stager that keeps its memory, too; else the whole save
    whole save    until the checkpoint is complete; evenstep and DCP sync their files
    load          into a model and an optimizer, in a process that has just begun, as a resume does; the files are in
                  the page cache; evenstep confirms every checksum
    first step    from the beginning of the load to the end of the optimizer's first step, to which
                  `torch.load(mmap=True)` leaves reading the optimizer's state

and in the end a small training loop runs without and with a save behind it. Times are those of the slowest rank.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measuring import alternate, describe_machine, parser_of, quartiles, ratios, spread, write_json
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import evenstep

WIDTH = 1024
SAVES = ("blocked", "whole", "torch.save", "dcp", "dcp, async: blocked", "dcp, async: whole")


def build(megabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with moments, of so many megabytes together."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * (WIDTH + 1))))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Bench:
    """One rank's sides."""

    def __init__(self, world: evenstep.World, megabytes: float, root: Path) -> None:
        self.world, self.root = world, root
        torch.manual_seed(0)
        self.model, self.optimizer = build(megabytes)
        self.group = torch.distributed.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(False, False, False, False))  # it can do nothing else without a GPU
        self.checkpoint = evenstep.Checkpointer(
            root / "evenstep", every_minutes=None, keep=1, model=self.model, optimizer=self.optimizer
        )

    def slowest(self, seconds: float) -> float:
        """Of all ranks; collective."""
        return max(self.world.exchange(seconds))

    def timed(self, work: Callable[[], Any]) -> float:
        """From barrier to the end on the slowest rank."""
        self.world.barrier()
        start = time.perf_counter()
        work()
        return self.slowest(time.perf_counter() - start)

    def save_evenstep(self) -> tuple[float, float]:
        """Blocked, and whole."""
        self.checkpoint.num_steps += 1
        self.world.barrier()
        start = time.perf_counter()
        self.checkpoint._save()
        blocked = self.slowest(time.perf_counter() - start)
        self.checkpoint.wait()
        return blocked, self.slowest(time.perf_counter() - start)

    def save_torch(self) -> None:
        """As most scripts do it."""
        if self.world.is_main:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.root / "torch.pt")
        self.world.barrier()

    def save_dcp(self) -> None:
        """torch.distributed.checkpoint, which divides replicated state over the ranks too."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        dcp.save(state, checkpoint_id=self.root / "dcp")

    def save_dcp_async(self) -> tuple[float, float]:
        """Blocked, and whole."""
        self.world.barrier()
        start = time.perf_counter()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved = dcp.async_save(
            state, checkpoint_id=self.root / "dcp-async", process_group=self.group, async_stager=self.stager
        )
        blocked = self.slowest(time.perf_counter() - start)
        assert isinstance(saved, Future)
        saved.result()
        return blocked, self.slowest(time.perf_counter() - start)

    def load_torch(self, *, mmap: bool = False) -> None:
        """On every rank."""
        state = torch.load(self.root / "torch.pt", weights_only=True, mmap=mmap)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def rate(self, seconds: float, *, saves: bool) -> float:
        """Steps a second of a small loop, without and with a save behind it for as long as that takes."""
        small = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        model = evenstep.DistributedDataParallel(small, world=self.world)
        x = torch.randn(64, 256)

        def step() -> None:
            model(x).square().mean().backward()
            model.zero_grad()

        for _ in range(5):
            step()
        if saves:
            self.checkpoint.num_steps += 1
            self.checkpoint._save()
        self.world.barrier()
        start, count = time.perf_counter(), 0
        goes_on = True
        while goes_on:
            for _ in range(10):
                step()
            count += 10
            busy = self.checkpoint._saver.writer.is_busy
            goes_on = self.world.broadcast_object(busy if saves else time.perf_counter() - start < seconds)
        rate = count / (time.perf_counter() - start)
        self.checkpoint.wait()
        return rate


def measure(megabytes: float, rounds: int, root: Path) -> dict[str, Any] | None:
    """All figures, on rank 0."""
    warnings.filterwarnings("ignore")
    with evenstep.init(quiet=True, device="cpu") as world:
        bench = Bench(world, megabytes, root)
        columns: dict[str, list[float]] = {name: [] for name in SAVES}
        first_blocked = 0.0
        for number in range(rounds + 1):
            blocked, whole = bench.save_evenstep()
            torch_save = bench.timed(bench.save_torch)
            dcp_save = bench.timed(bench.save_dcp)
            dcp_async = bench.save_dcp_async()
            if number == 0:
                first_blocked = blocked  # its memory is fresh
                continue
            for name, value in zip(columns, (blocked, whole, torch_save, dcp_save, *dcp_async), strict=True):
                columns[name].append(value)
        alone, behind = [], []
        for _ in range(rounds):
            alone.append(bench.rate(1.0, saves=False))
            behind.append(bench.rate(1.0, saves=True))
        staged = sum(world.exchange(bench.checkpoint._saver._staging.num_bytes))
        state = sum(p.nbytes for p in bench.model.parameters()) * 3
        bench.checkpoint.close()
        return {
            "state_mb": state / 1e6,
            "extra_memory_mb_all_ranks": staged / 1e6,
            "seconds": {name: quartiles(values) for name, values in columns.items()},
            "first_blocked_s": first_blocked,
            "blocked_over_torch_save": ratios(columns["blocked"], columns["torch.save"]),
            "whole_over_dcp": ratios(columns["whole"], columns["dcp"]),
            "blocked_over_dcp_async": ratios(columns["blocked"], columns["dcp, async: blocked"]),
            "whole_over_dcp_async": ratios(columns["whole"], columns["dcp, async: whole"]),
            "throughput_while_saving": ratios(behind, alone),
        }


def measure_load(megabytes: float, side: str, root: Path) -> tuple[float, float]:
    """Seconds of one load, in a process that has loaded nothing before, and of the first step with what was loaded."""
    warnings.filterwarnings("ignore")
    with evenstep.init(quiet=True, device="cpu") as world:
        bench = Bench(world, megabytes, root)
        for parameter in bench.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        # A virtual machine gets its memory from the host page by page when it is first touched, which here costs many
        # times what the load does, and at random. As much as any side needs is touched, and given back to the kernel.
        torch.empty(int(1.2 * megabytes * 1e6), dtype=torch.uint8).fill_(1)
        sides = {
            "evenstep": bench.checkpoint.resume,
            "torch.load": bench.load_torch,
            "torch.load(mmap)": lambda: bench.load_torch(mmap=True),
        }
        load_s = bench.timed(sides[side])
        step_s = bench.timed(bench.optimizer.step)
        bench.checkpoint.close()
        return load_s, load_s + step_s


def measure_loads(megabytes: float, ranks: int, rounds: int, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Seconds of all sides, which take turns, and their ratios."""
    sides = ("evenstep", "torch.load", "torch.load(mmap)")

    def one(side: str) -> tuple[float, float]:
        return evenstep.launch(measure_load, ranks, args=(megabytes, side, root), device="cpu")

    measured = alternate(sides, rounds, one)
    loads = {side: [load_s for load_s, _ in each] for side, each in measured.items()}
    steps = {side: [step_s for _, step_s in each] for side, each in measured.items()}
    names = {"evenstep": "load"}
    seconds = {names.get(side, side): quartiles(loads[side]) for side in sides}
    seconds |= {f"first step: {names.get(side, side)}": quartiles(steps[side]) for side in sides}
    return seconds, {
        "load_over_torch_load": ratios(loads["evenstep"], loads["torch.load"]),
        "first_step_over_torch_load": ratios(steps["evenstep"], steps["torch.load"]),
        "first_step_over_torch_load_mmap": ratios(steps["evenstep"], steps["torch.load(mmap)"]),
    }


def main() -> None:
    """Print a table, and write JSON on request."""
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=float, default=500.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where to write; the system's temporary directory if left out")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="evenstep-bench-", dir=args.directory))
    try:
        result = evenstep.launch(measure, args.ranks, args=(args.megabytes, args.rounds, root), device="cpu")
        seconds, load_ratios = measure_loads(args.megabytes, args.ranks, args.rounds, root)
    finally:
        shutil.rmtree(root)
    assert result is not None
    result["seconds"] |= seconds
    result |= load_ratios
    print(f"{describe_machine()}\n\n{result['state_mb']:.0f} MB on {args.ranks} ranks; seconds, median with quartiles")
    for name, values in result["seconds"].items():
        print(f"  {name:28} {spread(values, 3)}")
    print(f"  the first blocked save, into fresh memory: {result['first_blocked_s']:.3f}")
    for name in [name for name in result if "_over_" in name or name.startswith("throughput")]:
        print(f"  {name:32} {spread(result[name])}")
    print(f"  extra memory, all ranks: {result['extra_memory_mb_all_ranks']:.0f} MB   at most {result['state_mb']:.0f}")
    write_json(args.json, **result)


if __name__ == "__main__":
    main()
