#!/usr/bin/env bash
# Adapters at one compute budget: batches by rates on Overruling (five passes) and MRPC (five passes), epsilon 8, 64 tokens. For the table of
# `job=design`, beside the head's grid (grid.py).
#   DPX_DATA=<data> bash experiments/fine_tuning/adapters_grid.sh <checkpoint folder> <work folder>
# Started again it goes on. `python experiments/fine_tuning/table.py <work folder> --keep` notes what is finished.
set -euo pipefail
checkpoint=$(realpath "$1")
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$2 python=${PYTHON:-$here/.venv/bin/python}
mkdir -p "$work" && cd "$work"
export PYTHONPATH=$here JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
encoder="init=hf init.path=$checkpoint init.provenance=public model=hf model.pool=mean model.classifier=linear data.sequence_length=64
    task=classification privacy.delta=1e-5 length_buckets=auto microbatch=64 lr_schedule=linear train=lora train.head=true noise.epsilon=8"
source "$here/experiments/fine_tuning/runs.sh"

point() { # task, its data, batch, steps, rate
    run "grid_$1_lora_8_$3_$5" data="$2" batch_schedule.size="$3" steps="$4" lr_schedule.learning_rate="$5" \
        lr_schedule.warmup_steps=$((($4 + 9) / 10)) data.source.select=test schedule.evaluate_every="$4" schedule.checkpoint_every="$4"
}

for point in "1024 10 1e-2" "1024 5 2e-2" "512 19 3e-3" "1024 10 3e-3" "512 19 1e-2" "256 38 1e-3" "512 19 1e-3"; do
    # shellcheck disable=SC2086
    point overruling overruling $point
done
for point in "1024 18 1e-2" "1024 18 3e-3"; do
    # shellcheck disable=SC2086
    point mrpc glue_mrpc $point
done
