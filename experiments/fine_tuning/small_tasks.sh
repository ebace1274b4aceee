#!/usr/bin/env bash
# MRPC and Overruling by the same encoder, five replicates of each setting, five passes at batches of 256; rates are those chosen on SST-2,
# so that nothing is chosen on these.
#   DPX_DATA=<data> bash experiments/fine_tuning/small_tasks.sh <checkpoint folder> <work folder of sst2.sh>
# Started again it goes on. The table:
#   python experiments/fine_tuning/table.py <work folder>
set -euo pipefail
checkpoint=$(realpath "$1")
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$2 python=${PYTHON:-$here/.venv/bin/python}
cd "$work"
export PYTHONPATH=$here JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
encoder="init=hf init.path=$checkpoint init.provenance=public model=hf model.pool=mean model.classifier=linear
    optimizer=adam task=classification privacy.delta=1e-5 length_buckets=auto microbatch=32 lr_schedule=linear"
source "$here/experiments/fine_tuning/runs.sh"

small() { # task, its data, steps, what is trained, epsilon or none, replicate
    local rate noise=noise.epsilon=$5
    rate=$(rate_of "$4" .) || return 0
    [ "$5" = none ] && noise=mechanism=none
    # shellcheck disable=SC2046
    run "$1_$4_$5_$6" $(trains "$4") data="$2" lr_schedule.learning_rate="$rate" lr_schedule.warmup_steps=6 steps="$3" \
        batch_schedule.size=256 "$noise" replicate="$6" data.source.select=test schedule.evaluate_every="$3" schedule.checkpoint_every=12
}

# What is private, and the quicker of the two, comes first: a grid that is cut short is of use.
for trained in last_layer lora; do
    for epsilon in 8 none; do
        for replicate in 1 2 3 4 5; do small overruling overruling 38 $trained $epsilon $replicate; done
        for replicate in 1 2 3 4 5; do small mrpc glue_mrpc 72 $trained $epsilon $replicate; done
    done
done
