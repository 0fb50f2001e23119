"""Parameter servers whose processes are killed and stopped: each sample is applied once, and others go on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.commands import Command
from tests.faults.server_kills import processes_of, run_with_kills, write_script

pytestmark = pytest.mark.extended


def start(directory: Path, *flags: str, workers: int = 3) -> Command:
    arguments = ["run", "--servers", "2", "--nproc-per-node", str(workers), "--device", "cpu", "--all-ranks", *flags]
    return Command(directory, [*arguments, "train.py"])


def has_saved(directory: Path) -> bool:
    return any(directory.glob("counts/step-*/manifest.json"))


def counts(command: Command) -> list[str]:
    return re.findall(r"worker (\d): counts \[([^]]*)\], equal on both servers: True", command.stdout)


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_a_worker_that_is_killed_costs_nothing_but_time(mode: str, tmp_path: Path):
    """The others take its batches and go on, also where restarts are allowed."""
    write_script(tmp_path, samples=60, epochs=4, batches_s=0.02, every=20, mode=mode)
    command = start(tmp_path, "--max-restarts", "2")
    command.wait_until(lambda: has_saved(tmp_path))
    os.kill(processes_of(command)[1], signal.SIGKILL)
    assert command.wait() == 0, command.stderr
    assert sorted(counts(command)) == [("0", "4.0"), ("2", "4.0")], command.stdout + command.stderr
    assert "restarting" not in command.stderr
    assert re.search(
        r"worker 1 \(rank 1, pid \d+\) was killed by SIGKILL.*; the others go on without it", command.stderr
    )
    assert "worker 1 was lost; its batches go to the others" in command.stdout + command.stderr


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("server", "every", "mode"), [(0, 10, "async"), (1, 45, "bounded")])
def test_a_server_that_is_killed_ends_the_attempt(server: int, every: int, mode: str, tmp_path: Path):
    """The next one goes on from the newest checkpoint, also over a whole epoch: every sample is applied once."""
    write_script(tmp_path, samples=60, epochs=12, batches_s=0.02, every=every, mode=mode)
    command = start(tmp_path, "--max-restarts", "2", workers=2)
    command.wait_until(lambda: has_saved(tmp_path))
    time.sleep(0.01 * (every - 10))
    os.kill(processes_of(command)[2 + server], signal.SIGKILL)
    assert command.wait() == 0, command.stderr
    assert sorted(counts(command)) == [(str(worker), "12.0") for worker in range(2)], command.stdout + command.stderr
    assert re.search(rf"rank {2 + server} \(pid \d+\) was killed by SIGKILL", command.stderr), command.stderr
    assert "restarting all ranks: attempt 2 of 3" in command.stderr
    assert "resumed from" in command.stdout + command.stderr
    assert command.leaves_no_process()


def test_random_kills(tmp_path: Path, fresh_seed: int):
    write_script(tmp_path, samples=60, epochs=25, batches_s=0.02, every=15, mode="async")
    command, killed = run_with_kills(tmp_path, kills=5, seed=fresh_seed, pause_s=(0.3, 1.5))
    assert command.wait() == 0, (killed, command.stderr)
    assert {each for _, each in counts(command)} == {"25.0"}, (killed, command.stdout)


def test_a_stopped_worker_delays_nobody_in_async_and_is_named(tmp_path: Path):
    """It is killed in the end; its batch is the others', who still have epochs to go then."""
    write_script(tmp_path, samples=60, epochs=25, batches_s=0.02, every=20, mode="async")
    command = start(tmp_path, "--stopped-grace", "2")
    command.wait_until(lambda: has_saved(tmp_path))
    os.kill(processes_of(command)[1], signal.SIGSTOP)
    assert command.wait() == 0, command.stderr
    assert {worker for worker, _ in counts(command)} == {"0", "2"}
    assert {each for _, each in counts(command)} == {"25.0"}
    assert re.search(r"rank 1 \(pid \d+\) is stopped \(state T\).*it is killed after 2 s", command.stderr)


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(tmp_path: Path):
    """Samples that were pushed before are in the checkpoint; the others come when it goes on."""
    write_script(tmp_path, samples=60, epochs=12, batches_s=0.04, every=1_000_000, mode="async")
    command = start(tmp_path)
    command.wait_until(lambda: len(list(tmp_path.glob("worker-*-has-begun"))) == 3)
    time.sleep(0.5)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 75, command.stderr
    assert has_saved(tmp_path), command.stderr
    again = start(tmp_path)
    assert again.wait() == 0, again.stderr
    assert {each for _, each in counts(again)} == {"12.0"}, again.stdout
    assert "resumed from" in again.stdout + again.stderr
