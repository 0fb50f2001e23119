"""What launchers set, shortened to what says who a process is, and what could be mistaken for that.

Of Open MPI 4.1.4, MPICH 4.0.2 and Slurm 22.05 recorded from the real programs; of the others from their documentation.
"""

from __future__ import annotations

OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1884356609",
    "OMPI_MCA_orte_hnp_uri": "1884356608.0;tcp://192.0.2.2:48633;tcp6://[fd00::2]:33269",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "1884356609",
    "PMIX_RANK": "1",
}

# Rank 3 of 4 on two hosts.
OPEN_MPI_ON_TWO_HOSTS = OPEN_MPI | {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1884356608.0;tcp://10.0.0.1,192.168.7.1:48633",
    "OMPI_MCA_orte_num_nodes": "2",
    "PMIX_RANK": "3",
}

OPEN_MPI_5_ON_TWO_HOSTS = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-login-1-4711@1",
    "PMIX_RANK": "2",
}

MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
HYDRA_ANCESTORS = (
    "sh -c python train.py",
    "/usr/bin/hydra_pmi_proxy --control-port vm:37015 --rmk user --launcher ssh --demux poll --pgid 0 --proxy-id 0",
    "mpiexec.mpich -n 2 sh -c python train.py",
)

INTEL_MPI = {
    "I_MPI_HYDRA_UUID": "8b2c0000-1234",
    "I_MPI_MPIRUN": "mpirun",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "0",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}
INTEL_ANCESTORS = (
    "/opt/intel/mpi/bin//hydra_bstrap_proxy --upstream-host s01 --upstream-port 40123 --pgid 0 --launcher ssh",
)

PALS = {
    "PALS_APID": "0f5a-apid",
    "PALS_DEPTH": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PALS_RANKID": "3",
    "PBS_JOBID": "77.pbs",
    "PMI_JOBID": "0f5a-apid",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
PBS_NODE_FILE = ("x1000c0s0", "x1000c0s0", "x1000c0s1", "x1000c0s1")

SRUN = {
    "SLURMD_NODENAME": "node0",
    "SLURM_CLUSTER_NAME": "evenstep",
    "SLURM_GTIDS": "0,1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node0",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2",
}

# Rank 5 of 7 on gpu07, gpu08, gpu09 with 3, 3 and 1 ranks, in a step that doesn't begin at the job's first host.
SRUN_ON_THREE_HOSTS = SRUN | {
    "SLURM_JOB_NODELIST": "gpu[06-09]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.6",
    "SLURM_LOCALID": "2",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_TASKS_PER_NODE": "3(x2),1",
}

SBATCH_BODY = {
    "SLURMD_NODENAME": "node0",
    "SLURM_CLUSTER_NAME": "evenstep",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "node0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}

# What mpirun and mpiexec of an sbatch body leave of Slurm's: a step of one task, and SLURM_PROCID=0 on every rank.
_STEP_OF_MPIEXEC = SBATCH_BODY | {
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "node0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
OPEN_MPI_IN_SLURM = OPEN_MPI | _STEP_OF_MPIEXEC
MPICH_IN_SLURM = MPICH | _STEP_OF_MPIEXEC

SRUN_WITH_PMI2 = SRUN | {"PMI_FD": "13", "PMI_JOBID": "1.0", "PMI_RANK": "1", "PMI_SIZE": "2"}

KUBEFLOW = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "RANK": "1",
    "WORLD_SIZE": "2",
}

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "5",
    "TORCHELASTIC_RUN_ID": "none",
}
