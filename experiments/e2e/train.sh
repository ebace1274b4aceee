#!/usr/bin/env bash
# One run on E2E (Novikova et al. 2017) from a decoder's checkpoint: adapters on every dense map, three epochs in batches of 1,024, then
# completions of all meanings of the test set, greedy and by beam search, and the adapters for PEFT. Needs $DPX_DATA/e2e.
#   bash experiments/e2e/train.sh <checkpoint> <name> "mechanism=none"            # without privacy
#   bash experiments/e2e/train.sh <checkpoint> <name> "noise.epsilon=8" mesh=h100
# The third argument and those after it are overrides of the run. GENERATE holds further options of job=generate, such as generate.limit=100.
# Everything is in outputs/<name>, completions under private/generated/ since the run reads the test set too; score them with
# experiments/e2e/score.py. PYTHON is the interpreter, OUTPUTS another folder than outputs.
set -euo pipefail
checkpoint=$1 name=$2
shift 2
python=${PYTHON:-python3} folder=${OUTPUTS:-outputs}/$name
read -ra generate <<<"${GENERATE:-generate.batch_size=105}"
"$python" -m dpx "name=$name" hydra.run.dir="$folder" init=hf "init.path=$checkpoint" init.provenance=public model.dtype=bfloat16 \
    data=e2e data.source.select=test data.sequence_length=96 task=causal_lm train=lora train.rank=8 "train.targets=['*']" \
    batch_schedule.size=1024 microbatch=128 steps=120 schedule.evaluate_every=60 schedule.checkpoint_every=60 schedule.evaluation_rows=1000 "$@"
"$python" -m dpx job=export "run=$folder" job.format=peft "job.to=$folder/adapters"
for beams in 1 4; do
    "$python" -m dpx job=generate "run=$folder" "generate.prompts=$DPX_DATA/e2e/test.jsonl.gz" "generate.beams=$beams" \
        "generate.output=$folder/private/generated/beams_$beams.jsonl" "${generate[@]}"
done
