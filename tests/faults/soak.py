"""Trains under a rain of faults, and compares the end, bit for bit, with training that was left alone.

    python -m tests.faults.soak --minutes 30             # `make stress PART=soak`
    python -m tests.faults.soak --clean-steps 100000     # `make stress PART=clean`: nothing may be said

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


def undisturbed(directory: Path, num_steps: int) -> str:
    """The digest of the parameters after so many steps that nobody disturbs."""
    (directory / "quiet-diary").mkdir()
    target = ["--diary", str(directory / "quiet-diary"), "--steps", str(num_steps), "--pause-s", "0"]
    command = launch(directory / "quiet", ["--nproc-per-node", "2"], target)
    status = command.process.wait()
    found = ENDED.search(command.stdout)
    assert status == 0, command.stderr
    assert found, command.stdout
    return found[2]


def soak(directory: Path, minutes: float, seed: int) -> int:
    """Train under faults until the time is up; the exit status of this program."""
    diary = directory / "diary"
    diary.mkdir()
    deadline = time.monotonic() + 60 * minutes
    faults: Counter[str] = Counter()
    num_restarts = num_launchers = 0
    found = None
    flags = ["--nproc-per-node", "2", "--max-restarts", "1000000", "--stopped-grace", "0"]
    target = ["--diary", str(diary), "--steps", "1000000000", "--save-every", "20", "--pause-s", "0.01"]
    while found is None:
        num_launchers += 1
        seeds = ["--soak-seed", str(seed + num_launchers)]
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
    expected = undisturbed(directory, num_steps)
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
    args = parser.parse_args()
    say(f"seed {args.seed}")
    with tempfile.TemporaryDirectory(prefix="evenstep-soak-", ignore_cleanup_errors=True) as directory:
        if args.clean_steps:
            return clean(Path(directory), args.clean_steps)
        return soak(Path(directory), args.minutes, args.seed)


if __name__ == "__main__":
    sys.exit(main())
