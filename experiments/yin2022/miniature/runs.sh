#!/usr/bin/env bash
# Yin and Habernal 2022 in miniature: a small BERT, first pre-trained without privacy on articles of Wikipedia, then with differential privacy on
# paragraphs of contracts.
#   DPX_DATA=<data> bash experiments/yin2022/miniature/runs.sh <work folder> [recipe ...]
# Started again it goes on: finished runs are skipped. Without names all recipes are run, in the order below. The page:
#   python -m dpx job=report report.paper=yin2022 report.outputs=<work folder>/outputs
set -euo pipefail
here=$(cd "$(dirname "$0")/../../.." && pwd)
work=$1 python=${PYTHON:-$here/.venv/bin/python} only=("${@:2}")
export DPX_DATA=$(realpath "$DPX_DATA")
mkdir -p "$work" && cd "$work"
export PYTHONPATH=$here JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} JAX_COMPILATION_CACHE_DIR=$PWD/compiled

# The rows of the contracts, with a vocabulary fitted on their public split; then the public weights, with that vocabulary.
ls outputs/data/legal-*/manifest.json >/dev/null 2>&1 || "$python" -m dpx +experiment=laptop/legal_nonprivate_full job=prepare
vocabulary=$(ls "$PWD"/outputs/data/legal-*/vocabulary.txt)
ls outputs/general-*/private/results.json >/dev/null 2>&1 ||
    "$python" -m dpx name=general data=text data.source.paths="$DPX_DATA/text/wikipedia_en/train-0.jsonl.gz" data.vocabulary.size=2048 \
        data.vocabulary.path="$vocabulary" data.sequence_length=32 data.public_fraction=0 data.pairs=none task=mlm \
        task.max_masked_positions=5 model=width_64 mechanism=none optimizer=adamw lr_schedule=linear lr_schedule.learning_rate=3e-3 \
        lr_schedule.warmup_steps=100 batch_schedule.size=64 steps=1500 microbatch=64 schedule.evaluate_every=500 \
        schedule.evaluation_rows=500 schedule.checkpoint_every=500
general=$(dirname "$(dirname "$(ls outputs/general-*/private/results.json)")")

for recipe in ${only[*]:-legal_fig1a_snr_batch legal_nonprivate_full legal_fig1b_snr_lr legal_clip_sweep}; do
    /usr/bin/time -a -o times.tsv -f "$recipe\t%e\t%U\t%S\t%M\t%x" "$python" -m dpx +experiment="laptop/$recipe" \
        init=run init.run="$general" init.disjoint_from=[general] || [ $? -lt 128 ]
done
