"""Who is a process, from what its launcher left in the environment: recorded ones, and contradictions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Placement, Surroundings, detect, refuse_independent_runs
from evenstep.ground.environment.detect import port_of_job
from evenstep.ground.environment.hosts import (
    control_of_hydra,
    expand_slurm_counts,
    expand_slurm_hosts,
    host_of_open_mpi_uri,
    hosts_of_node_file,
)
from tests.unit.ground.environment import recorded_environments as recorded

# rank, world_size, local_rank, local_world_size, node_rank, num_nodes, launcher, where rank 0 is found
TABLE: dict[str, tuple[dict[str, str], dict[str, Sequence[str]], tuple[object, ...]]] = {
    "Open MPI": (recorded.OPEN_MPI, {}, (1, 2, 1, 2, 0, 1, "Open MPI", "127.0.0.1")),
    "Open MPI on two hosts": (recorded.OPEN_MPI_ON_TWO_HOSTS, {}, (3, 4, 1, 2, 1, 2, "Open MPI", "10.0.0.1")),
    "Open MPI on three hosts, unevenly": (
        recorded.OPEN_MPI_ON_TWO_HOSTS | {"OMPI_MCA_orte_num_nodes": "3"},
        {},
        (3, 4, 1, 2, 1, 3, "Open MPI", "10.0.0.1"),
    ),
    "Open MPI on two hosts of PBS": (
        recorded.OPEN_MPI_ON_TWO_HOSTS,
        {"node_file": recorded.PBS_NODE_FILE},
        (3, 4, 1, 2, 1, 2, "Open MPI", "x1000c0s0"),
    ),
    "Open MPI 5": (recorded.OPEN_MPI_5_ON_TWO_HOSTS, {}, (2, 4, 0, 2, 1, 2, "Open MPI", "login-1")),
    "Open MPI in Slurm": (recorded.OPEN_MPI_IN_SLURM, {}, (1, 2, 1, 2, 0, 1, "Open MPI", "127.0.0.1")),
    "MPICH": (
        recorded.MPICH,
        {"ancestors": recorded.HYDRA_ANCESTORS},
        (1, 2, 1, 2, 0, 1, "MPICH", "127.0.0.1"),
    ),
    "MPICH in Slurm": (
        recorded.MPICH_IN_SLURM,
        {"ancestors": recorded.HYDRA_ANCESTORS},
        (1, 2, 1, 2, 0, 1, "MPICH", "127.0.0.1"),
    ),
    "Intel MPI": (
        recorded.INTEL_MPI,
        {"ancestors": recorded.INTEL_ANCESTORS},
        (2, 4, 0, 2, 1, 2, "Intel MPI", "s01"),
    ),
    "PALS": (recorded.PALS, {"node_file": recorded.PBS_NODE_FILE}, (3, 4, 1, 2, 1, 2, "PALS", "x1000c0s0")),
    "PALS on three hosts, unevenly": (
        recorded.PALS | {"PMI_SIZE": "5"},
        {"node_file": recorded.PBS_NODE_FILE},
        (3, 5, 1, 2, 1, 3, "PALS", "x1000c0s0"),
    ),
    "srun": (recorded.SRUN, {}, (1, 2, 1, 2, 0, 1, "srun", "127.0.0.1")),
    "srun on three hosts": (recorded.SRUN_ON_THREE_HOSTS, {}, (5, 7, 2, 3, 1, 3, "srun", "gpu07")),
    "srun on three hosts, unevenly": (
        recorded.SRUN_ON_THREE_HOSTS | {"SLURM_STEP_TASKS_PER_NODE": "4,2,1", "SLURM_LOCALID": "1"},
        {},
        (5, 7, 1, 2, 1, 3, "srun", "gpu07"),
    ),
    "srun --mpi=pmi2": (recorded.SRUN_WITH_PMI2, {}, (1, 2, 1, 2, 0, 1, "srun", "127.0.0.1")),
    "body of sbatch": (recorded.SBATCH_BODY, {}, (0, 1, 0, 1, 0, 1, "none", None)),
    "shell of salloc": ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}, {}, (0, 1, 0, 1, 0, 1, "none", None)),
    "body of PBS": (
        {"PBS_JOBID": "77.pbs", "PBS_NODEFILE": "/var/spool/pbs/aux/77.pbs"},
        {"node_file": recorded.PBS_NODE_FILE},
        (0, 1, 0, 1, 0, 1, "none", None),
    ),
    "torchrun": (recorded.TORCHRUN, {}, (3, 4, 1, 2, 1, 2, "torchrun", None)),
    "torchrun, a task per node": (
        recorded.SRUN_ON_THREE_HOSTS | recorded.TORCHRUN | {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29400"},
        {},
        (3, 4, 1, 2, 1, 2, "torchrun", "gpu07"),
    ),
    "one task of Open MPI": (
        recorded.OPEN_MPI
        | dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0")
        | dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "1"),
        {},
        (0, 1, 0, 1, 0, 1, "Open MPI", None),
    ),
    "srun, with RANK set to the same by hand": (
        recorded.SRUN | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "4242"},
        {},
        (1, 2, 1, 2, 0, 1, "srun", "node0"),
    ),
    "nobody": ({"HOME": "/root"}, {}, (0, 1, 0, 1, 0, 1, "none", None)),
}


@pytest.mark.parametrize("name", TABLE)
def test_recorded_environments(name: str) -> None:
    variables, around, expected = TABLE[name]
    found = detect(variables, **around)  # type: ignore[arg-type]
    assert (
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.node_rank,
        found.num_nodes,
        found.launcher,
        found.master_address,
    ) == expected
    assert found.makes_store == (found.launcher not in ("none", "torchrun") and found.world_size > 1)


@pytest.mark.parametrize("name", TABLE)
def test_ranks_of_one_job_derive_one_port_and_other_jobs_another(name: str) -> None:
    variables, around, _ = TABLE[name]
    found = detect(variables, **around)  # type: ignore[arg-type]
    if not found.makes_store or "MASTER_PORT" in variables:
        return
    assert found.master_port is not None
    assert 20_000 <= found.master_port < 32_000
    other_rank = {k: "0" for k in variables if k.endswith(("RANK", "RANKID", "LOCALID", "PROCID"))}
    other_rank |= {"SLURM_NODEID": "0"} if "SLURM_NODEID" in variables else {}
    first = detect(variables | other_rank, **around)  # type: ignore[arg-type]
    assert (first.rank, first.master_port, first.master_address) == (0, found.master_port, found.master_address)
    changed = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PALS_APID")
    another = {
        name: value.replace("1", "9").replace("0f", "1f") for name, value in variables.items() if name in changed
    }
    ancestors = [line.replace(":37015", ":37016").replace("40123", "40124") for line in around.get("ancestors", ())]
    beside = detect(variables | another, ancestors=ancestors, node_file=around.get("node_file", ()))
    assert beside.master_port != found.master_port


def test_the_port_is_the_same_in_every_process_and_version() -> None:
    assert port_of_job("slurm evenstep 1.0") == 27239


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (recorded.SBATCH_BODY, "inside Slurm job 2 (2 tasks), but not started by srun"),
        ({"PBS_JOBID": "77.pbs"}, "inside PBS job 77.pbs (4 slots on 2 nodes), but not started by mpiexec"),
    ],
)
def test_a_job_script_without_a_launcher_is_one_process_and_says_so(variables: dict[str, str], says: str) -> None:
    """It would wait for ranks that never start."""
    node_file = recorded.PBS_NODE_FILE if "PBS_JOBID" in variables else ()
    found = detect(variables, node_file=node_file)
    assert found == Placement()
    assert says in found.remark


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            without(recorded.OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
            "OMPI_COMM_WORLD_SIZE=2, .* OMPI_COMM_WORLD_RANK is not set",
        ),
        (recorded.OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, r"OMPI_COMM_WORLD_RANK=2, .*contradict .*rank 2 of 2"),
        (recorded.OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "OMPI_COMM_WORLD_LOCAL_SIZE=3: .*contradict"),
        (
            without(recorded.OPEN_MPI_ON_TWO_HOSTS, "OMPI_MCA_orte_hnp_uri"),
            "the address of rank 0 is unknown. Set MASTER_ADDR",
        ),
        (recorded.OPEN_MPI | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 look like MPICH, but PMI_RANK"),
        (recorded.SRUN | {"SLURM_PROCID": "2"}, "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=2.*contradict"),
        (recorded.SRUN | {"SLURM_STEP_NODELIST": "node[0"}, "SLURM_STEP_NODELIST: .*brackets don't match"),
        (recorded.KUBEFLOW, r"RANK=1, WORLD_SIZE=2 are set without LOCAL_RANK, .*rank of a node.*Kubeflow"),
        (without(recorded.KUBEFLOW, "RANK", "WORLD_SIZE"), "PET_NNODES=2.*one of 2 nodes.*`evenstep run`"),
        (
            recorded.SRUN | {"RANK": "0", "WORLD_SIZE": "1"},
            "RANK=0, WORLD_SIZE=1 contradict srun's own .*SLURM_PROCID=1",
        ),
        (recorded.SRUN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_RANK=0 contradict"),
        (recorded.SRUN | recorded.TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, "2 independent jobs"),
    ],
)
def test_contradictions_and_gaps_are_errors_that_show_the_variables(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        detect(variables)


@pytest.mark.parametrize("variables", [recorded.OPEN_MPI, recorded.MPICH, recorded.SRUN, recorded.OPEN_MPI_IN_SLURM])
def test_evenstep_run_in_every_task_of_another_launcher_is_refused(variables: dict[str, str]) -> None:
    """Each task would be rank 0 of a world of its own."""
    with pytest.raises(ConfigurationError, match=r"this is task 1 of 2 .* a world of its own with `evenstep run`"):
        refuse_independent_runs(Surroundings(variables), num_nodes=1, what="evenstep run")
    refuse_independent_runs(Surroundings(variables), num_nodes=2, what="evenstep run")
    refuse_independent_runs(Surroundings({}), num_nodes=1, what="evenstep run")


def test_one_gpu_that_the_launcher_gave_is_not_one_for_all() -> None:
    assert detect(recorded.SRUN | {"CUDA_VISIBLE_DEVICES": "3"}).has_one_gpu_of_its_own
    assert not detect(recorded.SRUN | {"CUDA_VISIBLE_DEVICES": "0,1"}).has_one_gpu_of_its_own
    assert not detect(recorded.SRUN).has_one_gpu_of_its_own


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node0", ["node0"]),
        ("gpu[08-11,7],login", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu7", "login"]),
        ("r[1-2]-n[1-2]", ["r1-n1", "r1-n2", "r2-n1", "r2-n2"]),
        ("a[1]b", ["a1b"]),
        ("", []),
    ],
)
def test_slurm_hosts(text: str, hosts: list[str]) -> None:
    assert expand_slurm_hosts(text) == hosts


@pytest.mark.parametrize("text", ["node[1", "node]1", "node[a-b]", "node[[1]]", "node[]"])
def test_slurm_hosts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"brackets|range"):
        expand_slurm_hosts(text)


def test_slurm_counts() -> None:
    assert expand_slurm_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="a number of tasks"):
        expand_slurm_counts("2(y3)")


def test_other_lists_of_hosts() -> None:
    assert hosts_of_node_file(["b slots=2", "a", "", "b"]) == ["b", "a"]
    assert host_of_open_mpi_uri("1.0;tcp6://[fd00::2]:3") is None
    assert control_of_hydra(["bash", "hydra_pmi_proxy --control-port [fd00::2]:37 --x"]) == "[fd00::2]:37"
    assert control_of_hydra(["python --control-port vm:1"]) is None
