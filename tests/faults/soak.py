"""Trains under a rain of faults, and compares the end, bit for bit, with training that was left alone.

    python -m tests.faults.soak --minutes 30             # `make stress PART=soak`
    python -m tests.faults.soak --clean-steps 100000     # `make stress PART=clean`: nothing may be said
    python -m tests.faults.soak --kill-every-s 20 --kind fsdp2 --ranks 3 --local-every 5

A fault of chance every five to fifteen seconds: a rank is killed, stopped or crashes, raises, leaves early; the
launcher is asked to stop or is killed. Launchers restart ranks; this process restarts launchers. The number of steps is
whatever was reached when the time was up.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.commands import Command

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "faulty_training.py"
ENDED = re.compile(r"ended at step (\d+) with (\w+)")
ALARMS = ("is stopped", "is slow", "has waited", "waits since", "wait since", "is not there")


def say(text: str) -> None:
    """To whoever started this."""
    print(text, flush=True)  # noqa: T201


def launch(directory: Path, flags: list[str], target: list[str]) -> Command:
    """One launcher, in a directory of its own."""
    directory.mkdir()
    return Command(directory, ["run", "--device", "cpu", "--threads-per-rank", "1", *flags, str(SCRIPT), *target])


def undisturbed(directory: Path, args: argparse.Namespace, num_steps: int) -> str:
    """The digest of the parameters after so many steps that nobody disturbs."""
    (directory / "quiet-diary").mkdir()
    target = ["--diary", str(directory / "quiet-diary"), "--steps", str(num_steps), "--pause-s", "0"]
    command = launch(directory / "quiet", ["--nproc-per-node", str(args.ranks)], [*target, "--kind", args.kind])
    status = command.process.wait()
    found = ENDED.search(command.stdout)
    assert status == 0, command.stderr
    assert found, command.stdout
    return found[2]


def losses(diary: Path) -> list[tuple[int, float]]:
    """Of each kill in the diary: how many steps were made again, and seconds until the first that is new."""
    steps: dict[int, dict[int, float]] = {}
    for file in diary.glob("steps-*-*"):
        of_attempt = steps.setdefault(int(file.name.split("-")[1]), {})
        for line in file.read_text().splitlines():
            step, _, at = line.split()
            of_attempt[int(step)] = max(of_attempt.get(int(step), 0.0), float(at))
    found = []
    for attempt, before in sorted(steps.items()):
        after, fault = steps.get(attempt + 1), diary / f"fault-{attempt}"
        if after and fault.exists() and max(before) + 1 in after:
            lost_s = after[max(before) + 1] - float(fault.read_text())
            found.append((max(before) - min(after) + 1, lost_s))
    return found


def soak(directory: Path, args: argparse.Namespace) -> int:
    """Train under faults until the time is up; the exit status of this program."""
    diary = directory / "diary"
    diary.mkdir()
    deadline = time.monotonic() + 60 * args.minutes
    faults: Counter[str] = Counter()
    num_restarts = num_launchers = 0
    found = None
    flags = ["--nproc-per-node", str(args.ranks), "--max-restarts", "1000000", "--stopped-grace", "0"]
    target = ["--diary", str(diary), "--steps", "1000000000", "--pause-s", str(args.pause_s), "--kind", args.kind]
    target += ["--save-every", str(args.save_every), "--local-every", str(args.local_every)]
    if args.kill_every_s:
        target += ["--faults", "kill", "--fault-every-s", str(args.kill_every_s)]
    while found is None:
        num_launchers += 1
        seeds = ["--soak-seed", str(args.seed + num_launchers)]
        command = launch(directory / f"launcher-{num_launchers}", flags, [*target, *seeds])
        while command.process.poll() is None:
            if time.monotonic() > deadline:
                (diary / "end").touch()
            if time.monotonic() > deadline + 600:
                for pid in command.processes():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        said = command.stderr
        for path in command.temporary.glob("evenstep-logs-*/rank-1*.log"):
            said += path.read_text()
        faults.update(re.findall(r"soak: attempt \d+: (\w+)", said))
        num_restarts += said.count("restarting all ranks")
        found = ENDED.search(command.stdout)
        status = command.process.returncode
        if found is None and status not in (75, -signal.SIGKILL):
            say(f"launcher {num_launchers} ended with {status}:\n{command.stderr[-3000:]}")
            return 1
        if not command.leaves_no_process():
            say(f"launcher {num_launchers} has left processes behind: {command.processes()}")
            return 1
        shutil.rmtree(command.directory)
    num_steps, digest = int(found[1]), found[2]
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    say(f"{num_steps} steps; faults: {told}; restarts of ranks: {num_restarts}, launchers: {num_launchers}")
    if args.kill_every_s and (lost := losses(diary)):
        repeated, seconds = [each for each, _ in lost], [each for _, each in lost]
        say(
            f"{args.kind} on {args.ranks} ranks: {len(lost)} kills; steps repeated: median "
            f"{statistics.median(repeated):g}, at most {max(repeated)}; seconds lost: median "
            f"{statistics.median(seconds):.2f}, {min(seconds):.2f} to {max(seconds):.2f}"
        )
    expected = undisturbed(directory, args, num_steps)
    say(f"parameters {digest[:16]}, undisturbed {expected[:16]}: {'equal' if digest == expected else 'DIFFERENT'}")
    return 0 if digest == expected else 1


def clean(directory: Path, num_steps: int) -> int:
    """Train with twice as many ranks as cores, and see that nothing is said; the exit status of this program."""
    (directory / "diary").mkdir()
    num_ranks = 2 * len(os.sched_getaffinity(0))
    target = ["--diary", str(directory / "diary"), "--steps", str(num_steps), "--pause-s", "0", "--pauses"]
    command = launch(directory / "clean", ["--nproc-per-node", str(num_ranks)], target)
    began = time.monotonic()
    status = command.process.wait()
    alarms = [line for line in command.stderr.splitlines() if any(word in line for word in ALARMS)]
    took_s = time.monotonic() - began
    say(f"{num_steps} steps on {num_ranks} ranks in {took_s:.0f} s: status {status}, {len(alarms)} alarms")
    say("\n".join(alarms))
    if status != 0:
        say(command.stderr[-3000:])
    return 0 if status == 0 and not alarms else 1


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clean-steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--kill-every-s", type=float, default=0.0, help="kill ranks, about so often; 0: all faults")
    parser.add_argument("--kind", default="plain", help="plain, sharded, fsdp2 or reproducible")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--local-every", type=int, default=0, help="steps between local saves; 0: none")
    parser.add_argument("--pause-s", type=float, default=0.01, help="of each step")
    args = parser.parse_args()
    say(f"seed {args.seed}")
    with tempfile.TemporaryDirectory(prefix="evenstep-soak-", ignore_cleanup_errors=True) as directory:
        if args.clean_steps:
            return clean(Path(directory), args.clean_steps)
        return soak(Path(directory), args)


if __name__ == "__main__":
    sys.exit(main())
