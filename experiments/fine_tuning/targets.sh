#!/usr/bin/env bash
# Numbers and several labels at epsilon 8, by the default head of train=last_layer on all-MiniLM-L6-v2:
# [ROWS=2000 TEST=500] targets.sh <checkpoint> <work> [replicates]
# 20 passes in batches of an eighth of the rows, path 3: what is best for Overruling in measured.csv; nothing is chosen on these rows.
set -euo pipefail
checkpoint=$1 work=$2 replicates=${3:-1} rows=${ROWS:-2000} test=${TEST:-500}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
[ -f "$work/slots_test.csv" ] || "$python" "$here/targets_data.py" "$work" "$rows" "$test"
common="init=hf init.path=$checkpoint init.provenance=public data.source.select=test data.sequence_length=32 data.directory=$work/data length_buckets=[24,32]
    steps=160 batch_schedule.size=$((rows / 8)) lr_schedule.learning_rate=3.75e-2 noise.epsilon=8 privacy.delta=1e-5 schedule.evaluation_rows=$test schedule.evaluate_every=160"
for replicate in $(seq "$replicates"); do
    "$python" -m dpx +experiment=fine_tune_number $common data.source.pair_field=pair data.source.paths="$work/pairs.csv" \
        data.source.test_paths="$work/pairs_test.csv" replicate="$replicate" hydra.run.dir="$work/outputs/pairs_$replicate"
    "$python" -m dpx +experiment=fine_tune_labels $common data.source.label_names=[food,price,rating,area,family,near] \
        data.source.paths="$work/slots.csv" data.source.test_paths="$work/slots_test.csv" replicate="$replicate" hydra.run.dir="$work/outputs/slots_$replicate"
done
