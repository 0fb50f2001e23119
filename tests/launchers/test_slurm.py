"""The same script under a real Slurm: srun, the body of an sbatch script, mpiexec in a job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import textwrap
import time
from pathlib import Path

from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.store import LocalDirectory
from tests.launchers.conftest import PYTHON, mpiexec
from tests.launchers.slurm import OneNodeSlurm
from tests.launchers.test_mpi import SERVED, TRAINS, call, lines

DEADLINE_S = 150.0
JOBS = Path(__file__).parents[2] / "examples" / "jobs"


def submit(slurm: OneNodeSlurm, directory: Path, body: str, *flags: str) -> str:
    """Submit a script, wait until its job has left the queue, and return what it wrote."""
    (directory / "job.sh").write_text("#!/bin/bash\n" + textwrap.dedent(body))
    job = slurm.call("sbatch", "--parsable", "--output=job.out", *flags, "job.sh", cwd=directory).strip()
    await_end(slurm, job)
    return (directory / "job.out").read_text()


def await_end(slurm: OneNodeSlurm, job: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while slurm.call("squeue", "--noheader", f"--job={job}", check=False).strip().startswith(job):
        assert time.monotonic() < deadline, f"job {job} hangs\n{slurm.logs()}"
        time.sleep(0.1)


def test_srun(slurm: OneNodeSlurm, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAINS))
    said = slurm.call("srun", "-n", "2", PYTHON, "script.py", cwd=tmp_path)
    total = lines(call(tmp_path, [], TRAINS).stdout)[0].rpartition(", ")[2]
    assert lines(said) == [
        f"rank {rank} of 2, {rank} of 2, host 0 of 1, srun, shared memory, {total}" for rank in range(2)
    ]


def test_a_body_is_one_process_and_mpiexec_in_it_starts_ranks(slurm: OneNodeSlurm, tmp_path: Path) -> None:
    """Slurm's own variables say rank 0 of 2 in the body, and rank 0 of 1 in every rank of mpiexec's."""
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAINS))
    body = f"""
        export OMP_NUM_THREADS=1
        {shlex.quote(PYTHON)} script.py
        {shlex.join([*mpiexec("openmpi"), "-n", "2", PYTHON])} script.py
    """
    said = submit(slurm, tmp_path, body, "-n", "2")
    ranks = [line.rpartition(", ")[0] for line in lines(said)]
    assert ranks == [
        "rank 0 of 1, 0 of 1, host 0 of 1, none, local",
        "rank 0 of 2, 0 of 2, host 0 of 1, Open MPI, shared memory",
        "rank 1 of 2, 1 of 2, host 0 of 1, Open MPI, shared memory",
    ], said
    assert "(2 tasks), but not started by srun (no SLURM_STEP_ID): this is one process" in said
    assert len({line.rpartition(", ")[2] for line in lines(said)}) == 1


def test_the_example_of_a_job_script_is_submitted_and_runs(slurm: OneNodeSlurm, tmp_path: Path) -> None:
    """Flags of sbatch stand for what a user changes in its lines."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINS))
    shutil.copy(JOBS / "slurm.sh", tmp_path / "job.sh")
    (tmp_path / "logs").mkdir()
    command = tmp_path / "evenstep"  # as in an environment where evenstep is installed
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(PYTHON)} -m evenstep "$@"\n')
    command.chmod(0o755)
    path = f"PATH={tmp_path}:{os.environ['PATH']}"
    changed = ["--job-name=digits", "--nodes=1", "--cpus-per-task=2", "--time=0:10:00"]
    job = slurm.call("sbatch", "--parsable", f"--export=ALL,{path}", *changed, "job.sh", cwd=tmp_path).strip()
    await_end(slurm, job)
    said = (tmp_path / "logs" / f"digits-{job}.log").read_text()
    assert "evenstep: 2 ranks on 1 node, cpu, 1 thread per rank\n" in said
    assert [line.partition(",")[0] for line in lines(said)] == ["rank 0 of 2"], said
    others = [path.read_text() for path in (tmp_path / "logs").glob("*/rank-1.log")]
    assert len(others) == 1
    assert "rank 1 of 2, 1 of 2, host 0 of 1, evenstep run, shared memory" in others[0]


SAVES = """
    import time
    import evenstep, torch

    with evenstep.init() as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
        checkpoint = evenstep.Checkpointer("run", model=model)
        while True:
            checkpoint.step()
            if checkpoint.num_steps == 20 and world.is_main:
                open("trains", "w").close()
            time.sleep(0.02)
"""


def test_two_launchers_that_are_sent_two_signals_save_and_the_job_is_queued_again(
    slurm: OneNodeSlurm, tmp_path: Path
) -> None:
    """Slurm sends what the job asked for to every process, then SIGTERM. A task stands for a node."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVES))
    (tmp_path / "logs").mkdir()
    job = (JOBS / "slurm.sh").read_text()
    assert '--nnodes "$SLURM_JOB_NUM_NODES"' in job
    job = job.replace('--nnodes "$SLURM_JOB_NUM_NODES"', "--nnodes 2 --nproc-per-node 1")
    (tmp_path / "job.sh").write_text(job.replace("    evenstep run", f"    {shlex.quote(PYTHON)} -m evenstep run"))
    changed = ["--job-name=digits", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    number = slurm.call("sbatch", "--parsable", *changed, "--time=0:10:00", "job.sh", cwd=tmp_path).strip()
    log = tmp_path / "logs" / f"digits-{number}.log"
    until = time.monotonic() + 120
    while not (tmp_path / "trains").exists():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)
    for name in ("USR1", "TERM"):
        slurm.call("scancel", f"--signal={name}", number, cwd=tmp_path)
    while "queued again" not in (said := log.read_text()):
        assert time.monotonic() < until + 60, said
        time.sleep(0.2)
    time.sleep(1.0)
    state = slurm.call("squeue", "--noheader", "--format=%T", f"--job={number}", cwd=tmp_path)
    slurm.call("scancel", number, cwd=tmp_path)
    assert "PENDING" in state or "COMPLETING" in state, "Slurm starts it again minutes later"
    assert said.count("; saved run/step-") == 1
    assert len(checkpoints_in(LocalDirectory(tmp_path / "run"))) == 1


def test_evenstep_run_started_once_per_host_needs_no_flags_about_hosts(slurm: OneNodeSlurm, tmp_path: Path) -> None:
    """Two tasks stand for two hosts: node rank, address and port are the step's."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINS))
    run = [PYTHON, "-m", "evenstep", "run", "--nnodes", "2", "--nproc-per-node", "1", "-t", "3", "train.py"]
    said = slurm.call("srun", "-n", "2", *run, cwd=tmp_path)
    ranks = lines(said.replace("[rank 1] ", ""))
    assert [line.partition(",")[0] for line in ranks] == ["rank 0 of 2", "rank 1 of 2"], said


def test_the_last_task_is_a_parameter_server_and_goes_on_without_a_worker_that_dies(
    slurm: OneNodeSlurm, tmp_path: Path
) -> None:
    """srun leaves the other tasks alone, unlike mpiexec."""
    dies = "as ps:\n        os.kill(os.getpid(), 9) if ps.worker == 1 else None\n"
    script = "import os\n" + textwrap.dedent(SERVED.replace("as ps:\n", dies))
    (tmp_path / "script.py").write_text(script)
    run = ["srun", "-n", "3", "--export=ALL,EVENSTEP_SERVERS=1,OMP_NUM_THREADS=1", PYTHON, "script.py"]
    said = slurm.call(*run, cwd=tmp_path, check=False)
    assert "worker 0 of 2\n" in said, said
    assert "worker 1 was lost; its batches go to the others" in said
    assert re.findall(r"task (.*)", said) == ["1: Killed"], "the server's process has ended well"
