"""Starting a script under observation: `evenstep run`, with a module of ours that becomes the script in each rank."""

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
"""A file of this name, in a directory of a run, has the paths of the directories that the script has made there."""

_STOPS_WITHIN_S = 30.0
_LONGEST_TAIL = 4000
_Plan = TypeVar("_Plan", bound="Plan")


@dataclass(frozen=True)
class Plan:
    """What ranks have to know, in a file.

    Attributes:
        directory: Where they write.
    """

    directory: str

    def write(self, path: Path) -> None:
        """Leave it for the ranks."""
        path.write_text(json.dumps(vars(self)))

    @classmethod
    def read(cls: type[_Plan], path: Path) -> _Plan:
        """What `write` left."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Observed:
    """How a script is run.

    Attributes:
        module: Becomes the script in each rank, given what it has to know, the script and its arguments.
        script: The user's script; runs unchanged.
        arguments: Its own.
        ranks: How many.
        device: As `evenstep run --device`; None: GPUs if there are any.
        threads: How many each rank has; None: as `evenstep run` chooses.
        options: More of `evenstep run`'s.
    """

    module: str
    script: str
    arguments: Sequence[str]
    ranks: int
    device: str | None = None
    threads: int | None = None
    options: Sequence[str] = ()

    def command(self, directory: Path, plan: Sequence[str]) -> list[str]:
        """The whole of it; the ranks' logs go to a directory, and the module gets `plan` before the script."""
        command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", str(self.ranks), *self.options]
        command += ["--log-dir", str(directory / "logs")]
        command += [] if self.threads is None else ["--threads-per-rank", str(self.threads)]
        command += [] if self.device is None else ["--device", self.device]
        return [*command, "-m", self.module, *plan, self.script, *self.arguments]


class Launched:
    """A run under way.

    Attributes:
        process: The launcher; its ranks die with it.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    def said(self) -> str:
        """The last of what it has written to the screen."""
        return self._log.read_text(errors="replace")[-_LONGEST_TAIL:].rstrip()


@contextlib.contextmanager
def launched(
    observed: Observed, directory: Path, env: Mapping[str, str], plan: Sequence[str] = (), *, goes_on: bool = False
) -> Iterator[Launched]:
    """Start a run; at the end of the `with` it is stopped, with its ranks, if it hasn't ended.

    The directories that the script has made are removed then if they are empty.

    Args:
        observed: What is run.
        directory: What the run says goes there.
        env: The environment.
        plan: What the module gets before the script.
        goes_on: Another run resumes this one, so the script's directories stay.
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
    """Remove the empty directories that scripts have made whose runs had directories beneath this one."""
    for file in list(directory.rglob(MADE)):
        for path in sorted(set(file.read_bytes().split(b"\0")), key=len, reverse=True):
            with contextlib.suppress(OSError):  # it holds something, or has gone
                os.rmdir(path)
        file.unlink()


def leave_together(directory: Path, rank: int, world_size: int, limit_s: float) -> NoReturn:
    """End the script in this rank, once all ranks are here: those that left first would be missed by the others.

    Args:
        directory: The run's directory, the same on all ranks.
        rank: This one.
        world_size: How many ranks there are.
        limit_s: The others are awaited for so long.
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
