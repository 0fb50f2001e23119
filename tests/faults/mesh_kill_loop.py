"""Kills all ranks of a run at random instants, and goes on with another division of its model each time.

    python -m tests.faults.mesh_kill_loop --kills 30

30 kills go once from each of six layouts to each other one. What is compared with one process that nobody has
disturbed: the samples of every step, exactly; and parameters at the end, which differ by rounding. Then, on each
layout, a run that was killed and resumed ends with the bits of one that wasn't.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.tensor.parallel  # before the ranks are forked
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import evenstep
from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.store import LocalDirectory
from evenstep.ground import environment
from tests.faults.kill_loop import fork_rank
from tests.mesh_runs import LAYOUTS, Model, divided, num_ranks, whole_of

__all__ = ["fully_shard"]
PLAYED = [name for name in LAYOUTS if name not in ("shard 2", "shard 3")]
NUM_SAMPLES = 96
GLOBAL_BATCH = 10  # four ranks have unequal shares, and the last batch of an epoch is shorter


def train(directory: Path, meeting: Path, layout: str, rank: int, last_step: int, pause_s: float) -> None:
    """One rank: train with a save per step, and write down samples, steps and how it ended."""
    if num_ranks(layout) > 1:
        size = num_ranks(layout)
        store = str(meeting / "store")
        environment.export(environment.rank_variables(rank=rank, world_size=size, device="cpu", store=store))
    torch.set_num_threads(1)
    with evenstep.init(quiet=True, seed=5, mesh=LAYOUTS[layout] or None) as world:
        model = evenstep.attach(divided(Model().double(), world.mesh), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(13, (NUM_SAMPLES, 5), generator=torch.Generator().manual_seed(1))
        data = TensorDataset(torch.arange(NUM_SAMPLES), tokens)
        loader = evenstep.DataLoader(data, global_batch_size=GLOBAL_BATCH, shuffle=True)
        checkpoint = evenstep.Checkpointer(
            directory, model=model, optimizer=optimizer, loader=loader, every_steps=1, every_minutes=None, keep=2
        )
        resumed = checkpoint.resume()
        (meeting / f"began-{rank}").write_text(str(resumed))
        with (meeting / f"samples-{rank}").open("w", buffering=1) as seen:
            for _ in loader.epochs(1000):
                for numbers, batch in loader:
                    if checkpoint.num_steps == last_step:
                        break
                    model.backward(model(batch).square().mean(), weight=len(batch))
                    optimizer.step()
                    optimizer.zero_grad()
                    print(json.dumps([checkpoint.num_steps, world.data_rank, numbers.tolist()]), file=seen)
                    checkpoint.step()
                    time.sleep(pause_s)
                if checkpoint.num_steps == last_step:
                    break
        whole = whole_of(dict(model.state_dict()))
        if rank == 0:
            torch.save(whole, meeting / "ended.tmp")
            (meeting / "ended.tmp").rename(meeting / "ended")


def start(directory: Path, meeting: Path, layout: str, last_step: int, pause_s: float) -> list[int]:
    """Fork the ranks."""
    ranks = range(num_ranks(layout))
    return [
        fork_rank(meeting, rank, lambda rank=rank: train(directory, meeting, layout, rank, last_step, pause_s))
        for rank in ranks
    ]


def steps_begun(meeting: Path) -> int:
    """Steps that rank 0 has written down."""
    path = meeting / "samples-0"
    return len(path.read_text().splitlines()) if path.exists() else -1


def samples_of(meeting: Path, num_data_ranks: int) -> dict[int, list[int]]:
    """By step, the samples of all data ranks, sorted; of steps that all ranks have written down."""
    found: dict[int, dict[int, list[int]]] = {}
    for path in meeting.glob("samples-*"):
        for line in path.read_text().splitlines():
            try:
                step, data_rank, numbers = json.loads(line)
            except ValueError:
                continue  # cut off by the kill
            before = found.setdefault(step, {}).setdefault(data_rank, numbers)
            assert before == numbers, "ranks along tensor have the same samples"
    return {
        step: sorted(number for numbers in each.values() for number in numbers)
        for step, each in found.items()
        if len(each) == num_data_ranks
    }


class Play:
    """Runs of one after the other, in folders of their own.

    Args:
        root: Holds everything.
        last_step: Where runs end.
    """

    def __init__(self, root: Path, last_step: int) -> None:
        self.root, self.last_step = root, last_step
        self.number = 0

    def attempt(self, directory: Path, layout: str, kill_after: float | None) -> tuple[dict[int, list[int]], Path]:
        """Run until the end, or kill all ranks after some steps (and a part of one); returns samples and meeting."""
        self.number += 1
        meeting = self.root / f"meeting-{self.number}"
        meeting.mkdir()
        newest = max(checkpoints_in(LocalDirectory(directory)), default=0)
        pids = start(directory, meeting, layout, self.last_step, 0.0 if kill_after is None else 0.02)
        deadline = time.monotonic() + 120
        if kill_after is not None:
            while steps_begun(meeting) < int(kill_after):
                if time.monotonic() > deadline or os.waitpid(pids[0], os.WNOHANG)[0]:
                    raise AssertionError(f"{layout} did not train:\n" + self.told(meeting))
                time.sleep(0.002)
            time.sleep((kill_after % 1) * 0.05)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if kill_after is None and any(codes):
            raise AssertionError(f"{layout} failed:\n" + self.told(meeting))
        resumed = [int(path.read_text()) for path in meeting.glob("began-*")]
        assert resumed == [newest] * num_ranks(layout), f"{resumed}, and {newest} was the newest commit"
        sizes = LAYOUTS[layout]
        return samples_of(meeting, num_ranks(layout) // sizes.get("tensor", 1)), meeting

    def told(self, meeting: Path) -> str:
        """What ranks have said."""
        return "\n".join(path.read_text() for path in sorted(meeting.glob("stderr-*")))


def tour(names: list[str]) -> list[str]:
    """A closed walk that goes once from each name to each other one (Hierholzer, 1873)."""
    left = {name: [other for other in names if other != name] for name in names}
    stack, walk = [names[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def main() -> None:
    """Exit status 0 if samples, parameters and bits were as they must be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)  # noqa: T201
    generator = random.Random(args.seed)
    names = generator.sample(PLAYED, len(PLAYED))
    walk = tour(names)
    layouts = [walk[number % (len(walk) - 1)] for number in range(args.kills + 1)]
    delays = [generator.uniform(1, 4) for _ in range(args.kills)]
    with tempfile.TemporaryDirectory(prefix="evenstep-meshes-") as name:
        play = Play(Path(name), last_step=sum(map(int, delays)) + 4)
        expected, meeting = play.attempt(play.root / "straight", "one process", None)
        assert sorted(expected) == list(range(play.last_step))
        undisturbed = torch.load(meeting / "ended", weights_only=True)
        seen: dict[int, list[int]] = {}
        for layout, delay in zip(layouts, [*delays, None], strict=True):
            found, meeting = play.attempt(play.root / "carried", layout, delay)
            seen |= found
            assert all(expected[step] == numbers for step, numbers in found.items()), layout
            print(f"{layout}: steps {min(found, default=0)} to {max(found, default=0)}", flush=True)  # noqa: T201
        assert seen == expected, "every step was made, with the samples of the undisturbed run"
        ended = torch.load(meeting / "ended", weights_only=True)
        furthest = max(float((ended[key] - value).abs().max()) for key, value in undisturbed.items())
        assert furthest < 1e-9, f"parameters differ by {furthest}"
        num_same = 0
        play.last_step = 9
        for layout in names[: max(1, args.kills // 5)]:
            _, one = play.attempt(play.root / f"{layout} straight", layout, None)
            play.attempt(play.root / f"{layout} killed", layout, generator.uniform(1, 6))
            _, two = play.attempt(play.root / f"{layout} killed", layout, None)
            states = [torch.load(meeting / "ended", weights_only=True) for meeting in (one, two)]
            assert all(torch.equal(value, states[1][key]) for key, value in states[0].items()), layout
            num_same += 1
        pairs = set(itertools.pairwise(layouts))
        print(  # noqa: T201
            f"{args.kills} kills over {len(pairs)} pairs of layouts: samples exact, parameters within {furthest:.1e}; "
            f"{num_same} layouts killed and resumed on themselves: the same bits"
        )


if __name__ == "__main__":
    main()
