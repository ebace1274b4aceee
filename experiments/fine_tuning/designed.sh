#!/usr/bin/env bash
# What `job=design` alone reaches: designs for the head at epsilon 8 and half an hour of the declared device, trained as they are written.
#   DPX_DATA=<data> bash experiments/fine_tuning/designed.sh <checkpoint folder> <work folder>
set -euo pipefail
checkpoint=$(realpath "$1")
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$2 python=${PYTHON:-$here/.venv/bin/python}
mkdir -p "$work" && cd "$work"
export PYTHONPATH=$here JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}

designed() { # task, its data and other values
    "$python" -m dpx name="$1" init=hf init.path="$checkpoint" init.provenance=public model=hf model.pool=mean model.classifier=linear \
        task=classification train=last_layer privacy.delta=1e-5 data.sequence_length=64 length_buckets=auto microbatch=64 "${@:2}" \
        job=design design.epsilon=8 design.device_hours=0.5
    "$python" -m dpx --config-dir "$(echo outputs/"$1"-*/release)" +experiment=design
}

designed mrpc data=glue_mrpc data.source.select=test
designed overruling data=overruling data.source.select=test
designed qnli data=glue_qnli data.heldout_fraction=0.1
