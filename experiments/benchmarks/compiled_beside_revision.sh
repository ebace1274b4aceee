#!/usr/bin/env bash
# What the compiler says of one private microbatch of 32 rows, this tree beside an earlier revision: no clock, so anything may run beside it.
#   bash experiments/benchmarks/compiled_beside_revision.sh 2a45cd6 tiny mini small
# Prints products, FLOPs, bytes that are read and written, and temporaries, and the ratio of each.
set -euo pipefail
revision=$1
shift
here=$(git rev-parse --show-toplevel) python=${PYTHON:-$(git rev-parse --show-toplevel)/.venv/bin/python}
work=$(mktemp -d)
git -C "$here" worktree add -q --detach "$work/old" "$revision"
trap 'git -C "$here" worktree remove --force "$work/old"; rm -rf "$work"' EXIT
cat >"$work/compiled.py" <<'PY'
import json, sys

import jax
import numpy as np

from dpx import config
from dpx.config import recipes
try:
    # Where earlier revisions have it.
    from dpx.benchmark import sums
except ImportError:
    from dpx_papers.benchmark import sums
from dpx.task.mlm import Special
from dpx.task.objective import objective
from dpx.training.microbatch import synthetic_rows

experiment, _ = config.build(recipes.compose([f"model={sys.argv[1]}"]))
subject = objective(experiment.model, experiment.task, 1024, Special(0, 1, 2, 3, 4))
rows = synthetic_rows(experiment.task, 32, experiment.data.sequence_length, 1024)
key = np.zeros(2, np.uint32)
shapes = jax.eval_shape(subject.init, key), jax.eval_shape(subject.batch, key, rows)
# Earlier revisions have it by another name.
summed = getattr(sums, "variant_sum", None) or sums.microbatch_sum
compiled = jax.jit(summed(subject, experiment.clip, "book_keeping", 32)).lower(*shapes).compile()
cost = compiled.cost_analysis()
facts = {"products": compiled.as_text().count(" dot("), "FLOPs": cost["flops"], "bytes": cost["bytes accessed"]}
print(json.dumps(facts | {"temporaries": compiled.memory_analysis().temp_size_in_bytes}))
PY
for model in "$@"; do
    old=$(cd "$work" && PYTHONPATH="$work/old" JAX_PLATFORMS=cpu "$python" compiled.py "$model")
    new=$(cd "$work" && PYTHONPATH="$here" JAX_PLATFORMS=cpu "$python" compiled.py "$model")
    "$python" -c 'import json, sys
model, old, new = sys.argv[1], *map(json.loads, sys.argv[2:])
print(model, ", ".join(f"{name} {old[name]:,.0f} -> {new[name]:,.0f} ({new[name] / old[name]:.4f})" for name in old))' "$model" "$old" "$new"
done
