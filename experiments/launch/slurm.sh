#!/usr/bin/env bash
# One run on two nodes of eight GPUs, one process a node; every task runs the same line, and dpx finds its place from Slurm.
#   sbatch experiments/launch/slurm.sh +experiment=anil_2m_batch mesh=h100_8 mesh.data=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
set -euo pipefail
# The port must be free on the first node; another job there may have the one that dpx derives from the number of this job.
export JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):61234}
exec srun --kill-on-bad-exit=1 python -m dpx "$@"
