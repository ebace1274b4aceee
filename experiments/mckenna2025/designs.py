"""Three designs of `job=design` trained for real, each beside two choices by hand at the same epsilon, records and FLOPs.

DPX_DATA=<data> python experiments/mckenna2025/designs.py run <work folder> [--replicates 2]   # restartable; finished runs are kept
python experiments/mckenna2025/designs.py table <work folder>

Budgets lie inside the laptop's grid and at no node of it. By hand: what 20 tokens a parameter ask for without privacy, at the grid's
physical batch; and the middle model of the grid at a batch of 512. Judged are mean training losses of the last 100 steps, as in the grid: a
design predicts well within 10 % of (loss of word frequencies - best loss), and differs from a choice by two deviations of a seed or more.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from dpx import config
from dpx.config import recipes
from dpx.data.prepare import prepare
from dpx.data.vocabulary import SpecialIds
from dpx.scaling.runs import RECORD_EVERY, load, record_means, shipped

# (epsilon, FLOPs); rows of the text, which are the records.
BUDGETS = ((4, 2e12), (16, 4e12), (64, 8e12))
RECORDS = 774_887
# A run's standard deviation in the grid, from five pairs of seeds (experiments/LOG.md).
SEED_DEVIATION = 0.01
TOKENS = 32
# The grid's model, text and rates; the other states an epsilon where the grid states its ratio.
GRID, AT_EPSILON = "+experiment=laptop/mckenna_grid", "+experiment=laptop/mckenna_fig5_direct"


def models() -> dict[str, int]:
    """Parameters of each model of the shipped grid, smallest first."""
    table, _ = load(shipped())
    return dict(sorted(zip(table.model.tolist(), map(int, table.parameters), strict=True), key=lambda one: one[1]))


def by_hand(compute: float) -> dict[str, tuple[str, int, int]]:
    """(model, batch size, steps) of the two choices; 6 FLOPs a parameter and token."""
    sizes = models()
    twenty = min(sizes, key=lambda name: abs(math.log(sizes[name] / math.sqrt(compute / 120))))
    middle = list(sizes)[len(sizes) // 2 - 1]
    return {
        choice: (name, batch, round(compute / (6 * sizes[name] * TOKENS * batch)))
        for choice, name, batch in (("twenty_tokens", twenty, 128), ("middle_model", middle, 512))
    }


def dpx(work: Path, *overrides: str) -> None:
    done = subprocess.run([sys.executable, "-m", "dpx", *overrides], cwd=work, env=os.environ, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def design(work: Path, epsilon: float, compute: float) -> Path:
    """The folder of the design, made once: a later table of losses would make another."""
    folder = work / f"budget_{epsilon:g}"
    if not (folder / "release" / "design.json").exists():
        budget = (f"design.epsilon={epsilon}", f"design.compute={compute}", f"design.size={RECORDS}", "privacy.delta=1e-6")
        dpx(work, GRID, "hydra.mode=RUN", "job=design", *budget, *text(), f"hydra.run.dir={folder}")
    return folder


def text() -> tuple[str, str]:
    files = sorted((Path(os.environ["DPX_DATA"]) / "text" / "wikipedia_en").glob("train-*.jsonl.gz"))
    return "data=text", f"data.source.paths=[{','.join(map(str, files))}]"


def frequencies(work: Path) -> float:
    """Loss in nats of guessing by the frequencies of the protected text's tokens, markers and padding left out; counted once."""
    kept = work / "frequencies.json"
    if not kept.exists():
        experiment, _ = config.build(recipes.compose([GRID, "hydra.mode=RUN", *text(), f"data.directory={work / 'outputs' / 'data'}"]))
        store = prepare(experiment.data, experiment.privacy)
        tokens_NT = store.rows("protected", np.arange(0, store.population(experiment.privacy), 10))["tokens"]
        counts_V = np.bincount(tokens_NT.ravel(), minlength=store.manifest.vocabulary_size).astype(float)
        counts_V[list(dataclasses.asdict(SpecialIds.of(store.manifest)).values())] = 0
        shares = counts_V[counts_V > 0] / counts_V.sum()
        kept.write_text(json.dumps(float(-(shares * np.log(shares)).sum())))
    return json.loads(kept.read_text())


def run(work: Path, replicates: int) -> None:
    frequencies(work)
    for replicate in range(replicates):
        for epsilon, compute in BUDGETS:
            folder = design(work, epsilon, compute)
            run_dir = f"hydra.run.dir={folder}/designed_{replicate}"
            dpx(work, "--config-dir", str(folder / "release"), "+experiment=design", f"replicate={replicate}", run_dir)
            for choice, (model, batch, steps) in by_hand(compute).items():
                noise = (
                    f"noise.epsilon={epsilon}",
                    "sampler=poisson",
                    "accountant=pld",
                    "privacy.delta=1e-6",
                    "privacy.adjacency=zero_out",
                )
                shape = (f"model={model}", f"batch_schedule.size={batch}", f"steps={steps}", "lr_schedule.final_fraction=0.1")
                run_dir = f"hydra.run.dir={folder}/{choice}_{replicate}"
                dpx(work, AT_EPSILON, "hydra.mode=RUN", *text(), *noise, *shape, f"replicate={replicate}", run_dir)


def finals(folder: Path, choice: str) -> list[float]:
    """Of each finished run: its mean training loss of the last 100 steps, those without an example left out."""
    found = []
    for results in sorted(folder.glob(f"{choice}_*/private/results.json")):
        lines = [json.loads(line) for line in (results.parent / "metrics.jsonl").read_text().splitlines()]
        losses, examples = (np.array([line[name] for line in lines[-RECORD_EVERY:]]) for name in ("train/loss", "train/examples"))
        found.append(float(record_means(losses, examples > 0)[1][0]))
    return found


def shown(losses: list[float]) -> str:
    return f"{statistics.mean(losses):.3f} ({', '.join(f'{one:.3f}' for one in losses)})" if losses else "–"


def judged(losses: list[float], other: list[float]) -> str:
    if not losses or not other:
        return "–"
    gain = statistics.mean(other) - statistics.mean(losses)
    return f"{'tie' if abs(gain) < 2 * SEED_DEVIATION else 'better' if gain > 0 else 'worse'} ({gain:+.3f})"


def table(work: Path) -> str:
    best = float(load(shipped())[0].loss.min())
    allowed = 0.1 * (frequencies(work) - best)
    columns = (
        "epsilon, FLOPs",
        "design",
        "predicted",
        "trained",
        "off by",
        "20 tokens a parameter",
        "design is",
        "middle model",
        "design is",
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for epsilon, compute in BUDGETS:
        folder = work / f"budget_{epsilon:g}"
        if not (folder / "release" / "design.json").exists():
            continue
        document = json.loads((folder / "release" / "design.json").read_text())
        of = next(one for one in document["tables"] if one["name"] == "designs")["rows"][0]
        losses = finals(folder, "designed")
        off = abs(statistics.mean(losses) - of["loss"]) if losses else math.nan
        fits = "–" if not losses else f"{off:.3f}, {'yes' if off <= allowed else 'no'} (≤ {allowed:.3f})"
        cells = [f"{epsilon}, {compute:.0e}", f"{of['model']}, {of['batch']} x {of['steps']}", f"{of['loss']:.3f}", shown(losses), fits]
        for choice, (model, batch, steps) in by_hand(compute).items():
            other = finals(folder, choice)
            cells += [f"{model}, {batch} x {steps}: {shown(other)}", judged(losses, other)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--replicates", type=int, default=2)
    given = parser.parse_args()
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if given.what == "run":
        run(work, given.replicates)
    print(table(work))


if __name__ == "__main__":
    main()
