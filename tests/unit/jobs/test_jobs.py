"""Job scripts: what they ask for, that a shell understands them, and what is refused."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from evenstep.cli.main import main
from evenstep.errors import ConfigurationError
from evenstep.jobs.scripts import KINDS, Job

BIG = Job(
    ("train.py", "--name", "it's; rm -rf $HOME"),
    name="digits",
    num_nodes=2,
    ranks_per_node=4,
    gpus_per_node=4,
    walltime="12:30:00",
    queue="gpu",
    account="me",
)


@pytest.mark.parametrize("job", [BIG, Job(("train.py",))], ids=["big", "small"])
@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_a_shell_understands_it_and_hands_the_arguments_on(kind: str, job: Job, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(KINDS[kind](job))
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    # Every program that it calls, as a shell that tells what it was given.
    told = tmp_path / "told"
    for name in ("srun", "mpiexec", "evenstep", "timeout"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> {told}\nexit 5\n')
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PBS_O_WORKDIR": str(tmp_path)}
    assert subprocess.run(["bash", str(script)], env=variables, check=False).returncode == 5, "the culprit's status"
    arguments = told.read_text().splitlines()
    assert arguments[-len(job.script) :] == list(job.script)
    assert ("--nnodes" in arguments) == (job.num_nodes > 1)


@pytest.mark.parametrize(("kind", "again"), [("slurm", "scontrol requeue 7"), ("pbs", "qrerun 7")])
def test_what_was_saved_is_queued_again(kind: str, again: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(KINDS[kind](BIG))
    for name, body in {
        "srun": "exit 75",
        "timeout": "exit 75",
        "scontrol": 'echo scontrol "$@"',
        "qrerun": 'echo qrerun "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    ids = {"SLURM_JOB_ID": "7", "PBS_JOBID": "7", "PBS_O_WORKDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **ids},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, again)


def test_slurm_asks_for_what_was_asked_for() -> None:
    text = KINDS["slurm"](BIG)
    for line in (
        "--job-name=digits",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--time=12:30:00",
        "--partition=gpu",
        "--account=me",
        "--requeue",
        "--signal=USR1@120",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "gpus" not in KINDS["slurm"](Job(("train.py",)))


def test_pbs_and_kubernetes_ask_for_what_was_asked_for() -> None:
    text = KINDS["pbs"](BIG)
    assert "#PBS -l select=2:ncpus=8:mpiprocs=1:ngpus=4\n" in text
    assert f"--signal=TERM {12 * 3600 + 30 * 60 - 120} mpiexec -n 2" in text
    text = KINDS["kubernetes"](BIG)
    assert re.search(r"completions: 2\n +parallelism: 2\n", text)
    assert "nvidia.com/gpu: 4" in text
    assert '"--node-rank", "$(JOB_COMPLETION_INDEX)", "--master-addr", "digits-0.digits"' in text
    assert "--node-rank" not in KINDS["kubernetes"](Job(("train.py",)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "My_Job"}, "--name 'My_Job'"),
        ({"num_nodes": 0}, "--nodes 0: at least 1"),
        ({"walltime": "90"}, "--time '90'"),
        ({"walltime": "0:01:00"}, "leaves nothing"),
        ({"queue": "a b"}, "--queue 'a b': no white space"),
        ({"cpus_per_node": -1}, "--cpus-per-node -1"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Job(("train.py",), **wrong)  # type: ignore[arg-type]


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "slurm", "--nodes", "3", "train.py", "--nodes", "9"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --nodes=3\n" in text
    assert "train.py --nodes 9\n" in text
    assert main(["jobs", "pbs", "--time", "soon", "train.py"]) == 78
    assert "--time 'soon'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["jobs", "slurm"], ["verify", "--steps", "2"]], ids=lambda command: command[0] if command else ""
)
def test_a_command_without_a_script_says_that_and_no_more(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 78
    assert capsys.readouterr().err == (
        f"evenstep: the following arguments are required: script. See `evenstep {command[0]} --help`.\n"
    )
