#!/usr/bin/env bash
# Seconds of a step of the main job, this tree beside an earlier revision, by turns in processes of their own.
#   bash experiments/benchmarks/beside_revision.sh 2a45cd6 [pairs] [steps] [overrides ...]
# Prints the median step of each run (the first two steps left out) and the median over runs and pairs. Run nothing beside it.
set -euo pipefail
revision=$1 pairs=${2:-3} steps=${3:-40}
shift $(($# < 3 ? $# : 3))
here=$(git rev-parse --show-toplevel) python=${PYTHON:-$(git rev-parse --show-toplevel)/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git -C "$here" worktree add -q --detach "$work/old" "$revision"
trap 'git -C "$here" worktree remove --force "$work/old"; rm -rf "$work"' EXIT
run() { # tree, name
    PYTHONPATH=$1 "$python" -m dpx steps="$steps" microbatch=32 noise=multiplier noise.noise_multiplier=1.0 schedule.evaluate_every=100000 \
        schedule.checkpoint_every=100000 schedule.evaluation_rows=64 data.directory="$work/data" hydra.run.dir="$work/$2" "${@:3}" >"$work/$2.log" 2>&1 || {
        tail -n 5 "$work/$2.log"
        exit 1
    }
}
for pair in $(seq "$pairs"); do
    run "$work/old" "old-$pair" "$@"
    run "$here" "new-$pair" "$@"
done
"$python" - "$work" "$pairs" <<'PY'
import json, pathlib, statistics, sys

work, pairs = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def step_s(name):
    lines = [json.loads(line) for line in (work / name / "private" / "metrics.jsonl").read_text().splitlines()][2:]
    return statistics.median(line["train/examples"] / line["train/examples_per_s"] for line in lines if line["train/examples"])

medians = {kind: [step_s(f"{kind}-{pair}") for pair in range(1, pairs + 1)] for kind in ("old", "new")}
ratios = [new / old for old, new in zip(medians["old"], medians["new"], strict=True)]
for kind, values in medians.items():
    print(kind, " ".join(f"{1e3 * value:.1f} ms" for value in values))
print("new over old, pair by pair:", " ".join(f"{ratio:.4f}" for ratio in ratios), f"median {statistics.median(ratios):.4f}")
PY
