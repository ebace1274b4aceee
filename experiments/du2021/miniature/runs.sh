#!/usr/bin/env bash
# Table 2 of Du and Mi 2021 in miniature: a small public encoder on the first 4,000 rows of SST-2 and on MRPC, one run after another.
#   DPX_DATA=<data> bash experiments/du2021/miniature/runs.sh <checkpoint folder> <work folder> [setting ...]
# Started again it goes on: finished runs are skipped. Without names all are run, in the order below, three replicates of each.
# `tasks=mrpc` and `replicates="2 3"` choose among the rest.
# The table:
#   python experiments/du2021/miniature/table.py <work folder> --keep
set -euo pipefail
checkpoint=$(realpath "$1")
here=$(cd "$(dirname "$0")/../../.." && pwd)
work=$2 python=${PYTHON:-$here/.venv/bin/python} only=("${@:3}")
export DPX_DATA=$(realpath "$DPX_DATA")
mkdir -p "$work" && cd "$work"
work=$PWD WORDS=$PWD/words.csv kept=$here/experiments/du2021/miniature
export WORDS PYTHONPATH=$here JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} JAX_COMPILATION_CACHE_DIR=$work/compiled
# awk reads to the end, so that no pipe is closed early; the name is this process's own, because two may share a work folder.
[ -f rows.tsv.gz ] || { zcat "$DPX_DATA/sst2/train.tsv.gz" | awk 'NR <= 4001' | gzip -n >rows.$$ && mv rows.$$ rows.tsv.gz; }
encoder="init=hf init.path=$checkpoint init.provenance=public model=hf model.pool=mean model.classifier=linear task=classification
    data.source.select=test microbatch=32 optimizer=adamw optimizer.arguments.b2=0.999 optimizer.arguments.eps=1e-8
    optimizer.arguments.weight_decay=0.01 lr_schedule=linear lr_schedule.warmup_steps=0"
# Delta is 1 / 2D.
declare -A data=(
    [sst2]="data=glue_sst2 data.source.paths=$work/rows.tsv.gz data.sequence_length=32 privacy.delta=1.25e-4"
    [mrpc]="data=glue_mrpc data.sequence_length=64 privacy.delta=1.363e-4"
)
source "$here/experiments/fine_tuning/runs.sh"

# 1,920 rows drawn in expectation: 60 steps of 32, or 15 of 128.
small="batch_schedule.size=32 steps=60 schedule.evaluate_every=60 schedule.checkpoint_every=20"
large="batch_schedule.size=128 steps=15 schedule.evaluate_every=15 schedule.checkpoint_every=15"
forward="mechanism=dp_fp mechanism.micro_batches=32 noise=target_clt privacy.adjacency=zero_out_text clip.clipping_norm=1"
carriers="mechanism=rgp mechanism.rank=1 mechanism.decomposes=weight mechanism.head_factor=0.1 train=matching
    train.paths=[layers/*/kernel,classifier/*] accountant=rdp clip.clipping_norm=1 optimizer.arguments.eps=1e-6
    optimizer.arguments.weight_decay=0 lr_schedule.learning_rate=3e-4"
declare -A settings=(
    [none]="mechanism=none train=all lr_schedule.learning_rate=2e-4 $small"
    [dpfp_1.73]="$forward train=all noise.epsilon=1.73 lr_schedule.learning_rate=2e-4 $small"
    [frozen_1.73]="$forward noise.epsilon=1.73 train=last_layer lr_schedule.learning_rate=3e-2 $small"
    [dpsgd_3]="accountant=rdp train=all noise.epsilon=3 clip.clipping_norm=0.1 lr_schedule.learning_rate=5e-4 $large"
    [rgp_3]="$carriers noise.epsilon=3 $large"
    [dpfp_4.33]="$forward train=all noise.epsilon=4.33 lr_schedule.learning_rate=2e-4 $small"
    [frozen_4.33]="$forward noise.epsilon=4.33 train=last_layer lr_schedule.learning_rate=3e-2 $small"
    [dpsgd_8]="accountant=rdp train=all noise.epsilon=8 clip.clipping_norm=0.1 lr_schedule.learning_rate=5e-4 $large"
    [rgp_8]="$carriers noise.epsilon=8 $large"
)
order="rgp_3 rgp_8 none dpfp_1.73 frozen_1.73 dpsgd_3 dpfp_4.33 frozen_4.33 dpsgd_8"
for replicate in ${replicates:-1 2 3}; do
    for task in ${tasks:-sst2 mrpc}; do
        for setting in ${only[*]:-$order}; do
            # Where the word table gets gradients without noise on them, the words that each step shows are counted.
            case $setting in none | dpfp_*) program=$kept/watched.py ;; *) program= ;; esac
            # shellcheck disable=SC2086
            run "${task}_${setting}_$replicate" ${data[$task]} ${settings[$setting]} replicate=$replicate
        done
    done
done
