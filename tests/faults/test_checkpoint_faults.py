"""Checkpoints where ranks are killed, crash, or are asked to stop, as a person would start them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.store import LocalDirectory
from tests.commands import Command, call, start

ROOT = Path(__file__).parents[2]

TRAIN = """
    import os, signal, sys, time
    import evenstep, torch

    with evenstep.init(seed=3) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        checkpoint = evenstep.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, every_steps=3)
        begun = checkpoint.resume()
        while checkpoint.num_steps < int(sys.argv[2]):
            model.backward(model(torch.randn(4, 3)).square().mean(), weight=4)
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            time.sleep(float(os.environ.get("PAUSE", "0")))
            if begun == 0 and checkpoint.num_steps == int(os.environ.get("CRASH_AT", "-1")):
                checkpoint.wait()
                if world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        world.print([round(float(p.detach().double().sum()), 12) for p in model.parameters()])
"""
FLAGS = ["--nproc-per-node", "2", "--device", "cpu", "--threads-per-rank", "1"]
_KILL_LOOP_S = 600  # a minute on a quiet machine


def folders(directory: Path) -> dict[int, str]:
    return checkpoints_in(LocalDirectory(directory))


def steps(directory: Path) -> list[int]:
    return list(folders(directory))


@pytest.mark.extended
@pytest.mark.timeout(2 * _KILL_LOOP_S)
@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ("kill_loop --steps 24", "equal to the undisturbed one"),
        ("kill_loop --s3 --steps 12", "equal to the undisturbed one"),
        ("mesh_kill_loop", "killed and resumed on themselves: the same bits"),
        *((f"tier_kill_loop --kind {kind}", "equal to the undisturbed one") for kind in ("plain", "sharded", "fsdp2")),
    ],
)
def test_kills_at_random_instants_lose_nothing_but_what_was_not_committed(fresh_seed: int, loop: str, says: str):
    """Some of those of `make stress PART=kills`."""
    if "--s3" in loop:
        pytest.importorskip("s3fs")
        pytest.importorskip("moto.server")
    name, *flags = loop.split()
    flags += ["--seed", str(fresh_seed), "--kills", os.environ.get("EVENSTEP_TEST_KILLS", "3")]
    command = [sys.executable, "-m", f"tests.faults.{name}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_KILL_LOOP_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert says in done.stdout


def test_restarts_go_on_from_local_copies_and_say_what_they_cost(tmp_path: Path):
    script = TRAIN.replace("every_steps=3)", 'every_steps=99, local="copies", local_every_steps=3)')
    script = script.replace("begun == 0", "begun < 6").replace("checkpoint.wait()", "checkpoint._tier.finish()")
    script = script.replace('os.environ.get("CRASH_AT", "-1")', "begun + 5")
    crashed = start(tmp_path, [*FLAGS, "--max-restarts", "2", "script.py", "runs", "12"], script)
    assert crashed.wait() == 0, crashed.stderr
    assert "resumed from the local copies of step 3 (durable: none); 2 steps repeated" in crashed.stderr
    assert "resumed from the local copies of step 6 (durable: none); 2 steps repeated" in crashed.stderr
    assert steps(tmp_path / "runs") == [12]
    assert not list(tmp_path.glob("copies/*/*"))
    assert crashed.leaves_no_process()


def stopped(directory: Path, send, script: str = TRAIN, *flags: str, status: int = 75) -> Command:
    """A run that is sent a signal once it trains."""
    flags = (*FLAGS, "--max-restarts", "3", *flags)
    command = start(directory, [*flags, "script.py", "runs", "100000"], script, PAUSE="0.01")
    command.wait_until(lambda: bool(steps(directory / "runs")))
    send(command)
    assert command.wait() == status, command.stderr
    newest = steps(directory / "runs")[-1]
    assert f"; saved runs/{folders(directory / 'runs')[newest]}, which resumes there" in command.stderr
    assert "attempt" not in command.stderr, "it is not restarted"
    assert command.leaves_no_process()
    assert not [name for name in command.left_files() if name.startswith("evenstep")]
    assert {path.name for path in (directory / "runs").glob("step-*")} == set(folders(directory / "runs").values())
    return command


@pytest.mark.extended
@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_whose_loop_was_shorter_is_named_and_not_the_save_that_failed(tmp_path: Path, early: int):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    command = [sys.executable, "-m", "evenstep", "run", *FLAGS, str(tmp_path / "train.py"), str(tmp_path / "run"), "40"]
    inject = ["--inject", f"exit:rank={early},step=4"]
    done = subprocess.run([*command[:4], *inject, *command[4:]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 72, done.stderr
    assert re.search(
        rf"rank {early} .* had (ended with status 0|left its process group) while .* its loop was shorter", done.stderr
    )
    assert "CheckpointError" not in done.stderr


@pytest.mark.extended(beyond=2)
@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGHUP],  # a dropped connection
        [signal.SIGUSR2],
        # As GNU timeout sends it, and with it the job script for PBS: to its child, and to the group of its child.
        [signal.SIGTERM, signal.SIGTERM],
        # Slurm sends the one that the job has asked for, and SIGTERM when it cancels it.
        [signal.SIGUSR1, signal.SIGTERM],
    ],
)
def test_signals_of_schedulers_to_the_launcher_save_once_and_end_with_75(tmp_path: Path, signals: list[signal.Signals]):
    def send(command: Command) -> None:
        for which in signals:
            command.process.send_signal(which)
            time.sleep(0.03)  # or the system makes one of two

    stopped(tmp_path, send)


def test_ctrl_c_saves_and_ends_with_130(tmp_path: Path):
    """The line that the user sees has the step that was saved."""
    command = stopped(tmp_path, lambda command: command.process.send_signal(signal.SIGINT), status=130)
    first, saved, last = command.stderr.splitlines()[-3:]
    assert first == "evenstep: interrupted: the ranks save, and end. Ctrl-C once more kills them"
    assert saved.startswith("evenstep: stop requested (SIGINT on rank 0); saved runs/step-")
    assert last == "evenstep: interrupted; all ranks were stopped"


def test_a_second_ctrl_c_kills_ranks_that_would_save(tmp_path: Path):
    """They don't come to the step in which they would."""
    sleeps = 'checkpoint.step()\n            open(f"stepped-{world.rank}", "w").close()\n            time.sleep(100)'
    script = TRAIN.replace("checkpoint.step()", sleeps)
    command = start(tmp_path, [*FLAGS, "script.py", "runs", "100000"], script)
    command.wait_until(lambda: all((tmp_path / f"stepped-{rank}").exists() for rank in range(2)))
    command.process.send_signal(signal.SIGINT)
    command.wait_until(lambda: "Ctrl-C once more kills them" in command.stderr)
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130, command.stderr
    assert command.leaves_no_process()


NOHUP = """
    import os, signal
    import evenstep, torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor([is_ignored("self")])

    def is_ignored(pid):
        with open(f"/proc/{pid}/status") as status:
            (mask,) = [line.split()[1] for line in status if line.startswith("SigIgn")]
        return bool(int(mask, 16) >> (signal.SIGHUP - 1) & 1)

    with evenstep.init() as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
        checkpoint = evenstep.Checkpointer("runs", model=model)
        for worker in evenstep.DataLoader(Data(), global_batch_size=2, num_workers=1):
            checkpoint.step()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getppid(), signal.SIGHUP)
        world.print(is_ignored(os.getppid()), is_ignored("self"), worker.all().item())
"""


@pytest.mark.parametrize("flags", [[], pytest.param(["--cold-start"], marks=pytest.mark.extended)])
def test_under_nohup_a_dropped_connection_is_ignored_by_all(tmp_path: Path, flags: list[str]):
    (tmp_path / "script.py").write_text(textwrap.dedent(NOHUP))
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignoring, sys.executable, "-m", "evenstep", "run", *FLAGS, *flags, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert (done.returncode, done.stdout) == (0, "True True True\n"), done.stderr


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize("num_steps", [6, 7])
def test_a_run_of_local_steps_that_ends_well_is_saved_at_its_end(tmp_path: Path, num_steps: int):
    """Also between two exchanges: it ends with the mean."""
    script = f"""
        import evenstep, torch
        with evenstep.init(seed=0, quiet=True) as world:
            model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            local = evenstep.LocalSGD(model, optimizer, every=3)
            checkpoint = evenstep.Checkpointer("saved", model=model, local_sgd=local, every_steps=100)
            resumed = checkpoint.resume()
            if resumed:
                world.print(resumed, local.num_steps, model.module.weight.flatten().tolist())
            for _ in range({num_steps} * (not resumed)):
                optimizer.zero_grad()
                model(torch.full((1, 2), world.rank + 1.0)).sum().backward()
                local.step()
                checkpoint.step()
        weight = model.module.weight.flatten().tolist()
        if world.rank == 0 and not resumed:
            print({num_steps}, {num_steps}, weight)
    """
    ended = [call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], script) for _ in range(2)]
    assert [code for code, _ in ended] == [0, 0], ended[0][1].stderr
    first = ended[0][1].stdout
    assert first
    assert ended[1][1].stdout == first


def sigusr1_to_rank_1(command: Command) -> None:
    for pid in command.processes():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if b"RANK=1\0" in environment.replace(b"LOCAL_RANK", b"").replace(b"GROUP_RANK", b""):
            os.kill(pid, signal.SIGUSR1)


def test_sigusr1_to_one_rank_saves_and_ends_with_75(tmp_path: Path):
    assert "SIGUSR1 on rank 1" in stopped(tmp_path, sigusr1_to_rank_1).stderr


@pytest.mark.extended
def test_a_run_that_was_asked_to_stop_is_not_restarted_where_a_rank_ends_late(tmp_path: Path):
    """A tracker's exit handler takes longer than `--shutdown-timeout`; or it is the other rank's."""
    late = 'import atexit\n    atexit.register(time.sleep, 20 if os.environ["RANK"] == "0" else 0)\n'
    script = TRAIN.replace("import evenstep, torch\n", f"import evenstep, torch\n    {late}", 1)
    command = stopped(tmp_path, sigusr1_to_rank_1, script, "--shutdown-timeout", "1")
    assert re.search(r"rank 0 \(pid \d+\) .*is killed", command.stderr), command.stderr


WITH_WORKERS = """
    import sys, time
    import evenstep, torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1_000_000

        def __getitem__(self, index):
            time.sleep(0.05)  # ranks wait for their workers
            return torch.ones(3)

    with evenstep.init(seed=3) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = evenstep.DataLoader(Data(), global_batch_size=4, num_workers=2)
        checkpoint = evenstep.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, loader=loader, every_steps=3)
        checkpoint.resume()
        for batch in loader:
            model.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
"""


def to_all(command: Command, which: signal.Signals) -> None:
    """As schedulers signal a job: every process of it."""
    for pid in [command.process.pid, *(each for each in command.processes() if each != command.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize("to", ["the launcher", "every process"])
@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_saves_where_loaders_have_workers(tmp_path: Path, which: signal.Signals, to: str):
    """The workers are the rank's own to end: without them it would raise before it comes to its save."""

    def send(command: Command) -> None:
        if to == "every process":
            to_all(command, which)
        else:
            command.process.send_signal(which)

    stopped(tmp_path, send, WITH_WORKERS)


@pytest.mark.extended
def test_a_stop_saves_where_a_shell_script_starts_the_rank(tmp_path: Path):
    """bash would end at once, and everything with it."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "wrapper").write_text(f"#!/bin/bash\n'{sys.executable}' train.py runs 100000\nexit $?\n")
    (tmp_path / "wrapper").chmod(0o755)
    command = start(tmp_path, [*FLAGS, "--no-python", "./wrapper"], "", PAUSE="0.01")
    command.wait_until(lambda: bool(steps(tmp_path / "runs")))
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 75, command.stderr
    newest = folders(tmp_path / "runs")[steps(tmp_path / "runs")[-1]]
    assert f"; saved runs/{newest}, which resumes there" in command.stderr
    assert command.leaves_no_process()
