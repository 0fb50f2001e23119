"""Calling the `evenstep` command from tests, and finding every process that such a call has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.ground.host.processes import is_running
from tests.launcher_server import ForkedCall, server

DEADLINE_S = 90.0


@dataclass
class Command:
    """One call of `python -m evenstep ...`, with a temporary directory of its own.

    Attributes:
        directory: Where it runs, and where its output is written.
        mark: In the environment of every process that it starts, and of theirs.
        fresh: Start a new python, and not a fork of one that has imported evenstep.
    """

    directory: Path
    arguments: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    fresh: bool = False

    def __post_init__(self) -> None:
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir(exist_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PET_", "OMP_NUM"))}
        env |= {"TMPDIR": str(self.temporary), "EVENSTEP_TEST_MARK": self.mark, **self.variables}
        with (self.directory / "stdout").open("wb") as out, (self.directory / "stderr").open("wb") as err:
            self.process: subprocess.Popen[bytes] | ForkedCall
            if not (self.fresh or os.environ.get("EVENSTEP_TEST_FRESH")):
                with open(os.devnull, "rb") as nothing:
                    descriptors = [nothing.fileno(), out.fileno(), err.fileno()]
                    self.process = server().start(self.arguments, env, self.directory, descriptors)
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "evenstep", *self.arguments],
                cwd=self.directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return (self.directory / "stdout").read_text()

    @property
    def stderr(self) -> str:
        """What it has written so far."""
        return (self.directory / "stderr").read_text()

    def wait(self) -> int:
        """Its exit status; killed, with all it started, if it takes too long."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"{self.arguments} hangs:\n{self.stdout}\n{self.stderr}") from None

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when something has come true while the command runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{self.arguments} did not get there:\n{self.stdout}\n{self.stderr}")
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """All processes alive that this call started, however far down."""
        return processes_with(self.mark)

    def leaves_no_process(self, *, within_s: float = 2.0) -> bool:
        """Whether all its processes are gone, at the latest after a while."""
        deadline = time.monotonic() + within_s
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.processes()

    def left_files(self) -> list[str]:
        """What it left in its temporary directory."""
        return sorted(path.name for path in self.temporary.iterdir())


def processes_with(mark: str) -> list[int]:
    """All processes alive whose environment has a mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = mark.encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if is_ours and is_running(int(process.name)):
            found.append(int(process.name))
    return found


def start(
    directory: Path, arguments: Sequence[str], script: str = "", *, fresh: bool = False, **variables: str
) -> Command:
    """Write `script` as `script.py` and start `evenstep run ARGUMENTS`; name the script in the arguments."""
    (directory / "script.py").write_text(textwrap.dedent(script))
    return Command(directory, ["run", *arguments], variables, fresh=fresh)


def call(
    directory: Path, arguments: Sequence[str], script: str = "", *, fresh: bool = False, **variables: str
) -> tuple[int, Command]:
    """`start`, and wait for the end."""
    command = start(directory, arguments, script, fresh=fresh, **variables)
    return command.wait(), command
