"""Progress where there is a terminal, and where there is none."""

from __future__ import annotations

import io
import sys

import pytest

import evenstep
from evenstep import console


def test_what_a_line_quotes_cannot_command_the_terminal(capsys):
    """The last lines of a log, a script's name, a stack; a name that isn't UTF-8."""
    console.say("the end:\n\t\x1b[2J\x1b]0;title\x07\r grün \udcff")
    assert capsys.readouterr().err == "the end:\n\t\\x1b[2J\\x1b]0;title\\x07\\r grün \\udcff\n"


def test_plain_lines_come_per_interval_and_at_the_end(capsys):
    assert list(console.progress([1, 2, 3], description="epoch 0", interval_s=0.0)) == [1, 2, 3]
    *each, last = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in each] == ["epoch 0: 1/3", "epoch 0: 2/3", "epoch 0: 3/3"]
    assert last.startswith("epoch 0: 3/3 in ")


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert list(console.progress(range(4), description="epoch 7")) == [0, 1, 2, 3]
    assert "epoch 7" in sys.stderr.getvalue()
    assert "4/4" in sys.stderr.getvalue()


def test_an_error_in_the_loop_goes_through(capsys):
    steps = console.progress([1, 2], description="steps")
    next(steps)
    with pytest.raises(KeyError):
        steps.throw(KeyError())
    assert "steps: 0/2" in capsys.readouterr().err


def test_a_world_describes_the_epoch_of_a_loader(capsys):
    world = evenstep.World.alone(device="cpu")
    loader = evenstep.DataLoader(range(5), global_batch_size=2, world=world)
    for _ in loader.epochs(2):
        assert len(list(world.progress(loader))) == 3
    told = capsys.readouterr().err.splitlines()
    assert [line.split(" in ")[0] for line in told] == ["epoch 0: 3/3", "epoch 1: 3/3"]
