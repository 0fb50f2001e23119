#!/bin/bash
# A training run under PBS (PBS Pro, OpenPBS). Submit it with: mkdir -p logs && qsub pbs.sh
#
# Change the lines below a comment with "Change". One process per node is right: evenstep starts the ranks there.

# Change: the job's name, at most 15 characters.
#PBS -N evenstep
# Change: nodes, and cores of each. With GPUs add :ngpus=8
#PBS -l select=2:ncpus=8:mpiprocs=1
#PBS -l place=scatter
# Change: how long it may run; the seconds behind `timeout` below are 120 less.
#PBS -l walltime=4:00:00
# Change: the queue, and the account that is charged. Remove one # of each of these lines that you want.
##PBS -q gpu
##PBS -A my-account
# Change: the directory of the logs, here and behind --log-dir. It has to exist when the job starts.
#PBS -o logs/
#PBS -j oe
#PBS -r y

cd "$PBS_O_WORKDIR" || exit 1

# Change: what makes `evenstep` and your libraries available.
# module load python cuda
# source "$HOME/venv/bin/activate"

num_nodes=$(sort -u "$PBS_NODEFILE" | wc -l)

# 120 s before the time is up: save, and end with status 75. Preemption sends SIGTERM: the same.
# mpiexec --ppn is that of MPICH and PALS; with Open MPI write --map-by ppr:1:node.
# Change: the last line, which is the training script and its arguments.
timeout --preserve-status --signal=TERM $((4 * 3600 - 120)) \
    mpiexec -n "$num_nodes" --ppn 1 \
    evenstep run --nnodes "$num_nodes" --shutdown-timeout 120 --log-dir logs \
    train.py
status=$?

if [ "$status" -eq 75 ]; then
    echo "saved; queued again to go on"
    qrerun "$PBS_JOBID" && exit 0
fi
exit "$status"
