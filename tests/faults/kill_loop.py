"""Kills all ranks of a run with SIGKILL at random instants, starts it again, and compares how it ends.

    python -m tests.faults.kill_loop --kills 200
    python -m tests.faults.kill_loop --kills 50 --s3        # in a bucket of a server on the loopback

A process of its own, which imports torch once and forks the ranks, so that a start costs a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

import evenstep
from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.format.payload import bytes_of
from evenstep.checkpoint.store import storage_at
from evenstep.ground import environment
from tests.checkpoint_runs import Training
from tests.object_store import s3_server_apart

NUM_RANKS = 2


def digest(run: Training) -> dict[str, object]:
    """What a rank has at the end, in numbers."""
    return {
        name: zlib.crc32(bytes_of(value.contiguous())) if isinstance(value, torch.Tensor) else repr(value)
        for name, value in run.everything().items()
    }


def train(directory: str, meeting: Path, rank: int, last_step: int) -> None:
    """One rank: says where it resumed, trains with a save per step, says what it ended with."""
    store = str(meeting / "store")
    environment.export(environment.rank_variables(rank=rank, world_size=NUM_RANKS, device="cpu", store=store))
    torch.set_num_threads(1)
    with evenstep.init(quiet=True) as world:
        run = Training(directory, world, every_steps=1, every_minutes=None, keep=2)
        resumed = run.checkpoint.resume()
        (meeting / f"began-{rank}").write_text(str(resumed))
        run.run_to(last_step)
        (meeting / f"ended-{rank}.tmp").write_text(json.dumps(digest(run)))
        (meeting / f"ended-{rank}.tmp").rename(meeting / f"ended-{rank}")


def fork_rank(meeting: Path, rank: int, run: Callable[[], object]) -> int:
    """Fork a rank that runs something, with stderr in a file; its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sys.stderr = (meeting / f"stderr-{rank}").open("w")
            run()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            # As a process ends that was started: after its last save, which is no daemon's.
            for thread in threading.enumerate():
                if thread.name.startswith("evenstep save"):
                    thread.join()
            os._exit(status)
    return pid


def start(directory: str, meeting: Path, last_step: int) -> list[int]:
    """Fork the ranks."""
    return [
        fork_rank(meeting, rank, lambda rank=rank: train(directory, meeting, rank, last_step))
        for rank in range(NUM_RANKS)
    ]


def began(meeting: Path) -> list[int]:
    """Where each rank has resumed, as far as it has."""
    return [int(path.read_text() or -1) for path in sorted(meeting.glob("began-*"))]


def wait_for_start(meeting: Path, pids: list[int]) -> list[int]:
    """Until all ranks train."""
    deadline = time.monotonic() + 120
    while len(steps := began(meeting)) < NUM_RANKS or -1 in steps:
        if time.monotonic() > deadline or os.waitpid(pids[0], os.WNOHANG)[0]:
            told = "\n".join(path.read_text() for path in sorted(meeting.glob("stderr-*")))
            raise SystemExit(f"the ranks did not start:\n{told}")
        time.sleep(0.002)
    return steps


def main() -> None:
    """Exit status 0 if every start continued from the newest commit and every end was the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)  # noqa: T201
    generator = random.Random(args.seed)
    with (
        tempfile.TemporaryDirectory(prefix="evenstep-kills-") as name,
        s3_server_apart() if args.s3 else contextlib.nullcontext(name) as place,
    ):
        root = Path(name)
        number = 0

        def attempt(directory: str, after_s: float | None) -> tuple[bool, Path, float]:
            """Whether the run ended by itself, where its ranks met, how long it took."""
            nonlocal number
            number += 1
            meeting = root / f"meeting-{number}"
            meeting.mkdir()
            newest = max(checkpoints_in(storage_at(directory)), default=0)
            pids = start(directory, meeting, args.steps)
            resumed = wait_for_start(meeting, pids)
            assert resumed == [newest] * NUM_RANKS, f"resumed from {resumed}, and {newest} was the newest commit"
            began_at = time.monotonic()
            while after_s is not None and time.monotonic() - began_at < after_s:
                time.sleep(min(0.001, after_s))
            if after_s is not None:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            took_s = time.monotonic() - began_at
            ended = codes == [0] * NUM_RANKS
            if not ended and after_s is None:
                raise AssertionError("\n".join(path.read_text() for path in sorted(meeting.glob("stderr-*"))))
            return ended, meeting, took_s

        def ends(meeting: Path) -> list[object]:
            return [json.loads((meeting / f"ended-{rank}").read_text()) for rank in range(NUM_RANKS)]

        _, meeting, took_s = attempt(f"{place}/straight", None)
        expected = ends(meeting)
        directory = f"{place}/killed"
        storage = storage_at(directory)
        num_kills = num_ends = 0
        reached: set[int] = set()
        while num_kills < args.kills:
            ended, meeting, _ = attempt(directory, generator.uniform(0, 0.5 * took_s))
            num_kills += not ended
            reached |= set(checkpoints_in(storage_at(directory)))
            left = [name for name in storage.list() if name.startswith("step-")]
            assert len(left) <= 5, f"parts of saves accumulate: {left}"
            if ended:
                num_ends += 1
                assert ends(meeting) == expected, "the end is not that of the undisturbed run"
                for name in storage.list():
                    storage.remove(name)
            shutil.rmtree(meeting)
        _, meeting, _ = attempt(directory, None)
        assert ends(meeting) == expected, "the end is not that of the undisturbed run"
        folders = checkpoints_in(storage_at(directory))
        assert list(folders) == [args.steps - 1, args.steps]
        (lock,) = set(storage.list()) - set(folders.values())
        assert json.loads(storage.read(lock, most_bytes=1 << 20))["released"]
        print(  # noqa: T201
            f"{num_kills} kills, {num_ends + 1} ends equal to the undisturbed one, commits of {len(reached)} different "
            f"steps, nothing left behind"
        )


if __name__ == "__main__":
    main()
