#!/usr/bin/env bash
# All the evidence that one accelerator can give, in at most nine minutes, from one command:
#   bash experiments/benchmarks/accelerator.sh                  # Base and Large; files accelerator_*.json beside this script
#   bash experiments/benchmarks/accelerator.sh <folder> small   # the same at small sizes: two minutes on a CPU
# Each file measures the rate of plain products first, then plain, private and autodiff steps in turns at one batch, and the private step at
# the batch of microbatch=auto; peers where they are installed. One batch, since a GPU's compiler takes 10 to 20 s a program. Then noise and update, and whether a run that was stopped ends with
# the bits of one that was not. A stage that fails leaves the others alone. Run nothing beside it.
# PYTHON is the interpreter (python3 on PATH unless given), LIMIT_S the seconds in all, STAGES the stages to run, such as
# STAGES="accelerator_noise accelerator_restart" (all unless given).
# Tables: python -m dpx job=report report.paper=benchmarks
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(realpath -m "${1:-$here/experiments/benchmarks}") scale=${2:-full}
python=${PYTHON:-python3} limit=${LIMIT_S:-510} began=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"
# Processes take turns on one device: none may take all of its memory.
# The restarted run is compiled once for its three starts.
export JAX_COMPILATION_CACHE_DIR="$work/compiled" XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
cd "$work" || exit 1
failed=0

left() { echo $((limit - (SECONDS - began))); }

stage() { # name, seconds at most, then the command, in which @limit@ stands for the seconds that it has
    local name=$1 most=$2 status
    shift 2
    [[ -z "${STAGES:-}" || " $STAGES " == *" $name "* ]] || return 0
    local until=$(($(left) < most ? $(left) : most))
    if [ "$until" -lt 5 ]; then
        echo "$name: left out, no time"
        failed=1
        return
    fi
    echo "$name: at most $until s"
    timeout --kill-after=10 "$((until + 20))" "${@//@limit@/$until}" >"$work/$name.log" 2>&1
    status=$?
    if [ $status -ne 0 ]; then
        echo "$name: failed with $status"
        tail -n 5 "$work/$name.log"
        failed=1
    fi
}

sums() { # name, seconds at most, model, length, logical batch, physical batches, further overrides
    local name="accelerator_$1" seconds=$2 model=$3 length=$4 logical=$5 physical=$6
    shift 6
    stage "$name" "$seconds" "$python" -m dpx name="$name" model="$model" task=mlm_nsp data.pairs=same_document \
        data.sequence_length="$length" job=benchmark 'benchmark.variants=[plain,book_keeping,autodiff]' "mesh=$mesh" "data.vocabulary.size=$vocabulary" "benchmark.logical_batch=$logical" \
        "benchmark.physical_batches=[$physical]" "benchmark.rounds=$rounds" hydra.run.dir="$work/$name" \
        "benchmark.output=$folder/$name.json" benchmark.limit_s=@limit@ "$@"
}

peers() { # the private ways of other libraries that can be imported
    "$python" - <<'PY'
import importlib.util as find

has = {name: find.find_spec(name) is not None for name in ("jax_privacy", "torch", "opacus")}
print(",".join(["jax_privacy"] * has["jax_privacy"] + ["torch", "opacus_ew"] * (has["torch"] and has["opacus"])))
PY
}

restart() { # one run to its end, and one that is stopped after a step and started again: are the released weights the same bytes?
    local line=("$python" -m dpx "model=$restarted" data=synthetic steps=6 seed=0 batch_schedule.size=32 microbatch=8 privacy.delta=1e-4
        accountant=rdp noise=multiplier noise.noise_multiplier=1.0 schedule.evaluate_every=6 schedule.checkpoint_every=1
        schedule.evaluation_rows=8 "mesh=$mesh" "$dtype" "data.directory=$work/data")
    "${line[@]}" hydra.run.dir="$work/whole" || return 1
    "${line[@]}" hydra.run.dir="$work/stopped" &
    local process=$!
    while kill -0 $process 2>/dev/null && [ ! -s "$work/stopped/private/metrics.jsonl" ]; do sleep 0.2; done
    kill -TERM $process 2>/dev/null
    wait $process
    local first=$?
    "${line[@]}" hydra.run.dir="$work/stopped" || return 1
    "$python" - "$work" "$folder/accelerator_restart.json" "$first" "$restarted" <<'PY'
import json, pathlib, sys

import jax
import numpy as np

import dpx

work, output, first, model = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
whole, stopped = (jax.tree.leaves(dpx.load(work / name).params) for name in ("whole", "stopped"))
differ = sum(int(np.sum(np.asarray(a).view(np.uint8) != np.asarray(b).view(np.uint8))) for a, b in zip(whole, stopped, strict=True))
facts = {"kind": "restart", "device": jax.devices()[0].device_kind, "model": model, "steps": 6, "exit_status_when_stopped": first}
facts |= {"bytes": sum(np.asarray(leaf).nbytes for leaf in whole), "bytes_that_differ": differ}
pathlib.Path(output).write_text(json.dumps(facts, indent=2) + "\n")
print(json.dumps(facts))
sys.exit(differ != 0)
PY
}

mesh=single dtype=+model.dtype=float32 vocabulary=30522 rounds=7 restarted=base noise_s=30 restart_s=120
device=$("$python" -c 'import jax; print(jax.default_backend(), jax.devices()[0].device_kind)')
case $device in
    gpu*H100*) mesh=h100 dtype=+model.dtype=bfloat16 ;;
    gpu*) mesh=h200 dtype=+model.dtype=bfloat16 ;;
esac
found=$(peers) both='benchmark.dtypes=[bfloat16,float32]'
if [ "$scale" = small ]; then
    vocabulary=64 rounds=1 restarted=micro
    # A busy machine is no reason for a test to fail.
    limit=1500 noise_s=200 restart_s=600
    sums micro_16 400 micro 16 4 2 "$both" benchmark.automatic_batch=true
else
    sums base_128 210 base 128 256 64 "$both" benchmark.automatic_batch=true
fi
stage accelerator_noise $noise_s "$python" -m dpx name=noise job=benchmark_noise "mesh=$mesh" hydra.run.dir="$work/noise" \
    "job.output=$folder/accelerator_noise.json"
export -f restart
export python restarted mesh dtype work folder
stage accelerator_restart $restart_s bash -c restart
if [ "$scale" = small ]; then
    [ -n "$found" ] && sums micro_16_peers 300 micro 16 4 2 "benchmark.variants=[autodiff,book_keeping,$found]"
else
    sums large_128 110 large 128 128 32 "$both"
    sums base_512 80 base 512 64 16 "$both" task.max_masked_positions=77
    sums large_512 80 large 512 32 8 "$both" task.max_masked_positions=77
    [ -n "$found" ] && sums base_128_peers 60 base 128 64 64 "benchmark.variants=[autodiff,book_keeping,$found]" 'benchmark.peer_batches=[16]'
fi
echo "$((SECONDS - began)) s; files in $folder"
exit $failed
