"""Kills a rank of a run with two tiers at random instants, then the others, and compares how it ends.

    python -m tests.faults.tier_kill_loop --kind plain --kills 50       # or sharded, or fsdp2

Checkpoints come seldom and local copies often: a resume takes the newest copy that was seen complete, or a later one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import evenstep
from evenstep.checkpoint.format.payload import bytes_of
from evenstep.checkpoint.lock import step_of
from evenstep.ground import environment
from tests.faults.kill_loop import NUM_RANKS, fork_rank, wait_for_start

DURABLE_EVERY, LOCAL_EVERY = 25, 3
NUM_SAMPLES = 90


def build(kind: str, world: evenstep.World) -> tuple[Any, Any]:
    """A model and its optimizer."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(8, 61), nn.Tanh(), nn.Dropout(0.1), nn.Linear(61, 5))
    if kind == "fsdp2":
        fully_shard(layers, mesh=init_device_mesh("cpu", (world.world_size,)))
        model: Any = evenstep.attach(layers, world)
    else:
        model = evenstep.DistributedDataParallel(layers)
    if kind == "sharded":
        return model, evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def digest(model: Any, optimizer: Any) -> dict[str, int]:
    """What a rank has at the end, in numbers."""
    tensors = dict(model.named_parameters())
    state = optimizer.state_shards()[1] if hasattr(optimizer, "state_shards") else optimizer.state_dict()["state"]
    kept = {str(shard.path): shard.values for shard in state} if isinstance(state, list) else {
        f"{number}.{name}": value
        for number, entries in state.items()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    }  # fmt: skip
    return {
        name: zlib.crc32(bytes_of(getattr(value, "to_local", lambda value=value: value)().detach().contiguous()))
        for name, value in {**tensors, **kept, "next": torch.rand(4)}.items()
    }


def train(root: Path, kind: str, meeting: Path, rank: int, last_step: int) -> None:
    """One rank: says where it resumed, how far it came and what was complete, and what it ended with."""
    store = str(meeting / "store")
    environment.export(environment.rank_variables(rank=rank, world_size=NUM_RANKS, device="cpu", store=store))
    torch.set_num_threads(1)
    with evenstep.init(quiet=True, seed=5) as world:
        model, optimizer = build(kind, world)
        inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
        loader = evenstep.DataLoader(TensorDataset(inputs), global_batch_size=7, shuffle=True)
        checkpoint = evenstep.Checkpointer(
            root / "saved",
            model=model,
            optimizer=optimizer,
            loader=loader,
            every_steps=DURABLE_EVERY,
            every_minutes=None,
            local=root / "local",
            local_every_steps=LOCAL_EVERY,
        )
        resumed = checkpoint.resume()
        tier = checkpoint._tier
        assert tier is not None
        (meeting / f"began-{rank}").write_text(str(resumed))
        progress = os.open(meeting / f"progress-{rank}", os.O_WRONLY | os.O_CREAT)
        for _ in loader.epochs(1000):
            for (x,) in loader:
                model.backward(model(x).square().mean(), weight=len(x))
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
                writer = tier._saver.writer
                is_done = writer.is_pending and not writer.is_busy and not writer.has_failed
                complete = tier._saver.folder if is_done else tier.kept
                seen = [checkpoint.num_steps, 0 if complete is None else step_of(complete)]
                os.pwrite(progress, f"{json.dumps(seen):20}".encode(), 0)
                if checkpoint.num_steps == last_step:
                    break
            if checkpoint.num_steps == last_step:
                break
        (meeting / f"ended-{rank}.tmp").write_text(json.dumps(digest(model, optimizer)))
        (meeting / f"ended-{rank}.tmp").rename(meeting / f"ended-{rank}")


def main() -> None:
    """Exit status 0: every start went on from what was complete, one from local copies, and every end was the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["plain", "sharded", "fsdp2"], required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)  # noqa: T201
    generator = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="evenstep-kills-") as name:
        number = 0

        def attempt(root: Path, after_s: float | None, least: int) -> tuple[bool, Path, int, float]:
            """Whether the run ended by itself; where its ranks met; where it began; how long it took."""
            nonlocal number
            number += 1
            meeting = Path(name) / f"meeting-{number}"
            meeting.mkdir()
            pids = [
                fork_rank(meeting, rank, lambda rank=rank: train(root, args.kind, meeting, rank, args.steps))
                for rank in range(NUM_RANKS)
            ]
            began, *others = wait_for_start(meeting, pids)
            if others != [began] * len(others) or began < least:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"resumed from {began} and {others}, and {least} was complete")
            began_at = time.monotonic()
            if after_s is not None:
                time.sleep(after_s)
                generator.shuffle(pids)
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(generator.choice([0.0, 0.05]))
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            ended = codes == [0] * NUM_RANKS
            if not ended and after_s is None:
                raise AssertionError("\n".join(path.read_text() for path in sorted(meeting.glob("stderr-*"))))
            return ended, meeting, began, time.monotonic() - began_at

        def ends(meeting: Path) -> list[object]:
            return [json.loads((meeting / f"ended-{rank}").read_text()) for rank in range(NUM_RANKS)]

        _, meeting, _, took_s = attempt(Path(name) / "straight", None, 0)
        expected = ends(meeting)
        root = Path(name) / "killed"
        num_kills = num_ends = num_later = reached = least = 0
        repeated: list[int] = []
        while num_kills < args.kills or not num_later or not num_ends:
            more = num_kills < args.kills or not num_later
            ended, meeting, began, _ = attempt(root, generator.uniform(0, 0.5 * took_s) if more else None, least)
            if num_kills and least:
                repeated.append(max(0, reached - began))
                num_later += began % DURABLE_EVERY != 0
            progress = meeting / "progress-0"  # rank 0's thread ends when all hold a generation
            seen = json.loads((progress.read_text() if progress.exists() else "") or "[0, 0]")
            reached, least = max(began, seen[0]), max(began, seen[1])
            if ended:
                num_ends += 1
                assert ends(meeting) == expected, "the end is not that of the undisturbed run"
                assert not list(root.glob("local/*/*")), "local copies are left"
                shutil.rmtree(root)
                reached = least = 0
            num_kills += not ended
            left = list(root.glob("local/*/*/step-*"))
            assert len(left) <= 3, f"generations accumulate: {left}"
            shutil.rmtree(meeting)
        print(  # noqa: T201
            f"{num_kills} kills, {num_ends} ends equal to the undisturbed one; {num_later} resumes from local copies; "
            f"steps repeated: {sorted(repeated)}"
        )


if __name__ == "__main__":
    main()
