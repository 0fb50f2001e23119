"""`evenstep jobs`: a job script for a scheduler, ready to be changed by hand. Pure: a `Job` in, text out.

Every script starts one `evenstep run` per host, which starts the ranks there, names the rank that failed first and ends
with its status; 75 means that the scheduler wanted the host back and everything is saved, so the job is queued again.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from evenstep.errors import ConfigurationError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")
_TIME = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")
SAVED = 75


@dataclass(frozen=True)
class Job:
    """A job for a scheduler.

    Attributes:
        script: The training script, and its own arguments.
        name: Of the job: small letters, digits and dashes, as Kubernetes wants it.
        num_nodes: Hosts.
        ranks_per_node: Ranks on each; 0: as many as the GPUs there, or what fits the cores.
        gpus_per_node: GPUs of each host.
        cpus_per_node: Cores of each host.
        walltime: H:MM:SS.
        save_s: Seconds before the end at which the job is signalled to save.
        logs: Directory of the logs.
        queue: Partition (Slurm) or queue (PBS); "": the default one.
        account: The account that is charged; "": the default one.
        image: Container image (Kubernetes).
        claim: Volume claim that holds the script and its checkpoints (Kubernetes).
    """

    script: tuple[str, ...]
    name: str = "evenstep"
    num_nodes: int = 1
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    cpus_per_node: int = 8
    walltime: str = "4:00:00"
    save_s: int = 120
    logs: str = "logs"
    queue: str = ""
    account: str = ""
    image: str = "my-registry/my-image:tag"
    claim: str = "my-volume-claim"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"--name {self.name!r}: at most 52 small letters, digits, and dashes between them."
            )
        for flag, value, least in (
            ("--nodes", self.num_nodes, 1),
            ("--nproc-per-node", self.ranks_per_node, 0),
            ("--gpus-per-node", self.gpus_per_node, 0),
            ("--cpus-per-node", self.cpus_per_node, 1),
            ("--save-seconds", self.save_s, 1),
        ):
            if value < least:
                raise ConfigurationError(f"{flag} {value}: at least {least}.")
        if not _TIME.fullmatch(self.walltime):
            raise ConfigurationError(f"--time {self.walltime!r}: hours, minutes and seconds, as in 4:00:00.")
        for flag, text in (("--logs", self.logs), ("--queue", self.queue), ("--account", self.account)):
            # They stand in comment lines that the scheduler reads, where nothing can be quoted.
            if re.search(r"[\s'\"\\]", text):
                raise ConfigurationError(f"{flag} {text!r}: no white space and no quotes.")
        if self.walltime_s <= self.save_s:
            raise ConfigurationError(f"--save-seconds {self.save_s} leaves nothing of --time {self.walltime}.")

    @property
    def walltime_s(self) -> int:
        """The walltime in seconds."""
        hours, minutes, seconds = map(int, self.walltime.split(":"))
        return hours * 3600 + minutes * 60 + seconds

    @property
    def run(self) -> list[str]:
        """The command on each host, without what differs between schedulers."""
        ranks = ["--nproc-per-node", str(self.ranks_per_node)] if self.ranks_per_node else []
        nodes = ["--nnodes", str(self.num_nodes)] if self.num_nodes > 1 else []
        return ["evenstep", "run", *nodes, *ranks, "--shutdown-timeout", str(self.save_s), "--log-dir", self.logs]


def slurm(job: Job) -> str:
    """A script for `sbatch`."""
    resources = {
        "job-name": job.name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(job.cpus_per_node),
        **({"gpus-per-node": str(job.gpus_per_node)} if job.gpus_per_node else {}),
        "time": job.walltime,
        **({"partition": job.queue} if job.queue else {}),
        **({"account": job.account} if job.account else {}),
        "output": f"{job.logs}/%x-%j.log",
    }
    asked = "\n".join(f"#SBATCH --{name}={value}" for name, value in resources.items())
    return f"""#!/bin/bash
# Submit with: mkdir -p {job.logs} && sbatch THIS_FILE
#
# Change what is asked for here; one task per host is right, evenstep starts the ranks there.
{asked}
# When time is nearly up, or the job is preempted: save, end with status {SAVED}, and be queued again.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@{job.save_s}

# Change to what makes `evenstep` and your libraries available, for example:
# module load python cuda
# source "$HOME/venv/bin/activate"

# The hosts find each other through Slurm's variables. To resume is the script's business: with evenstep.Checkpointer
# it is `checkpoint.resume()`, which starts afresh where there is nothing.
srun --kill-on-bad-exit=1 --cpus-per-task={job.cpus_per_node} \\
    {_shell(job)}
status=$?

if [ "$status" -eq {SAVED} ]; then
    echo "saved; queued again to go on"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
"""


def pbs(job: Job) -> str:
    """A script for `qsub` (PBS Pro, OpenPBS)."""
    chunk = f"{job.num_nodes}:ncpus={job.cpus_per_node}:mpiprocs=1"
    chunk += f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    resources = [
        f"-N {job.name[:15]}",
        f"-l select={chunk}",
        "-l place=scatter",
        f"-l walltime={job.walltime}",
        *([f"-q {job.queue}"] if job.queue else []),
        *([f"-A {job.account}"] if job.account else []),
        "-j oe",
        f"-o {job.logs}/",
        "-r y",
    ]
    asked = "\n".join(f"#PBS {line}" for line in resources)
    start = f"mpiexec -n {job.num_nodes} --ppn 1 \\\n    " if job.num_nodes > 1 else ""
    return f"""#!/bin/bash
# Submit with: mkdir -p {job.logs} && qsub THIS_FILE
#
# Change what is asked for here; one process per host is right, evenstep starts the ranks there.
{asked}

cd "$PBS_O_WORKDIR" || exit 1

# Change to what makes `evenstep` and your libraries available, for example:
# module load python cuda
# source "$HOME/venv/bin/activate"

# {job.save_s} s before the time is up: save, and end with status {SAVED}. Preemption sends SIGTERM: the same.
# mpiexec --ppn is that of MPICH and PALS; with Open MPI write --map-by ppr:1:node.
timeout --preserve-status --signal=TERM {job.walltime_s - job.save_s} {start}{_shell(job)}
status=$?

if [ "$status" -eq {SAVED} ]; then
    echo "saved; queued again to go on"
    qrerun "$PBS_JOBID" && exit 0
fi
exit "$status"
"""


def kubernetes(job: Job) -> str:
    """A manifest for `kubectl apply`: an indexed Job, and the service by which its pods find each other."""
    limits = [f'cpu: "{job.cpus_per_node}"', *([f"nvidia.com/gpu: {job.gpus_per_node}"] if job.gpus_per_node else [])]
    meeting = [] if job.num_nodes == 1 else ["--node-rank", "$(JOB_COMPLETION_INDEX)"]
    meeting += [] if job.num_nodes == 1 else ["--master-addr", f"{job.name}-0.{job.name}", "--master-port", "29500"]
    command = [*job.run[:2], *meeting, *job.run[2:], *job.script]
    return f"""# Submit with: kubectl apply -f THIS_FILE
# Change: image, claimName, resources, memory of /dev/shm.
apiVersion: v1
kind: Service
metadata:
  name: {job.name}
spec:
  clusterIP: None # the pods' own addresses, under names like {job.name}-0.{job.name}
  publishNotReadyAddresses: true
  selector:
    job-name: {job.name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.name}
spec:
  completionMode: Indexed
  completions: {job.num_nodes}
  parallelism: {job.num_nodes}
  backoffLimit: {3 * job.num_nodes}
  activeDeadlineSeconds: {job.walltime_s}
  podFailurePolicy:
    rules:
      - action: Ignore # status {SAVED}: a node was drained and everything is saved; started again, and not counted
        onExitCodes:
          operator: In
          values: [{SAVED}]
      - action: FailJob # status 78: something in the command is wrong, and would be wrong again
        onExitCodes:
          operator: In
          values: [78]
  template:
    metadata:
      labels:
        job-name: {job.name}
    spec:
      subdomain: {job.name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {job.save_s + 30} # time to save after SIGTERM
      containers:
        - name: train
          image: {json.dumps(job.image)}
          workingDir: /work
          command: {json.dumps(command)}
          resources:
            limits:
{chr(10).join(f"              {line}" for line in limits)}
          volumeMounts:
            - name: work
              mountPath: /work
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: work # the script, its data, its checkpoints
          persistentVolumeClaim:
            claimName: {json.dumps(job.claim)}
        - name: shm # a container's own has 64 MiB: too little for loaders with workers
          emptyDir:
            medium: Memory
            sizeLimit: 8Gi
"""


KINDS = {"slurm": slurm, "pbs": pbs, "kubernetes": kubernetes}


def _shell(job: Job) -> str:
    return f"{shlex.join(job.run)} {shlex.join(job.script)}"
