"""Parameter servers whose processes are killed and stopped: each sample is applied once, and others go on."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from pathlib import Path

import pytest

from tests.commands import Command
from tests.faults.server_kills import processes_in, run_with_kills, write_script

pytestmark = pytest.mark.extended


def start(directory: Path, *flags: str, workers: int = 3) -> Command:
    arguments = ["run", "--servers", "2", "--nproc-per-node", str(workers), "--device", "cpu", "--all-ranks", *flags]
    return Command(directory, [*arguments, "train.py"])


def has_saved(directory: Path) -> bool:
    return any(directory.glob("counts/step-*"))


def counts(command: Command) -> list[str]:
    return re.findall(r"worker (\d): counts \[([^]]*)\], equal on both servers: True", command.stdout)


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_a_worker_that_is_killed_costs_nothing_but_time(mode: str, tmp_path: Path):
    """The others take its batches and go on."""
    write_script(tmp_path, samples=60, epochs=4, batches_s=0.02, every=20, mode=mode)
    command = start(tmp_path)
    command.wait_until(lambda: has_saved(tmp_path))
    os.kill(processes_in(tmp_path)[1], signal.SIGKILL)
    assert command.wait() == 0, command.stderr
    assert counts(command) == [("0", "4.0"), ("2", "4.0")] or counts(command) == [("2", "4.0"), ("0", "4.0")]
    assert re.search(
        r"worker 1 \(rank 1, pid \d+\) was killed by SIGKILL.*; the others go on without it", command.stderr
    )
    assert "worker 1 was lost; its batches go to the others" in command.stdout + command.stderr


@pytest.mark.parametrize(("server", "every"), [(0, 10), (1, 45)])
def test_a_server_that_is_killed_comes_back(server: int, every: int, tmp_path: Path):
    """All go back to the newest checkpoint, also over a whole epoch, and every sample is applied once all the same."""
    write_script(tmp_path, samples=60, epochs=6, batches_s=0.02, every=every, mode="async")
    command = start(tmp_path, "--max-restarts", "2")
    command.wait_until(lambda: has_saved(tmp_path))
    time.sleep(0.01 * (every - 10))
    os.kill(processes_in(tmp_path)[3 + server], signal.SIGKILL)
    assert command.wait() == 0, command.stderr
    assert sorted(counts(command)) == [(str(worker), "6.0") for worker in range(3)], command.stdout + command.stderr
    assert f"server {server} (rank {3 + server}, pid" in command.stderr
    assert "it is started again (1 of 2)" in command.stderr
    assert "all go on from the checkpoint of step" in command.stdout + command.stderr


IN_A_LONG_STEP = """
    import os, signal, time
    from pathlib import Path

    import torch
    import evenstep
    from evenstep.parameter_servers.server import serving

    serving._REJOIN_S = 0.5
    here = Path.cwd()
    (here / f"{os.environ['RANK']}-runs-as-{os.getpid()}").touch()


    def wait_for(pattern, count=1):
        while len(found := list(here.glob(pattern))) < count:
            time.sleep(0.01)
        return found


    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.entries = torch.nn.Parameter(torch.zeros(4))


    with evenstep.parameter_server(
        Counts, lambda p: torch.optim.SGD(p, lr=1.0), mode="async", checkpoint="saved", every_steps=1, timeout_s=60
    ) as ps:
        loader = evenstep.DataLoader(list(range(4)), global_batch_size=1, queue=ps.queue())
        for batch in loader:
            (here / f"{ps.worker}-has-a-batch").touch()
            wait_for("*-has-a-batch", 2)
            if ps.worker == 1 and len(servers := wait_for("2-runs-as-*")) == 1:
                wait_for("0-is-done")
                os.kill(int(servers[0].name.split("-")[-1]), signal.SIGKILL)
                wait_for("2-runs-as-*", 2)
                time.sleep(3)
            ps.backward(-ps.model.entries[batch].sum())
            ps.step()
        (here / f"{ps.worker}-is-done").touch()
    print(f"worker {ps.worker}: {ps.model.entries.tolist()}")
"""


def test_a_worker_in_a_long_step_is_waited_for_when_a_server_comes_back(tmp_path: Path):
    """It finds out only after its step, and the other has ended its loop: the batches that are left are its own."""
    (tmp_path / "train.py").write_text(textwrap.dedent(IN_A_LONG_STEP))
    flags = "run --servers 1 --nproc-per-node 2 --device cpu --all-ranks --max-restarts 1 train.py"
    command = Command(tmp_path, flags.split())
    assert command.wait() == 0, command.stdout + command.stderr
    assert "restarting all ranks" not in command.stderr
    assert sorted(re.findall(r"worker \d: .*", command.stdout)) == [
        f"worker {worker}: [1.0, 1.0, 1.0, 1.0]" for worker in range(2)
    ]


def test_random_kills(tmp_path: Path, fresh_seed: int):
    write_script(tmp_path, samples=60, epochs=25, batches_s=0.02, every=15, mode="async")
    command, killed = run_with_kills(tmp_path, kills=5, seed=fresh_seed, pause_s=(0.3, 1.5))
    assert command.wait() == 0, (killed, command.stderr)
    assert {each for _, each in counts(command)} == {"25.0"}, (killed, command.stdout)


def test_without_checkpoints_a_dead_server_ends_the_run(tmp_path: Path):
    write_script(tmp_path, samples=60, epochs=200, batches_s=0.02, every=10, mode="async")
    script = tmp_path / "train.py"
    script.write_text(re.sub(r'    checkpoint="counts",\n    every_steps=\d+,\n', "", script.read_text()))
    command = start(tmp_path, "--max-restarts", "0")
    command.wait_until(lambda: len(processes_in(tmp_path)) == 5)
    time.sleep(2)
    os.kill(processes_in(tmp_path)[4], signal.SIGKILL)
    assert command.wait() == 128 + signal.SIGKILL, command.stderr
    assert re.search(r"rank 4 .*SIGKILL", command.stderr)
    assert command.leaves_no_process()


def test_a_stopped_worker_delays_nobody_in_async_and_is_named(tmp_path: Path):
    """It is killed in the end; its batch is the others', who still have epochs to go then."""
    write_script(tmp_path, samples=60, epochs=25, batches_s=0.02, every=20, mode="async")
    command = start(tmp_path, "--stopped-grace", "2")
    command.wait_until(lambda: has_saved(tmp_path))
    os.kill(processes_in(tmp_path)[1], signal.SIGSTOP)
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
    assert command.wait() != 0
    assert has_saved(tmp_path), command.stderr
    again = start(tmp_path)
    assert again.wait() == 0, again.stderr
    assert {each for _, each in counts(again)} == {"12.0"}, again.stdout
    assert "resumed from" in again.stdout + again.stderr
