"""examples/jobs: a shell understands the scripts, each hands its arguments on, and what was saved is queued again."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from evenstep.errors import EXIT_PREEMPTED, ConfigurationError
from evenstep.launcher.options.flags import parse

JOBS = Path(__file__).parents[2] / "examples" / "jobs"
SCRIPTS = ["slurm.sh", "pbs.sh"]
TELLS = 'printf "%s\\n" "$@"\nexit 5'  # a program that tells its arguments, a line each


def submit(script: str, directory: Path, programs: dict[str, str]) -> tuple[int, list[str]]:
    """Run a job script with programs of our own for the scheduler's; its status and its lines."""
    shutil.copy(JOBS / script, directory)
    (directory / "nodes").write_text("node1\nnode1\nnode2\n")
    for name, body in programs.items():
        (directory / name).write_text(f"#!/bin/sh\n{body}\n")
        (directory / name).chmod(0o755)
    variables = {
        "PATH": f"{directory}:/usr/bin:/bin",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "PBS_JOBID": "7",
        "PBS_NODEFILE": str(directory / "nodes"),
        "PBS_O_WORKDIR": str(directory),
    }
    command = ["bash", script]
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_shell_understands_it_and_starts_one_launcher_on_each_node(script: str, tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(JOBS / script)], check=False).returncode == 0
    status, told = submit(script, tmp_path, {"srun": TELLS, "mpiexec": TELLS})
    assert status == 5, "the root cause's status"
    start = told.index("evenstep")
    assert (
        told[:start]
        == {
            "slurm.sh": ["--kill-on-bad-exit=0", "--cpus-per-task=8"],
            "pbs.sh": ["-n", "2", "--ppn", "1"],
        }[script]
    )
    args = parse(told[start + 2 :])
    assert (told[start + 1], args.training_script, args.training_script_args) == ("run", "train.py", [])
    assert (args.nnodes, args.shutdown_timeout, args.log_dir) == ("2", 120, "logs")


@pytest.mark.parametrize(("script", "again"), [("slurm.sh", "scontrol requeue 7"), ("pbs.sh", "qrerun 7")])
def test_what_was_saved_is_queued_again(script: str, again: str, tmp_path: Path) -> None:
    saves = f"exit {EXIT_PREEMPTED}"
    programs = {"srun": saves, "mpiexec": saves, "scontrol": 'echo scontrol "$@"', "qrerun": 'echo qrerun "$@"'}
    status, told = submit(script, tmp_path, programs)
    assert (status, told[-1]) == (0, again)


def test_a_run_under_pbs_is_asked_to_save_before_its_time_is_up(tmp_path: Path) -> None:
    status, told = submit("pbs.sh", tmp_path, {"timeout": TELLS})
    assert (status, told[:3]) == (5, ["--preserve-status", "--signal=TERM", "14280"])
    hours, minutes, seconds = map(int, re.findall(r"walltime=(\d+):(\d+):(\d+)", (JOBS / "pbs.sh").read_text())[0])
    assert hours * 3600 + minutes * 60 + seconds - 120 == 14280


def test_the_manifest_for_kubernetes_says_the_same_everywhere() -> None:
    service, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, num_nodes = job["metadata"]["name"], spec["completions"]
    program, command, *flags = (each.replace("$(JOB_COMPLETION_INDEX)", "1") for each in container["command"])
    args = parse(flags)
    assert (program, command, args.training_script) == ("evenstep", "run", "train.py")
    assert (args.nnodes, spec["parallelism"], spec["backoffLimit"]) == (str(num_nodes), num_nodes, 3 * num_nodes)
    assert (args.node_rank, args.master_addr) == (1, f"{name}-0.{name}")
    assert service["metadata"]["name"] == pod["subdomain"] == name
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"] == {"job-name": name}
    assert pod["terminationGracePeriodSeconds"] > args.shutdown_timeout
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"]}
    assert codes == {"Ignore": [EXIT_PREEMPTED], "FailJob": [ConfigurationError.exit_code]}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
