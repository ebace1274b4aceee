#!/usr/bin/env bash
# SST-2 by a small encoder, {lora, all, last_layer, bias} by epsilon and replicate, one private pass; one run after another.
#   DPX_DATA=<data> bash experiments/fine_tuning/sst2.sh <checkpoint folder> [work folder]
# Started again it goes on: finished runs are skipped, a run that was cut short continues. Rates are chosen first, on one replicate each, by
# short runs on a hash split of the training set (the official dev set is not read); the search is charged to no run of the grid. The table:
#   python experiments/fine_tuning/table.py <work folder>
set -euo pipefail
checkpoint=$(realpath "$1")
here=$(cd "$(dirname "$0")/../.." && pwd)
work=${2:-outputs/sst2} python=${PYTHON:-$here/.venv/bin/python}
mkdir -p "$work" && cd "$work"
export PYTHONPATH=$here JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
encoder="init=hf init.path=$checkpoint init.provenance=public model=hf model.pool=mean model.classifier=linear data=glue_sst2
    optimizer=adam task=classification privacy.delta=1e-6 length_buckets=auto microbatch=64 lr_schedule=linear"
source "$here/experiments/fine_tuning/runs.sh"

short() { # what is trained, rate
    # shellcheck disable=SC2046
    run "rate_$1_$2" $(trains "$1") lr_schedule.learning_rate="$2" lr_schedule.warmup_steps=2 steps=12 batch_schedule.size=512 \
        noise.epsilon=8 data.source.test_paths=null schedule.evaluate_every=12 schedule.checkpoint_every=6
}
full() { # what is trained, epsilon or none, replicate; other than one: passes over the data and what that is called
    local rate noise=noise.epsilon=$2 steps=$((66 * ${4:-1}))
    wait_turn='' rates "$1"
    rate=$(rate_of "$1" .) || return 0
    [ "$2" = none ] && noise=mechanism=none
    # shellcheck disable=SC2046
    run "sst2_$1${5:-}_$2_$3" $(trains "$1") lr_schedule.learning_rate="$rate" lr_schedule.warmup_steps=6 steps=$steps \
        batch_schedule.size=1024 "$noise" replicate="$3" data.source.select=test schedule.evaluate_every=$steps schedule.checkpoint_every=11
}
rates() { # what is trained
    local these='' rate
    case $1 in
    lora) these='1e-3 3e-4 3e-3' ;; lora_ffa) these='1e-3 3e-4 3e-3' ;; all) these='3e-4 1e-4 1e-3' ;;
    last_layer) these='1e-2 3e-3 3e-2' ;; bias) these='3e-3 1e-3 1e-2' ;;
    esac
    for rate in $these; do short "$1" "$rate"; done
}

for trained in lora all last_layer; do rates $trained; done
for replicate in 1 2 3; do
    for trained in lora all last_layer; do full $trained 8 $replicate; done
    full lora 1 $replicate
    full lora 3 $replicate
    for trained in lora last_layer; do full $trained none $replicate; done
done
for replicate in 1 2 3; do full all none $replicate; done
full lora 8 1 3 _three_passes
full lora_ffa 8 1
for replicate in 1 2 3; do
    for epsilon in 8 3 1; do for trained in bias all last_layer; do full $trained $epsilon $replicate; done; done
done
