"""Kills random ranks of `evenstep run --recover` at random instants, and compares how the runs end.

    python -m tests.faults.recovery_loop --kills 300
    python -m tests.faults.recovery_loop --soak-minutes 30

Most are killed, some crash, some are stopped until the launcher gives them up. Four kinds of run in turn: ranks are
replaced or not, in the ordinary and in reproducible mode, on 2 to 4 ranks. Where they are replaced, the run ends with
the bits of the undisturbed one, also with dropout and batch normalisation. A run that shrinks ends with the same bits
in reproducible mode, and else, in float64, within 1e-12. Of the steps that a rank had finished one is repeated at
most; nothing is loaded from a disk, nothing is left behind.

The soak is one run of 3 ranks that loses one every ten seconds. No attempt is restarted.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from evenstep.health.heartbeat import Heartbeat, read_page
from tests.commands import Command, is_running, start

NUM_STEPS = 60
TRAINS = """
    import os, random, sys, time
    import evenstep, torch
    from torch import nn

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 92

        def __getitem__(self, index):
            x = torch.sin(torch.arange(16.0, dtype=torch.float64) * (index + 1))
            return x if is_plain else x + 0.01 * random.random()

    is_reproducible, is_plain = "reproducible" in sys.argv, "plain" in sys.argv
    with evenstep.init(seed=1, quiet=True, reproducible=is_reproducible) as world:
        noise = [] if is_plain else [nn.Dropout(0.1)]
        norm = [] if is_plain or is_reproducible else [nn.BatchNorm1d(1024)]
        layers = nn.Linear(16, 1024), *norm, nn.GELU(), *noise, nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1)
        net = nn.Sequential(*layers).double()
        model = evenstep.DistributedDataParallel(net, bucket_cap_mb=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
        loader = evenstep.DataLoader(Samples(), global_batch_size=12, shuffle=True)
        checkpoint = evenstep.Checkpointer(
            "saved", every_minutes=None, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
        )
        resumed = checkpoint.resume()

        def is_enough():
            if "soak" not in sys.argv:
                return checkpoint.num_steps >= NUM_STEPS
            time.sleep(0.05)
            return world.broadcast_object(os.path.exists("enough"))

        def train(diary):
            diary.write(f"{resumed}\\n")
            if is_enough():
                return
            for epoch in loader.epochs(1_000_000):
                for batch in loader:
                    for x in model.microbatches(batch) if is_reproducible else [batch]:
                        model.backward(model(x).square().mean(), weight=len(x))
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    checkpoint.step()
                    diary.write(f"{checkpoint.num_steps}\\n")
                    if is_enough():
                        return

        with open(f"diary-{os.getpid()}", "w", buffering=1) as diary:
            train(diary)
        if world.is_main:
            torch.save(net.state_dict(), "ended")
"""
FAULTS = [*[signal.SIGKILL] * 6, signal.SIGSEGV, signal.SIGSTOP]
KINDS = [("replace", []), ("replace", ["reproducible"]), ("shrink", ["plain"]), ("shrink", ["reproducible"])]


def launch(
    directory: Path, recover: str, num_ranks: int, arguments: list[str], *, num_steps: int = NUM_STEPS
) -> Command:
    """One run, in a directory of its own."""
    directory.mkdir(parents=True)
    flags = ["--nproc-per-node", str(num_ranks), "--device", "cpu", "--threads-per-rank", "1", "--recover", recover]
    flags += ["--stopped-grace", "1"]
    return start(directory, [*flags, "script.py", *arguments], TRAINS.replace("NUM_STEPS", str(num_steps)))


def ended(directory: Path) -> dict[str, torch.Tensor]:
    """The state of the model at the end of a run."""
    state: dict[str, torch.Tensor] = torch.load(directory / "ended")
    return state


def pages(command: Command) -> list[Heartbeat]:
    """Of the ranks that run now."""
    found = (read_page(path) for path in command.temporary.glob("evenstep-run-*/page-*"))
    return [page for page in found if page is not None and is_running(page.pid)]


def kill_some(command: Command, generator: random.Random) -> int:
    """Kill ranks of a run until it ends by itself; returns how many were killed.

    One of the ranks that were started together is always left: what all have computed would be lost with the last.
    """
    num_kills = num_early = 0
    before: set[int] = set()  # processes of ranks that have lost one, or were killed

    def watch(until: Callable[[list[Heartbeat]], bool], most_s: float = 120.0) -> list[Heartbeat]:
        deadline = time.monotonic() + most_s
        while command.process.poll() is None and time.monotonic() < deadline:
            seen = [page for page in pages(command) if page.pid not in before]
            if until(seen):
                return seen
            time.sleep(0.001)
        return [page for page in pages(command) if page.pid not in before]

    while command.process.poll() is None:
        is_early = num_kills > 0 and num_early < 2 and generator.random() < 0.25  # while the next ones start
        num_early = num_early + 1 if is_early else 0
        least = 0 if is_early else 1
        watch(lambda seen, least=least: bool(seen) and min(page.step for page in seen) >= least)  # type: ignore[misc]
        seen = watch(lambda _: False, generator.uniform(0, 0.3 if is_early else 1.5))
        if len(seen) < 2 or (not num_kills and min(page.step for page in seen) == 0):
            if len(seen) == 1:  # alone it can't lose anybody
                command.wait()
            continue
        victim, *left = generator.sample(seen, len(seen))
        os.kill(victim.pid, generator.choice(FAULTS))
        num_kills += 1
        if len(left) > 1 and generator.random() < 0.3:  # another one, perhaps the one that saves
            time.sleep(generator.uniform(0, 0.3))
            if is_running(left[0].pid) and any(is_running(each.pid) for each in left[1:]):
                os.kill(left[0].pid, signal.SIGKILL)
                num_kills += 1
        before |= {page.pid for page in seen}
    return num_kills


def steps_repeated(directory: Path) -> int:
    """The most steps that any recovery had to repeat, of those that a rank had finished."""
    diaries = [path.read_text().split() for path in directory.glob("diary-*")]
    sessions = [(int(lines[0]), int(lines[-1])) for lines in diaries if lines]
    most = 0
    for began, _ in sessions:
        before = [reached for other, reached in sessions if other < began]
        most = max([most, *(reached - began for reached in before)])
    return most


def assert_nothing_left(command: Command) -> None:
    """No process and no file, but the calls that ranks note when they wait long."""
    assert command.leaves_no_process()
    left = [each for each in command.left_files() if not each.startswith("evenstep-calls-")]
    assert not left, left


def soak(root: Path, generator: random.Random, minutes: float, every_s: float) -> None:
    """One run that loses a rank every so many seconds, beside one of as many steps that loses none."""
    directory = root / "soak"
    command = launch(directory, "replace", 3, ["soak"])
    ends = time.monotonic() + 60 * minutes
    num_faults = 0
    while time.monotonic() < ends:
        time.sleep(every_s)
        assert command.process.poll() is None, command.stderr
        seen = [page for page in pages(command) if page.step]
        if len(seen) == 3:
            os.kill(generator.choice(seen).pid, generator.choice(FAULTS))
            num_faults += 1
    (directory / "enough").touch()
    assert command.wait() == 0, command.stderr
    told = command.stderr
    assert "restarting" not in told, told
    assert "on disk" not in told, told
    assert len(re.findall(r"recovery \d+:", told)) == num_faults, told
    assert steps_repeated(directory) <= 1, told
    num_steps = max(int(path.read_text().split()[-1]) for path in directory.glob("diary-*"))
    undisturbed = launch(root / "undisturbed", "replace", 3, [], num_steps=num_steps)
    assert undisturbed.process.wait(60 + 60 * minutes) == 0, undisturbed.stderr
    for key, value in ended(root / "undisturbed").items():
        assert torch.equal(value, ended(directory)[key]), f"{key}\n{told}"
    assert_nothing_left(command)
    print(f"{minutes:g} minutes, {num_steps} steps: {told.splitlines()[-1]}")  # noqa: T201


def main() -> None:
    """Exit status 0 if every run ended as it should."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--soak-minutes", type=float, default=0.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults of the soak")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)  # noqa: T201
    generator = random.Random(args.seed)
    if args.soak_minutes:
        with tempfile.TemporaryDirectory(prefix="evenstep-recoveries-") as name:
            soak(Path(name), generator, args.soak_minutes, args.every)
        return
    kills: Counter[str] = Counter()
    lost: list[float] = []
    num_runs = num_recoveries = 0
    with tempfile.TemporaryDirectory(prefix="evenstep-recoveries-") as name:
        root, expected = Path(name), {}
        while kills.total() < args.kills:
            recover, arguments = KINDS[num_runs % len(KINDS)]
            num_ranks = generator.choice([2, 4] if "reproducible" in arguments else [2, 3, 4])
            kind = (num_ranks, *arguments)
            if kind not in expected:
                directory = root / f"undisturbed-{len(expected)}"
                assert launch(directory, recover, num_ranks, arguments).wait() == 0, (directory / "stderr").read_text()
                expected[kind] = ended(directory)
            num_runs += 1
            directory = root / f"run-{num_runs}"
            command = launch(directory, recover, num_ranks, arguments)
            killed = kill_some(command, generator)
            status, told = command.wait(), command.stderr
            assert status == 0, f"{kind} {recover}: status {status}\n{told}"
            kills[f"{recover} {' '.join(arguments)}".strip()] += killed
            num_recoveries += len(re.findall(r"recovery \d+:", told))
            assert "on disk" not in told or killed == 0, told
            if found := re.search(r"([\d.]+) s lost", told):
                lost.append(float(found[1]) / max(1, len(re.findall(r"recovery \d+:", told))))
            assert steps_repeated(directory) <= 1, (steps_repeated(directory), told)
            for key, value in ended(directory).items():
                other = expected[kind][key]
                if "plain" in arguments:
                    assert torch.allclose(value, other, rtol=0, atol=1e-12), f"{kind}: {key}\n{told}"
                else:
                    assert torch.equal(value, other), f"{kind}: {key}\n{told}"
            assert_nothing_left(command)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in sorted(kills.items()))
    middle_s = sorted(lost)[len(lost) // 2] if lost else 0.0
    print(  # noqa: T201
        f"{kills.total()} kills ({by_kind}) in {num_runs} runs, {num_recoveries} recoveries, {middle_s:.2f} s lost by "
        f"one (median of runs); all ended as undisturbed, nothing left behind"
    )


if __name__ == "__main__":
    main()
