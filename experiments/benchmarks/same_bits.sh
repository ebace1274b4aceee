#!/usr/bin/env bash
# Whether seeded micro runs of this tree and of an earlier revision come to the same bits: for a refactoring that must change nothing.
#   bash experiments/benchmarks/same_bits.sh 2e697ef [case ...]
# Compared are released parameters byte by byte, the ledger (events and checksums of sums, hence the draws), the statement, released
# telemetry and the metrics but for their seconds. Names, digests and fingerprints, which differ between any two runs, and sentences are
# left out.
# One line a case; exits 1 where one differs.
set -euo pipefail
revision=$1
shift
here=$(git rev-parse --show-toplevel) python=${PYTHON:-$(git rev-parse --show-toplevel)/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git -C "$here" worktree add -q --detach "$work/tree" "$revision"
trap 'git -C "$here" worktree remove --force "$work/tree"; rm -rf "$work"' EXIT
# This tree as it is now: edits made while the runs go on reach none of them.
mkdir "$work/old" "$work/new" "$work/here"
cp -r "$here/dpx" "$here/conf" "$work/here"

base=(model=micro data=synthetic seed=7 steps=6 microbatch=4 batch_schedule.size=12 schedule.evaluate_every=100 schedule.evaluation_rows=16
    schedule.checkpoint_every=3 schedule.checkpoints_kept=9)
noisy=(noise=multiplier noise.noise_multiplier=0.8 accountant=rdp)
units=(privacy.unit=document privacy.rows_per_unit_max=3)
# name|overrides, in the order in which they run: a fork needs its parent.
cases=(
    "main|${noisy[*]}"
    "fork|${noisy[*]} fork=main@3"
    "resume|${noisy[*]}"
    "ghost|${noisy[*]} clipping_method=ghost"
    "vmap|${noisy[*]} clipping_method=vmap"
    "plain|mechanism=none"
    "banded|${noisy[*]} mechanism=banded sampler=cyclic_poisson"
    "banded_fork|${noisy[*]} mechanism=banded sampler=cyclic_poisson fork=banded@3"
    "discrete_gaussian|${noisy[*]} mechanism=discrete_gaussian"
    "sample_units|${noisy[*]} ${units[*]} privacy.unit_mode=sample_units"
    "group|${noisy[*]} ${units[*]} accountant=pld"
    "canaries|${noisy[*]} audit=canaries audit.gradients=40 audit.primary.guesses=10"
    "normalised|${noisy[*]} clip=normalised"
    "per_layer|${noisy[*]} clip=per_layer"
    "quantile|${noisy[*]} clip=quantile"
    "quantile_fork|${noisy[*]} clip=quantile fork=quantile@3"
    "plain_quantile|mechanism=none clip=quantile"
    "released|${noisy[*]} clip=quantile telemetry=released"
    "truncated_poisson|${noisy[*]} sampler=truncated_poisson accountant=pld"
    "fixed_size|${noisy[*]} sampler=fixed_size privacy.adjacency=replace_one"
    "shuffled|${noisy[*]} sampler=shuffled"
    "balls_in_bins|${noisy[*]} sampler=balls_in_bins"
)

# All cases of a side run in one process, from the side's own folder: a fork's randomness follows the path it was given.
cat >"$work/run.py" <<'PY'
import json
import pathlib
import sys

from dpx.__main__ import main
from dpx.training import loop

once = loop.one_step


def mortal(runtime, epoch, secret, step, state):
    if step == 4:
        sys.exit(0)
    return once(runtime, epoch, secret, step, state)


def run(arguments):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


for line in sys.stdin.read().splitlines():
    name, _, overrides = line.partition("|")
    if "mechanism=banded" in overrides:
        # Both sides have one strategy, and need no library for it.
        private = pathlib.Path(name) / "private"
        private.mkdir(parents=True)
        (private / "strategy.json").write_text(json.dumps({"coefficients": [0.8, 0.4, 0.2, 0.1]}))
    if name == "resume":
        loop.one_step = mortal
        run([*overrides.split(), f"hydra.run.dir={name}"])
        loop.one_step = once
    if run([*overrides.split(), f"hydra.run.dir={name}"]):
        sys.exit(f"{name}: the run failed")
PY

cat >"$work/compare.py" <<'PY'
import json
import pathlib
import sys

import jax
import numpy as np

from dpx.files.orbax_checkpoints import released

LEFT_OUT = {"name", "epoch_name", "origin", "fingerprint", "start", "parent", "ledger_mark", "mark", "chain", "identity", "secret_tag"}
# How often epsilon is shown follows the clock; tokens were not counted before 38cf43f.
LEFT_OUT |= {"secret_place", "train/examples_per_s", "privacy/epsilon", "train/tokens", "train/padded_tokens"}
# Sentences, which may name a random identity, and the digests in which they take part.
LEFT_OUT |= {"assumptions", "not_covered", "epsilon_is_of", "reasons", "reason", "why", "valid_only_if", "meaning", "sealed", "stated"}

# Null and empty fields count as missing: earlier revisions left some of them out.
EMPTY = (None, [], {}, {"canaries": "none"})
# Only the present statements have these.
LEFT_OUT |= {"format", "kind"}


def known(value):
    """`value` without what no two runs share; an origin or an epoch's name is only ever a name."""
    if isinstance(value, dict):
        kept = {key: known(item) for key, item in value.items() if key not in LEFT_OUT and item not in EMPTY}
        return kept if not isinstance(value.get("ledger"), dict) or "position" not in value["ledger"] else kept | {"ledger": None}
    return [known(item) for item in value] if isinstance(value, list) else value


def lines(path):
    return [known(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def tagged(line):
    """A line of the ledger in the present form; before format 5 it had no `kind`, and a step was a bare number."""
    if isinstance(line, int):
        return {"kind": "step", "step": line}
    if "kind" not in line:
        kinds = {"from": "begins_from", "origin": "event"}
        kind = next(kinds.get(name, name) for name in ("from", "origin", *line) if name in line)
        line = {"kind": kind} | {"begins_from" if name == "from" else name: value for name, value in line.items()}
    if line["kind"] == "plan":
        plan = line["plan"]
        parts = plan.get("declared") or {}
        values = {name: part.get("values", part) for name, part in parts.items()}
        return line | {"plan": plan | (plan.get("step") or {}) | {"step": None, "at_default": None, "declared": values}}
    return line


def ledger(path):
    """A line of the ledger is a digest and its JSON; the first one is the chain's own. Seals, which are digests, are left out."""
    found = [tagged(json.loads(text.partition(" ")[2])) for text in path.read_text().splitlines()[1:]]
    return [(line["kind"], known(line)) for line in found if not line["kind"].startswith(("sealed", "stated"))]


def statement(path):
    """What a statement says, without its format. Before format 3 it had no `kind`, and one of its keys held an accountant's name."""
    found = json.loads(path.read_text())
    rounded = found["ledger"].get("rates_rounded_up")
    if rounded is not None:
        errors = [rounded.pop(name) for name in list(rounded) if name.endswith("epsilon_error_at_most")]
        found["ledger"]["rates_rounded_up"] = rounded | {"errors": errors, "accountant": None}
    return known(found | {"format": None, "kind": None})


def difference(old, new):
    params = [jax.tree_util.tree_leaves_with_path(released(side / "release" / "params")) for side in (old, new)]
    if [path for path, _ in params[0]] != [path for path, _ in params[1]]:
        return "names of parameters"
    if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for (_, a), (_, b) in zip(*params, strict=True)):
        return "parameters"
    ledgers = [ledger(side / "private" / "ledger") for side in (old, new)]
    if ledgers[0] != ledgers[1]:
        return "ledger"
    for name in ("private/metrics.jsonl", "release/telemetry.jsonl"):
        if lines(old / name) != lines(new / name):
            return name
    apart = list(fields_apart(*(statement(side / "release" / "privacy.json") for side in (old, new))))
    return f"statement: {', '.join(apart)}" if apart else None


def fields_apart(old, new, path=""):
    """Paths of the fields in which two statements differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from fields_apart(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            yield from fields_apart(*pair, f"{path}.{at}")
    elif old != new:
        yield f"{path} ({json.dumps(old)[:80]} -> {json.dumps(new)[:80]})"


found = {name: difference(*(pathlib.Path(sys.argv[1]) / side / name for side in ("old", "new"))) for name in sys.argv[2:]}
for name, what in found.items():
    print(f"{name:18} {'same' if what is None else 'DIFFERS: ' + what}")
sys.exit(any(found.values()))
PY

chosen=()
for one in "${cases[@]}"; do
    [[ $# -gt 0 && " $* " != *" ${one%%|*} "* ]] || chosen+=("${one%%|*}|${base[*]} data.directory=data ${one#*|}")
done
# A program that both sides have is compiled once.
export JAX_COMPILATION_CACHE_DIR=$work/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=0
for side in old new; do
    tree=$([[ $side == old ]] && echo "$work/tree" || echo "$work/here")
    # Keys that the earlier revision has under another name.
    [[ $side == new || ! -d $work/tree/conf/clipping ]] || chosen=("${chosen[@]//clipping_method=/clipping=}")
    [[ $side == old || ! -d $work/tree/conf/clipping ]] || chosen=("${chosen[@]// clipping=/ clipping_method=}")
    (cd "$work/$side" && printf '%s\n' "${chosen[@]}" | PYTHONPATH=$tree "$python" "$work/run.py" >"$work/$side.log" 2>&1) || {
        tail -n 20 "$work/$side.log"
        exit 1
    }
done
PYTHONPATH=$work/here "$python" "$work/compare.py" "$work" "${chosen[@]%%|*}"
