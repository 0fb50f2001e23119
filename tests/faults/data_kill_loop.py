"""Kills all ranks of a run with SIGKILL at random moments, goes on with others, and counts the samples of each epoch.

    python -m tests.faults.data_kill_loop --kills 60
    python -m tests.faults.data_kill_loop --kills 5 --kind stateful

Each kind of order or stream is trained until it has been killed often enough. A run goes on, after each kill, on 1 to 4
ranks with 0 or 2 workers each, drawn anew; one that is divided by shard keeps what it began with. At the end of a run
every sample was trained once in each epoch, where a step counts that the checkpoints kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, TensorDataset

import evenstep
from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.store import LocalDirectory
from evenstep.ground import environment
from tests.faults.kill_loop import fork_rank

NUM_SAMPLES, NUM_EPOCHS, GLOBAL_BATCH = 67, 3, 6
NUMBERS = TensorDataset(torch.arange(NUM_SAMPLES))
LENGTHS = torch.randint(1, 20, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(0))


class FromStreams(Sampler[int]):
    """Draws from python's, torch's and numpy's streams, in the middle of an epoch, too."""

    def __iter__(self) -> Iterator[int]:
        left = torch.randperm(NUM_SAMPLES).tolist()
        while left:
            numpy.random.shuffle(left)
            yield left.pop(random.randrange(len(left)))


class ByEpoch(Sampler[int]):
    """Draws by a generator of numpy's that its `set_epoch` makes."""

    def set_epoch(self, epoch: int) -> None:
        self.generator = numpy.random.default_rng(epoch)

    def __iter__(self) -> Iterator[int]:
        yield from self.generator.permutation(NUM_SAMPLES).tolist()


class Stateful(Sampler[int]):
    """Draws by a `torch.Generator` of its own, whose state it gives."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.left: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state().tolist(), "left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        self.left = list(state["left"])

    def __iter__(self) -> Iterator[int]:
        self.left = self.left or list(range(NUM_SAMPLES))
        while self.left:
            yield self.left.pop(int(torch.randint(len(self.left), (), generator=self.generator)))


class Batches(ByEpoch):
    """A batch sampler: 4 to 9 samples each, sorted."""

    def __iter__(self) -> Iterator[Any]:
        order = self.generator.permutation(NUM_SAMPLES).tolist()
        while order:
            size = int(self.generator.integers(4, 10))
            yield sorted(order[:size])
            del order[:size]


class Records(IterableDataset[Tensor]):
    """A stream that shuffles itself in a buffer, by python's stream."""

    def numbers(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        for number in self.numbers():
            buffer.append(number)
            if len(buffer) > 10:
                yield torch.tensor(buffer.pop(random.randrange(len(buffer))))
        random.shuffle(buffer)
        yield from map(torch.tensor, buffer)


class Shards(Records):
    """The same in 16 shards, of which a part has some; in another order in each epoch."""

    def __init__(self, num_shards: int = 16, shards: tuple[int, ...] = tuple(range(16)), epoch: int = 0) -> None:
        self.num_shards, self.shards, self.epoch = num_shards, shards, epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(len(self.shards[index::num_shards]), self.shards[index::num_shards], self.epoch)

    def numbers(self) -> Iterator[int]:
        shards = list(self.shards)
        random.Random(self.epoch).shuffle(shards)
        return (number for shard in shards for number in range(shard, NUM_SAMPLES, 16))


def hugging_face(*, is_stream: bool) -> Any:
    """A table of theirs, or a stream with a shuffle buffer."""
    import datasets

    table = datasets.Dataset.from_dict({"number": list(range(NUM_SAMPLES))}).with_format("torch")
    return table.to_iterable_dataset(num_shards=16).shuffle(seed=0, buffer_size=10) if is_stream else table


def _numbers_of(batch: Any) -> Tensor:
    """Of what any of the data sets give."""
    return batch["number"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch


SIZED = {"global_batch_size": GLOBAL_BATCH}
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"dataset": NUMBERS, "shuffle": True, **SIZED},
    "torchs": lambda: {"dataset": NUMBERS, "sampler": RandomSampler(range(NUM_SAMPLES)), **SIZED},
    "streams": lambda: {"dataset": NUMBERS, "sampler": FromStreams(), **SIZED},
    "by_epoch": lambda: {"dataset": NUMBERS, "sampler": ByEpoch(), **SIZED},
    "stateful": lambda: {"dataset": NUMBERS, "sampler": Stateful(), **SIZED},
    "batches": lambda: {"dataset": NUMBERS, "batch_sampler": Batches()},
    "torchs_batches": lambda: {"dataset": NUMBERS, "batch_sampler": BatchSampler(FromStreams(), GLOBAL_BATCH, False)},
    "tokens": lambda: {"dataset": NUMBERS, "shuffle": True, "max_tokens": 80, "lengths": LENGTHS},
    "records": lambda: {"dataset": Records(), **SIZED},
    "shards": lambda: {"dataset": Shards(), **SIZED},
    "hf_table": lambda: {"dataset": hugging_face(is_stream=False), "sampler": FromStreams(), **SIZED},
    "hf_stream": lambda: {"dataset": hugging_face(is_stream=True), **SIZED},
}
BY_SHARD = ("shards", "hf_stream")


def train(directory: Path, meeting: Path, kind: str, rank: int, num_ranks: int, num_workers: int) -> None:
    """One rank: trains with a save per step, and writes down the samples of every step."""
    if num_ranks > 1:
        store = str(meeting / "store")
        environment.export(environment.rank_variables(rank=rank, world_size=num_ranks, device="cpu", store=store))
    torch.set_num_threads(1)
    with evenstep.init(quiet=True, seed=5) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = evenstep.DataLoader(num_workers=num_workers, **KINDS[kind]())
        checkpoint = evenstep.Checkpointer(
            directory, model=model, optimizer=optimizer, loader=loader, every_steps=1, every_minutes=None, keep=2
        )
        resumed = checkpoint.resume()
        with (meeting / f"samples-{rank}").open("w", buffering=1) as seen:
            print(json.dumps(resumed), file=seen)
            for epoch in loader.epochs(NUM_EPOCHS):
                for batch in loader:
                    numbers = _numbers_of(batch)
                    out = model(numbers.float().unsqueeze(1))
                    model.backward(out.square().mean(), weight=len(numbers))
                    optimizer.step()
                    optimizer.zero_grad()
                    print(json.dumps([checkpoint.num_steps, epoch, numbers.tolist()]), file=seen)
                    checkpoint.step()
                    time.sleep(0.01)
        assert world.world_size == num_ranks


class Run:
    """One training, through all of its kills.

    Args:
        root: Holds everything.
        kind: Of `KINDS`.
        generator: Draws the moments, ranks and workers.
    """

    def __init__(self, root: Path, kind: str, generator: random.Random) -> None:
        self.root, self.kind, self.generator = root, kind, generator
        self.directory = root / "checkpoints"
        self.steps: dict[int, list[tuple[int, list[int]]]] = {}  # by step, of each rank the epoch and its samples
        self.num_attempts = 0
        self.division = self.draw()

    def draw(self) -> tuple[int, int]:
        """A number of ranks, and of workers of each."""
        return self.generator.randint(1, 4), self.generator.choice((0, 2))

    def attempt(self, after_s: float | None) -> bool:
        """Train on until a kill, or the end; whether it came."""
        if self.kind not in BY_SHARD:
            self.division = self.draw()
        num_ranks, num_workers = self.division
        self.num_attempts += 1
        meeting = self.root / f"meeting-{self.num_attempts}"
        meeting.mkdir()
        newest = max(checkpoints_in(LocalDirectory(self.directory)), default=0)
        pids = [
            fork_rank(
                meeting,
                rank,
                lambda rank=rank: train(self.directory, meeting, self.kind, rank, num_ranks, num_workers),
            )
            for rank in range(num_ranks)
        ]
        paths = [meeting / f"samples-{rank}" for rank in range(num_ranks)]
        deadline = time.monotonic() + 300
        while after_s is not None and not all(path.exists() and path.read_text() for path in paths):
            if time.monotonic() > deadline or os.waitpid(pids[0], os.WNOHANG)[0]:
                raise AssertionError(f"{self.kind} did not train:\n{self.told(meeting)}")
            time.sleep(0.002)
        if after_s is not None:
            time.sleep(after_s)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        ended = not any(codes)
        if not ended and (after_s is None or any(code != -signal.SIGKILL for code in codes if code)):
            raise AssertionError(f"{self.kind} on {num_ranks} ranks with {num_workers} workers:\n{self.told(meeting)}")
        self.read(paths, newest)
        shutil.rmtree(meeting)
        return ended

    def read(self, paths: list[Path], newest: int) -> None:
        """Take what the ranks have written down in place of the steps that were lost."""
        self.steps = {step: each for step, each in self.steps.items() if step < newest}
        for path in paths:
            begun, *lines = path.read_text().splitlines()
            assert int(begun) == newest, f"{self.kind} resumed from {begun}, and {newest} was the newest commit"
            for line in lines:
                try:
                    step, epoch, numbers = json.loads(line)
                except ValueError:
                    continue  # cut off by the kill
                self.steps.setdefault(step, []).append((epoch, numbers))

    def validate(self) -> None:
        """Raise unless each epoch has every sample once."""
        assert sorted(self.steps) == list(range(len(self.steps))), "a step is missing"
        for epoch in range(NUM_EPOCHS):
            seen = Counter(
                number for each in self.steps.values() for of, numbers in each if of == epoch for number in numbers
            )
            missing, twice = set(range(NUM_SAMPLES)) - set(seen), sorted(n for n, times in seen.items() if times > 1)
            if missing or twice:
                raise AssertionError(f"{self.kind}, epoch {epoch}: {sorted(missing)} never, {twice} twice")

    def told(self, meeting: Path) -> str:
        """What ranks have said."""
        return "\n".join(path.read_text() for path in sorted(meeting.glob("stderr-*")))


def main() -> None:
    """Exit status 0 if every epoch of every run had every sample once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)  # noqa: T201
    generator = random.Random(args.seed)
    kinds = [args.kind] if args.kind else [*KINDS]
    if importlib.util.find_spec("datasets") is None:
        kinds = [kind for kind in kinds if not kind.startswith("hf_")]
    total = num_runs = 0
    with tempfile.TemporaryDirectory(prefix="evenstep-kills-") as name:
        for kind in kinds:
            num_kills = 0
            divisions = Counter[tuple[int, int]]()
            while num_kills < args.kills / len(kinds):
                root = Path(name) / f"run-{num_runs}"
                root.mkdir()
                run, ended = Run(root, kind, generator), False
                num_runs += 1
                while not ended:
                    is_last = num_kills >= args.kills / len(kinds)
                    ended = run.attempt(None if is_last else generator.uniform(0, 0.6))
                    num_kills += not ended
                    divisions[run.division] += 1
                run.validate()
                shutil.rmtree(root)
            total += num_kills
            where = ", ".join(f"{ranks}x{workers}" for ranks, workers in sorted(divisions))
            print(f"{kind}: {num_kills} kills, every sample once an epoch, on {where} ranks x workers", flush=True)  # noqa: T201
    print(f"{total} kills, {num_runs} runs of {NUM_EPOCHS} epochs")  # noqa: T201


if __name__ == "__main__":
    main()
