"""Workers of parameter servers that are killed beside their loader's processes, and some that are busy."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from evenstep.ground.host.processes import children
from tests.commands import Command
from tests.faults.server_kills import processes_of, write_script
from tests.faults.test_server_faults import counts, has_saved, start

pytestmark = pytest.mark.extended

HOLDS = """
import ctypes

num_steps = 0


class Holds(torch.optim.SGD):
    def step(self, closure=None):
        hold()
        super().step()


def hold():
    global num_steps
    num_steps += 1
    if num_steps == 15:  # as native code that doesn't release the interpreter
        ctypes.PyDLL(None).usleep(5_000_000)


class Counts"""


def test_a_worker_is_killed_whose_loader_has_processes(tmp_path: Path):
    """They live a while longer. Its end is seen at once: a silence would take longer than this test may."""
    write_script(tmp_path, samples=60, epochs=25, batches_s=0.02, every=20, mode="async")
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("queue=ps.queue())", "queue=ps.queue(), num_workers=2)"))
    command = start(tmp_path, "--node-timeout", "3600")
    command.wait_until(lambda: has_saved(tmp_path))
    pid = processes_of(command)[1]
    assert len(children(pid)) == 2
    os.kill(pid, signal.SIGKILL)
    assert command.wait() == 0, command.stderr
    assert sorted(counts(command)) == [("0", "25.0"), ("2", "25.0")], command.stdout + command.stderr
    assert "worker 1 was lost; its batches go to the others" in command.stdout + command.stderr


@pytest.mark.parametrize("who", ["workers", "servers"])
def test_who_holds_the_interpreter_for_longer_than_the_node_timeout_is_not_lost(who: str, tmp_path: Path):
    write_script(tmp_path, samples=60, epochs=6, batches_s=0.01, every=20, mode="async")
    script = tmp_path / "train.py"
    text = script.read_text().replace("class Counts", HOLDS.lstrip("\n"), 1)
    if who == "servers":
        text = text.replace("torch.optim.SGD(p, lr=1.0)", "Holds(p, lr=1.0)")
    else:
        text = text.replace("            ps.step()\n", "            hold()\n            ps.step()\n")
    assert text != script.read_text().replace("class Counts", HOLDS.lstrip("\n"), 1)
    script.write_text(text)
    command: Command = start(tmp_path, "--node-timeout", "1")
    assert command.wait() == 0, command.stderr
    assert sorted(counts(command)) == [(str(worker), "6.0") for worker in range(3)], command.stdout + command.stderr
    assert not re.search(r"lost|stranger|refused", command.stderr), command.stderr
