"""The same script under a real Slurm: srun, the body of an sbatch script, mpiexec in a job."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

from tests.launchers.conftest import PYTHON, mpiexec
from tests.launchers.slurm import OneNodeSlurm
from tests.launchers.test_mpi import TRAINS, call, lines

DEADLINE_S = 150.0


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
    """FAULTS.md, 44. Slurm's own variables say rank 0 of 2 in the body, and rank 0 of 1 in every rank of mpiexec's."""
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAINS))
    body = f"""
        export OMP_NUM_THREADS=1
        {PYTHON} script.py
        {" ".join(mpiexec("openmpi"))} -n 2 {PYTHON} script.py
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
