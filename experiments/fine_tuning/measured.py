"""Makes measured.csv, the table that `job=design` reads for fine-tuning, from the head's grid and from runs of the jobs.

    python experiments/fine_tuning/measured.py <tables of head_grid.py> [--runs <folder of runs>]
    python experiments/fine_tuning/measured.py --unread <table of head_grid.py>    # makes unread.csv, which no design reads

Settings of a table of head_grid.py have the mean of their replicates. Runs of `sst2.sh` and `small_tasks.sh` are taken from results.csv,
with what those scripts declare; with `--runs`, finished runs of adapters_grid.sh are read from their folders. Rows of the same setting that
the table has already are replaced.
"""

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from dpx.cost.fine_tuning import COLUMNS

HERE = Path(__file__).resolve().parent
CHECKPOINT = "all-MiniLM-L6-v2"
# Trained numbers of this encoder with a head of two classes.
PARAMETERS = {"last_layer": 770, "lora": 74_498, "lora_ffa": 37_634, "all": 22_566_146}
# What the scripts declare: N, delta, batch, steps, judged rows and how often the most frequent class is right.
DECLARED = {
    "sst2": (66_983, 1e-6, 1024, 66, 872, 0.5092),
    "overruling": (1_920, 1e-5, 256, 38, 480, 0.5208),
    "mrpc": (3_667, 1e-5, 256, 72, 408, 0.6838),
}
# MNLI has three.
OF_THREE_CLASSES = 1_155
RATES = {"last_layer": 3e-2, "lora": 3e-3, "lora_ffa": 3e-3, "all": 3e-4}

Row = dict[str, str]
Settings = tuple[str, ...]


def of_grid(path: Path) -> list[Row]:
    """The settings of a table of head_grid.py."""
    by_setting: dict[Settings, list[Row]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            by_setting[_setting(row)].append(row)
    return [_joined(rows) for rows in by_setting.values()]


def _joined(rows: list[Row]) -> Row:
    mean = {name: f"{statistics.mean(float(row[name]) for row in rows):.4g}" for name in ("snr", "accuracy")}
    parameters = OF_THREE_CLASSES if rows[0]["task"] == "mnli" else PARAMETERS[rows[0]["trained"]]
    return rows[0] | mean | {"runs": str(len(rows)), "checkpoint": CHECKPOINT, "parameters": str(parameters)}


def of_scripts() -> list[Row]:
    """Runs with noise of sst2.sh and small_tasks.sh, by setting."""
    from dpx.privacy import noise_multiplier

    by_setting: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with (HERE / "results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["epsilon"] != "none":
                by_setting[row["task"], row["trained"], row["epsilon"]].append(float(row["accuracy"]))
    found = []
    for (task, trained, epsilon), accuracies in by_setting.items():
        kind, is_long = trained.removesuffix("_three_passes"), trained.endswith("_three_passes")
        size, delta, batch, steps, rows, baseline = DECLARED[task]
        steps *= 3 if is_long else 1
        sigma = noise_multiplier([(batch / size, steps)], epsilon=float(epsilon), delta=delta)
        values = (task, CHECKPOINT, kind, PARAMETERS[kind], size, epsilon, f"{delta:g}", batch, steps, f"{RATES[kind]:g}")
        values += (len(accuracies), f"{sigma:.4f}", "", f"{statistics.mean(accuracies):.4g}", rows, baseline, "mean linear")
        found.append(dict(zip(COLUMNS, map(str, values), strict=True)))
    return found


def of_runs(outputs: Path) -> list[Row]:
    """Finished runs of adapters_grid.sh."""
    from dpx.config import read
    from dpx.files.results import late_snr, read_results

    found = []
    for folder in sorted(outputs.glob("grid_*")):
        if not (folder / "private" / "results.json").is_file():
            continue
        config, results = read(folder / "private" / "config.yaml"), read_results(folder / "private")
        claim = json.loads((folder / "release" / "privacy.json").read_text())
        task, kind = folder.name.split("_")[1:3]
        values = (task, CHECKPOINT, kind, PARAMETERS[kind], claim["declared_size"], f"{config.noise.epsilon:g}", f"{claim['delta']:g}")
        values += (config.batch_schedule.size, config.steps, f"{config.lr_schedule.learning_rate:g}", 1)
        values += (f"{claim['mechanism']['noise_multiplier']:.4f}", f"{late_snr(folder / 'private') or 0:.4g}")
        values += (f"{results.heldout['accuracy']:.4g}", results.rows, f"{results.baselines['most_frequent_class']:.4f}", "mean linear")
        found.append(dict(zip(COLUMNS, map(str, values), strict=True)))
    return found


def _setting(row: Row) -> Settings:
    return tuple(row[name] for name in ("task", "head", "trained", "size", "epsilon", "batch", "steps", "rate"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--unread", type=Path)
    given = parser.parse_args()
    if given.unread is not None:
        write(HERE / "unread.csv", of_grid(given.unread))
        return
    place, rows = HERE / "measured.csv", dict[Settings, Row]()
    if place.is_file():
        with place.open(newline="") as file:
            rows = {_setting(row): row for row in csv.DictReader(file)}
    new = [*of_scripts(), *(row for path in given.tables for row in of_grid(path)), *(of_runs(given.runs) if given.runs else ())]
    rows |= {_setting(row): row for row in new}
    write(place, rows.values())


def write(place: Path, rows: Iterable[Row]) -> None:
    order = ("task", "head", "trained", "size", "epsilon", "batch", "steps", "rate")
    with place.open("w", newline="") as file:
        writer = csv.DictWriter(file, list[str](COLUMNS), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: [row[name] if name in order[:3] else float(row[name]) for name in order]))


if __name__ == "__main__":
    main()
