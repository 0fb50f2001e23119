"""Starts a script under observation: `evenstep run` runs a module of evenstep, which runs the script in each rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

MADE = "made-directories"
"""The name of the file, in a run's directory, that lists the directories which the script has made elsewhere."""

_STOPS_WITHIN_S = 30.0
_LONGEST_TAIL = 4000
_Plan = TypeVar("_Plan", bound="Plan")


@dataclass(frozen=True)
class Plan:
    """The instructions for the ranks of a run, passed in a file.

    Attributes:
        directory: The directory that the ranks write to.
    """

    directory: str

    def write(self, path: Path) -> None:
        """Write the plan to a file."""
        path.write_text(json.dumps(vars(self)))

    @classmethod
    def read(cls: type[_Plan], path: Path) -> _Plan:
        """Read a plan that `write` wrote."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Observed:
    """A script to run under observation.

    Attributes:
        module: The module that runs the script in each rank. It gets its own arguments, the script and the script's.
        script: The user's script. It runs unchanged.
        arguments: The command-line arguments of the script.
        ranks: The number of ranks.
        device: The value of `evenstep run --device`; None: GPUs if there are any.
        threads: The number of threads of each rank; None: `evenstep run` chooses.
        options: Further options of `evenstep run`.
    """

    module: str
    script: str
    arguments: Sequence[str]
    ranks: int
    device: str | None = None
    threads: int | None = None
    options: Sequence[str] = ()

    def command(self, directory: Path, plan: Sequence[str]) -> list[str]:
        """The command line of the run. The ranks' logs go to `directory`. The module gets `plan` before the script."""
        command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", str(self.ranks), *self.options]
        command += ["--log-dir", str(directory / "logs")]
        command += [] if self.threads is None else ["--threads-per-rank", str(self.threads)]
        command += [] if self.device is None else ["--device", self.device]
        return [*command, "-m", self.module, *plan, self.script, *self.arguments]


class Launched:
    """A run in progress.

    Attributes:
        process: The launcher; its ranks die with it.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    def said(self) -> str:
        """The last part of the run's output."""
        return self._log.read_text(errors="replace")[-_LONGEST_TAIL:].rstrip()


@contextlib.contextmanager
def launched(
    observed: Observed, directory: Path, env: Mapping[str, str], plan: Sequence[str] = (), *, goes_on: bool = False
) -> Iterator[Launched]:
    """Start a run. At the end of the `with`, the run is stopped if it hasn't ended.

    Empty directories that the script has made are then removed.

    Args:
        observed: The script, and how to run it.
        directory: The directory of the run, for its output.
        env: The environment variables of the run.
        plan: The arguments of the module that come before the script.
        goes_on: Whether another run resumes this one. Then the script's directories stay.
    """
    log = directory / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            observed.command(directory, plan),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Launched(process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if not goes_on:
            remove_made(directory)


def remove_made(directory: Path) -> None:
    """Remove the empty directories that scripts have made, for all runs with directories below this one."""
    for file in list(directory.rglob(MADE)):
        for path in sorted(set(file.read_bytes().split(b"\0")), key=len, reverse=True):
            with contextlib.suppress(OSError):  # it isn't empty, or is gone
                os.rmdir(path)
        file.unlink()


def leave_together(directory: Path, rank: int, world_size: int, limit_s: float) -> NoReturn:
    """End the script in this rank once all ranks are here, because the others may still need a rank that left first.

    Args:
        directory: The run's directory, the same on all ranks.
        rank: This rank.
        world_size: The number of ranks.
        limit_s: The longest time to wait for the other ranks.
    """
    (directory / f"left-{rank}").touch()
    deadline = time.monotonic() + limit_s
    while len(list(directory.glob("left-*"))) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.current_thread() is not threading.main_thread():
        os._exit(0)
    raise SystemExit(0)
