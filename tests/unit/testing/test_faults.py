"""Faults on request, in this process: understood, counted, taken back."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from evenstep.cli.main import main
from evenstep.errors import ConfigurationError
from evenstep.testing.faults import KINDS, Fault, install, parse_faults
from tests import modules


def test_texts() -> None:
    assert parse_faults("kill:rank=1,step=7; stop:rank=0,step=2,phase=optimizer;") == [
        Fault("kill", 1, 7),
        Fault("stop", 0, 2, "optimizer"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_fault_says_of_itself_is_understood(kind: str) -> None:
    fault = Fault(kind, 1, 2)
    assert parse_faults(str(fault)) == [fault]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no fault"),
        ("kill", "rank= and step= are needed"),
        ("explode:rank=1,step=2", "'explode': use one of kill"),
        ("delay:rank=1,step=2", "'delay': use one of kill"),
        ("kill:rank=one,step=2", "'rank=one' is malformed"),
        ("kill:rank=1,step=2,phase=lunch", "no phase 'lunch'"),
        ("kill:rank=1,step=-2", "at least 0"),
        ("nan:rank=1,step=2,phase=optimizer", "leave out the phase"),
    ],
)
def test_texts_that_are_none(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_faults(text)
    assert main(["run", "--nproc-per-node", "1", f"--inject={text}", __file__]) == 78
    assert message in capsys.readouterr().err


def train(num_steps: int) -> list[float]:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for _ in range(num_steps):
        model(torch.ones(1, 1)).sum().backward()
        weight = next(model.parameters()).grad
        assert weight is not None
        gradients.append(weight.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(1, 1))  # an evaluation is no step's forward pass
    return gradients


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_it_strikes_in_its_step_and_phase_and_only_there(phase: str) -> None:
    remove = install(f"raise:rank=0,step=2,phase={phase};raise:rank=1,step=0", rank=0)
    try:
        assert len(train(2)) == 2
        with pytest.raises(RuntimeError, match=f"injected: raise:rank=0,step=2,phase={phase}"):
            train(1)
        assert len(train(3)) == 3, "once"
    finally:
        remove()


def test_steps_of_several_optimizers_are_counted_apart() -> None:
    """As the launcher counts them, and a script's author."""
    others = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(3)]
    remove = install("raise:rank=0,step=1", rank=0)
    try:
        for each in others:
            each.step()
        with pytest.raises(RuntimeError, match="step=1"):
            train(1)
    finally:
        remove()


def test_a_gradient_is_spoilt_once() -> None:
    remove = install("nan:rank=0,step=1", rank=0)
    try:
        assert [math.isnan(gradient) for gradient in train(2)] == [False, True]
    finally:
        remove()
    assert not any(map(math.isnan, train(2)))


PLANTS = """
    import os, socket, subprocess, sys, tempfile

    open("/dev/shm/evenstep-planted-" + os.path.basename(os.getcwd()), "w").close()
    open("forgotten", "w").close()
    open(os.path.join(tempfile.gettempdir(), "also-forgotten"), "w").close()
    named = socket.socket(socket.AF_UNIX)
    named.bind(os.path.join(tempfile.gettempdir(), "named"))
    lives_on = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(1, flush=True); time.sleep(60)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen([sys.executable, "-c", lives_on], start_new_session=True, **pipes)
    child.stdout.readline()
"""


def test_the_benchmark_of_faults_finds_what_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its "left behind: 0" means something only if it can find a process, a port, a segment, a socket and files."""
    monkeypatch.syspath_prepend(modules.ROOT / "benchmarks")
    bench = modules.load(modules.ROOT / "benchmarks" / "faults.py", monkeypatch)
    call = bench.Call([sys.executable, "-c", textwrap.dedent(PLANTS)], tmp_path)
    try:
        status, _ = call.wait()
        assert status == 0, call.lines
        left = call.left()
    finally:
        for pid in call.processes():
            os.kill(pid, signal.SIGKILL)
        planted = Path("/dev/shm") / f"evenstep-planted-{tmp_path.name}"
        planted.unlink(missing_ok=True)
    assert len(left) == 5, left
    assert sum(re.fullmatch(r"process \d+ on port \d+", each) is not None for each in left) == 1
    files = {f"file {planted}", f"file {tmp_path / 'forgotten'}", f"file {call.temporary / 'also-forgotten'}"}
    assert files | {f"socket {call.temporary / 'named'}"} < set(left)
