#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
# sbatch examples/recipes/slurm.sh checkpoints
set -euo pipefail

folder=${1:-checkpoints}
recipes=${RECIPES:-$SLURM_SUBMIT_DIR/examples/recipes}

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# One process a task, with the variables that torch.distributed reads.
ranks() {
    srun --kill-on-bad-exit=0 bash -c '
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
        exec "$@"' rank "$@"
}

# Once for each partition and number of tasks; the jobs after it read the file.
costs=costs-$SLURM_JOB_PARTITION-$SLURM_NTASKS.json
[ -e "$costs" ] || ranks fxcomp calibrate -o "$costs"

status=0
ranks python "$recipes/on_cluster.py" "$folder" "$costs" ${STEPS:+"$STEPS"} || status=$?
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
