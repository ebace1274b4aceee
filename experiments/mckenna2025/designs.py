"""Three designs of `job=design` trained for real, each beside two choices by hand at the same epsilon, records and FLOPs.

DPX_DATA=<data> python experiments/mckenna2025/designs.py run <work folder> [--replicates 2]   # restartable; finished runs are kept
python experiments/mckenna2025/designs.py table                                                # makes the table from designs.csv

Budgets lie inside the laptop's grid and at no node of it. By hand: what 20 tokens a parameter ask for without privacy, at the grid's
physical batch; and the middle model of the grid at a batch of 512. Judged are mean training losses of the last 100 steps, as in the grid: a
design predicts well within 10 % of (loss of word frequencies - best loss), and differs from a choice by two deviations of a seed or more.
What was trained is kept in `designs.csv`, and the table is in `experiments/README.md`.
"""

import argparse
import csv
import dataclasses
import itertools
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
from dpx.cost.measured_runs import RECORD_EVERY, load, record_means, shipped
from dpx.data.prepare import prepare
from dpx.data.tokenizer import SpecialIds
from dpx.files import results as results_file

# (epsilon, FLOPs); rows of the text, which are the records.
BUDGETS = ((4, 2e12), (16, 4e12), (64, 8e12))
RECORDS = 774_887
TOKENS = 32
TRAINED, README = Path(__file__).with_name("designs.csv"), Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- designs: begin -->", "<!-- designs: end -->"
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
        counts_V[list(dataclasses.asdict(SpecialIds.from_ids(store.manifest)).values())] = 0
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


def finals(folder: Path, choice: str) -> list[tuple[int, float]]:
    """(replicate, its mean training loss of the last 100 steps, those without an example left out) of each finished run."""
    found = []
    for results in sorted(folder.glob(f"{choice}_*/private/results.json")):
        lines = results_file.read(results.parent)
        losses, examples = (
            np.array([line.get(name, np.nan) for line in lines[-RECORD_EVERY:]]) for name in ("train/loss", "train/examples")
        )
        replicate = int(results.parents[1].name.removeprefix(f"{choice}_"))
        found.append((replicate, float(record_means(losses, examples > 0)[1][0])))
    return found


def trained(work: Path) -> list[dict]:
    """A row of `designs.csv` for each finished run; by hand nothing is predicted."""
    rows = []
    for epsilon, compute in BUDGETS:
        folder = work / f"budget_{epsilon:g}"
        if not (folder / "release" / "design.json").exists():
            continue
        document = json.loads((folder / "release" / "design.json").read_text())
        of = next(one for one in document["tables"] if one["name"] == "designs")["rows"][0]
        shapes = {"designed": (of["model"], of["batch"], of["steps"])} | by_hand(compute)
        for choice, (model, batch, steps) in shapes.items():
            fixed = {"epsilon": epsilon, "compute": compute, "choice": choice, "model": model, "batch": batch, "steps": steps}
            fixed |= {"predicted": of["loss"] if choice == "designed" else "", "word_frequencies": frequencies(work)}
            rows += [fixed | {"replicate": replicate, "loss": loss} for replicate, loss in finals(folder, choice)]
    return rows


def write(rows: list[dict], path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def read(path: Path) -> list[dict]:
    words = ("choice", "model", "batch", "steps")
    with path.open(newline="") as file:
        return [{name: text if name in words or not text else float(text) for name, text in row.items()} for row in csv.DictReader(file)]


def seed_deviation() -> tuple[float, int]:
    """(standard deviation of a run's last record, pairs of seeds it comes from), of the grid's settings that were run with two seeds."""
    of = load(shipped())[0]
    last: dict[tuple, dict[float, tuple[float, float]]] = {}
    settings = zip(of.model, of.noise_batch_ratio, of.learning_rate, of.batch_size, strict=True)
    for setting, replicate, step, loss in zip(settings, of.replicate, of.step, of.loss, strict=True):
        runs = last.setdefault(setting, {})
        runs[replicate] = max(runs.get(replicate, (0.0, 0.0)), (step, loss))
    ended = [[loss for step, loss in runs.values() if step == max(of.step)] for runs in last.values()]
    squares = [(first - second) ** 2 / 2 for losses in ended for first, second in itertools.pairwise(losses)]
    return math.sqrt(statistics.mean(squares)), len(squares)


def shown(losses: list[float]) -> str:
    each = f" ({', '.join(f'{one:.3f}' for one in losses)})" if len(losses) > 1 else ""
    return f"{statistics.mean(losses):.3f}{each}" if losses else "–"


def judged(losses: list[float], other: list[float], deviation: float) -> str:
    """Whether the mean of `losses` lies below that of `other` by two deviations of a seed or more."""
    if not losses or not other:
        return "–"
    gain = statistics.mean(other) - statistics.mean(losses)
    return f"{'tie' if abs(gain) < 2 * deviation else 'better' if gain > 0 else 'worse'} ({gain:+.3f})"


COLUMNS = ("epsilon, FLOPs", "design", "predicted", "trained", "off by")
COLUMNS += ("20 tokens a parameter", "design is", "middle model", "design is")


def table(rows: list[dict], deviation: float, pairs: int) -> str:
    best = float(load(shipped())[0].loss.min())
    allowed = 0.1 * (rows[0]["word_frequencies"] - best)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for epsilon, compute in dict.fromkeys((row["epsilon"], row["compute"]) for row in rows):
        by_choice: dict[str, list[dict]] = {}
        for row in rows:
            if (row["epsilon"], row["compute"]) == (epsilon, compute):
                by_choice.setdefault(row["choice"], []).append(row)
        own = by_choice.pop("designed")
        losses, predicted = [row["loss"] for row in own], own[0]["predicted"]
        off = abs(statistics.mean(losses) - predicted)
        cells = [f"{epsilon:g}, {compute:.0e}", _shape(own[0]), f"{predicted:.3f}", shown(losses)]
        cells.append(f"{off:.3f}, {'yes' if off <= allowed else 'no'} (≤ {allowed:.3f})")
        for others in by_choice.values():
            other = [row["loss"] for row in others]
            cells += [f"{_shape(others[0])}: {shown(other)}", judged(losses, other, deviation)]
        lines.append("| " + " | ".join(cells) + " |")
    said = (
        f"Losses in nats. A tie is less than two deviations of a seed (2 x {deviation:.4f}, from {pairs} pairs of seeds of the grid); what"
    )
    said += "\na design may be off by is a tenth of the way from the loss of word frequencies to the best loss of the grid."
    return "\n".join([*lines, "", said])


def _shape(row: dict) -> str:
    return f"{row['model']}, {row['batch']} x {row['steps']}"


def draw() -> None:
    """Puts the table between its marks in `experiments/README.md`."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table(read(TRAINED), *seed_deviation())}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("work", type=Path, nargs="?", help="where `run` keeps its runs")
    parser.add_argument("--replicates", type=int, default=2)
    given = parser.parse_args()
    if given.what == "run":
        if given.work is None:
            parser.error("run needs a work folder")
        work = given.work.absolute()
        work.mkdir(parents=True, exist_ok=True)
        run(work, given.replicates)
        write(trained(work), TRAINED)
    draw()


if __name__ == "__main__":
    main()
