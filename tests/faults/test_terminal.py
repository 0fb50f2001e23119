"""`evenstep run` on a terminal, without one, and with streams that can't be written: as torchrun has it, or better."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.ground.host.processes import is_running

RUN = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "2", "--device", "cpu"]
# Becomes the command, with the terminal that is its stdin as the one that controls it.
ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A command in the foreground of a terminal of its own."""

    def __init__(self, directory: Path, command: list[str]) -> None:
        self.keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *command],
            cwd=directory,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
        os.close(screen)

    def close(self) -> None:
        """As a window or a connection is closed."""
        if self.keyboard >= 0:
            os.close(self.keyboard)
        self.keyboard = -1

    def end(self) -> int:
        """Its exit status, once it has ended."""
        try:
            return self.process.wait(90)
        finally:
            self.process.kill()
            self.process.wait()
            self.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pids_of(directory: Path) -> list[int]:
    """The ranks, once both are there."""
    files = [directory / "pid-0", directory / "pid-1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


PRINTS = """
    import os, sys, time
    import evenstep, torch

    with evenstep.init() as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
        checkpoint = evenstep.Checkpointer("runs", model=model)
        for step in range(100_000):
            time.sleep(0.01)
            print("step", step)
            print("step", step, file=sys.stderr)
            checkpoint.step()
            if step == 3:
                with open(f"pid-{world.rank}", "w") as file:
                    file.write(str(os.getpid()))
"""


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["--cold-start"], marks=pytest.mark.extended),
        pytest.param(["--all-ranks"], marks=pytest.mark.extended),
    ],
)
def test_a_terminal_that_is_closed_saves_though_the_script_goes_on_printing(tmp_path: Path, flags: list[str]) -> None:
    """Who prints to a terminal that has gone gets an error, and rank 0 has the launcher's."""
    (tmp_path / "script.py").write_text(textwrap.dedent(PRINTS))
    terminal = Terminal(tmp_path, [*RUN, *flags, "script.py"])
    pids = pids_of(tmp_path)
    terminal.close()
    assert terminal.end() == 75
    assert not any(map(is_running, pids))
    assert [*(tmp_path / "runs").glob("step-*")]


def test_a_second_ctrl_c_on_a_terminal_kills(tmp_path: Path) -> None:
    """The terminal signals its foreground, to which the ranks don't belong."""
    script = """
        import os, signal, time
        signal.signal(signal.SIGINT, lambda *_: open(f"heard-{os.environ['RANK']}", "w").close())
        time.sleep(1)  # on a busy machine the launcher isn't done yet with its start, of which Ctrl-C is another test
        with open(f"pid-{os.environ['RANK']}", "w") as file:
            file.write(str(os.getpid()))
        while True:
            time.sleep(1)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    terminal = Terminal(tmp_path, [*RUN, "--shutdown-timeout", "80", "script.py"])
    pids = pids_of(tmp_path)
    os.write(terminal.keyboard, b"\x03")
    wait_until((tmp_path / "heard-1").exists)
    os.write(terminal.keyboard, b"\x03")
    assert terminal.end() == 130
    assert not any(map(is_running, pids))


SAYS = """
    import os, sys
    with open(f"told-{os.environ['RANK']}", "w") as file:
        print(sys.argv[1:], repr(sys.stdin and sys.stdin.readline()), file=file)
    print("from rank", os.environ["RANK"])
"""


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(
    ("streams", "out", "err"),
    [
        ("2>/dev/full", "from rank 0\n", ""),
        ("2>&-", "from rank 0\n", ""),
        (">&-", "", "evenstep: 2 ranks on 1 node, cpu, 1 thread per rank\n"),
        pytest.param("<&- >&- 2>&-", "", "", marks=pytest.mark.extended),
    ],
)
def test_streams_that_are_full_or_closed_end_no_run(tmp_path: Path, streams: str, out: str, err: str) -> None:
    """A line of the launcher's that can't be written isn't worth a run, and goes to no other stream."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SAYS))
    shell = ["sh", "-c", f'"$@" {streams}', "sh"]
    done = subprocess.run(
        [*shell, *RUN, "--threads-per-rank", "1", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)
    assert (tmp_path / "told-1").exists()


@pytest.mark.parametrize("flags", [[], pytest.param(["--cold-start"], marks=pytest.mark.extended)])
def test_stdin_arguments_and_names_with_spaces_reach_the_script(tmp_path: Path, flags: list[str]) -> None:
    """As torchrun passes them: the first `--` separates, and isn't passed on; the others are."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "my script.py").write_text(textwrap.dedent(SAYS))
    command = [*RUN[:-3], "1", *flags, "a b/my script.py", "--", "--nnodes", "a b", "--", ""]
    done = subprocess.run(command, cwd=tmp_path, input="typed\nmore\n", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "from rank 0\n"), done.stderr
    assert (tmp_path / "told-0").read_text() == "['--nnodes', 'a b', '--', ''] 'typed\\n'\n"
