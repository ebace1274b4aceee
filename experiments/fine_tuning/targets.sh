#!/usr/bin/env bash
# Numbers and several labels at epsilon 8, by the default head of train=last_layer on all-MiniLM-L6-v2:
# [ROWS=2000 TEST=500] targets.sh <checkpoint> <work> [replicates] [pairs|slots]
# 20 passes in batches of an eighth of the rows, path 3: what is best for Overruling in measured.csv; nothing is chosen on these rows.
set -euo pipefail
checkpoint=$1 work=$2 replicates=${3:-1} only=${4:-} rows=${ROWS:-2000} test=${TEST:-500}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
[ -f "$work/slots_test.csv" ] || "$python" "$here/targets_data.py" "$work" "$rows" "$test"
common="init=hf init.path=$checkpoint init.provenance=public data.source.select=test data.directory=$work/data
    steps=160 lr_schedule.learning_rate=3.75e-2 batch_schedule.size=$((rows / 8)) noise.epsilon=8 privacy.delta=1e-5 schedule.evaluation_rows=$test schedule.evaluate_every=160"
train() { # kind, replicate, overrides
    [ -z "$only" ] || [ "$only" = "$1" ] || return 0
    [ ! -f "$work/outputs/$1_$2/private/results.json" ] || return 0
    "$python" -m dpx $common data.source.paths="$work/$1.csv" data.source.test_paths="$work/$1_test.csv" replicate="$2" \
        hydra.run.dir="$work/outputs/$1_$2" "${@:3}"
}
for replicate in $(seq "$replicates"); do
    train pairs "$replicate" +experiment=fine_tune_number data.source.pair_field=pair data.sequence_length=64 'length_buckets=[32,48,64]'
    train slots "$replicate" +experiment=fine_tune_labels data.source.label_names=[food,price,rating,area,family,near] data.sequence_length=32 \
        'length_buckets=[24,32]'
done
