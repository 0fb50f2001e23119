#!/bin/bash
# A training run under Slurm. Submit it with: mkdir -p logs && sbatch slurm.sh
#
# Change the lines below a comment with "Change". One task per node is right: evenstep starts the ranks there.

# Change: the job's name.
#SBATCH --job-name=evenstep
# Change: nodes.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# Change: cores of each node.
#SBATCH --cpus-per-task=8
# Change: GPUs of each node. Remove one # of each of these three lines that you want.
##SBATCH --gpus-per-node=8
# Change: the partition, and the account that is charged.
##SBATCH --partition=gpu
##SBATCH --account=my-account
# Change: how long it may run.
#SBATCH --time=4:00:00
# Change: the directory of the logs, here and behind --log-dir. It has to exist when the job starts.
#SBATCH --output=logs/%x-%j.log

# 120 s before the time is up, or when the job is preempted: save, end with status 75, and be queued again.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120

# Change: what makes `evenstep` and your libraries available.
# module load python cuda
# source "$HOME/venv/bin/activate"

# The nodes find each other through Slurm's variables. To resume is the script's business: with evenstep.Checkpointer
# it is `checkpoint.resume()`, which starts afresh where there is nothing.
# Change: the last line, which is the training script and its arguments.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    evenstep run --nnodes "$SLURM_JOB_NUM_NODES" --shutdown-timeout 120 --log-dir logs \
    train.py
status=$?

if [ "$status" -eq 75 ]; then
    echo "saved; queued again to go on"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
