"""The table of `sst2.sh` and `small_tasks.sh`: accuracy by what was trained and epsilon, minutes, memory; of runs that are finished.

python experiments/fine_tuning/table.py <work folder> [--keep] [--rate <what is trained>]

It reads the work folder and, beside this file, results.csv and rates.csv. `--keep` adds the folder's runs to these files, so that the next
machine has what this one finished. A run of the folder replaces a noted run of the same name.
"""

import argparse
import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FULL = re.compile(r"(?P<name>(?P<task>sst2|mrpc|overruling)_(?P<trained>[a-z_]+)_(?P<epsilon>[0-9]+|none)_(?P<replicate>\d+))-[0-9a-f]+")
SHORT = re.compile(r"(?P<name>rate_(?P<trained>[a-z_]+)_(?P<rate>[0-9.e-]+))-[0-9a-f]+")
COST_FIELDS = ["minutes", "processor_minutes", "gigabytes"]
RESULT_FIELDS = ["name", "task", "trained", "epsilon", "replicate", "accuracy", "macro_f1", "claim", *COST_FIELDS]
RATE_FIELDS = ["name", "trained", "rate", "loss", "accuracy"]

Row = dict[str, str]


def finished(work: Path, name: re.Pattern[str]) -> Iterator[tuple[re.Match[str], Path, dict[str, float]]]:
    """Each finished run of that name, its folder and what was measured on the rows that judge it."""
    for path in sorted((work / "outputs").glob("*/private/results.json")):
        folder = path.parents[1]
        if found := name.fullmatch(folder.name):
            yield found, folder, json.loads(path.read_text())["heldout"]


def costs(work: Path) -> dict[str, Row]:
    """Of each run: minutes of wall time, minutes of processors and gigabytes at most, over every start of it."""
    of: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    lines = (work / "times.tsv").read_text().splitlines() if (work / "times.tsv").is_file() else []
    for fields in (line.split("\t") for line in lines if line.count("\t") == 5):
        name, (wall_s, user_s, system_s, kilobytes) = fields[0], map(float, fields[1:5])
        clock, processor, held = of[name]
        of[name] = [clock + wall_s / 60, processor + (user_s + system_s) / 60, max(held, kilobytes / 1e6)]
    return {name: {field: f"{value:.2f}" for field, value in zip(COST_FIELDS, values, strict=True)} for name, values in of.items()}


def claimed(folder: Path) -> str:
    claim = json.loads((folder / "release" / "privacy.json").read_text())
    return f"{claim['guarantee']}, {claim['epsilon']['pld']:.3f}" if claim["guarantee"] == "dp" else claim["guarantee"]


def full_runs(work: Path) -> list[Row]:
    cost = costs(work)
    return [
        {**found.groupdict(), "accuracy": f"{seen['accuracy']:.6f}", "macro_f1": f"{seen['macro_f1']:.6f}", "claim": claimed(folder)}
        | cost.get(found["name"], {})
        for found, folder, seen in finished(work, FULL)
    ]


def short_runs(work: Path) -> list[Row]:
    return [
        {**found.groupdict(), "loss": f"{seen['loss']:.6f}", "accuracy": f"{seen['accuracy']:.6f}"}
        for found, _, seen in finished(work, SHORT)
    ]


def joined(path: Path, new: Sequence[Row]) -> list[Row]:
    """The rows noted in `path` and `new`, by name; a new one replaces a noted one."""
    noted: dict[str, Row] = {}
    if path.is_file():
        with path.open(newline="") as file:
            noted = {row["name"]: row for row in csv.DictReader(file)}
    rows = noted | {row["name"]: row for row in new}
    return [rows[name] for name in sorted(rows)]


def keep(path: Path, fields: Sequence[str], rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def rates(rows: Sequence[Row], trained: str) -> list[tuple[float, float, str]]:
    """(held-out loss, accuracy, rate) of the short runs, best first."""
    return sorted((float(row["loss"]), float(row["accuracy"]), row["rate"]) for row in rows if row["trained"] == trained)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    if not values:
        return "–"
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def table(results: Sequence[Row], short: Sequence[Row]) -> str:
    """Mean and deviation over replicates in percent, of the official dev set (of Overruling, the test split)."""
    runs: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in results:
        runs[row["task"], row["trained"], row["epsilon"]].append(row)
    columns = "| task | trained | epsilon | runs | accuracy, % | macro-F1, % | claim (PLD) | minutes | processor minutes | GB at most |"
    lines = [columns, "|" + " --- |" * 10]
    for (task, trained, epsilon), found in sorted(runs.items()):
        # What was not measured of a run is left empty, and not mentioned.
        of = {field: [float(row[field]) for row in found if row.get(field)] for field in ("accuracy", "macro_f1", *COST_FIELDS)}
        minutes, processor = (f"{statistics.mean(of[field]):.1f}" if of[field] else "–" for field in COST_FIELDS[:2])
        lines.append(
            f"| {task} | {trained} | {epsilon} | {len(found)} | {spread([100 * one for one in of['accuracy']])} "
            f"| {spread([100 * one for one in of['macro_f1']])} | {'; '.join(sorted({row['claim'] for row in found}))} "
            f"| {minutes} | {processor} | {max(of['gigabytes'], default=0) or '–'} |"
        )
    tried = [(trained, *one) for trained in ("lora", "all", "last_layer", "bias", "lora_ffa") for one in rates(short, trained)]
    lines += ["", "| trained | rate | held-out loss | held-out accuracy, % |", "|" + " --- |" * 4]
    lines += [f"| {trained} | {rate} | {loss:.4f} | {100 * accuracy:.2f} |" for trained, loss, accuracy, rate in tried]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--keep", action="store_true", help="note what is finished in the work folder")
    parser.add_argument("--kept", type=Path, default=HERE, help="folder of results.csv and rates.csv")
    parser.add_argument("--rate", help="print the best rate of the short runs that train this")
    given = parser.parse_args()
    short = joined(given.kept / "rates.csv", short_runs(given.work))
    if given.rate is not None:
        found = rates(short, given.rate)
        if not found:
            parser.exit(1, f"{given.rate}: no short run is finished\n")
        print(found[0][2])
        return
    results = joined(given.kept / "results.csv", full_runs(given.work))
    if given.keep:
        keep(given.kept / "rates.csv", RATE_FIELDS, short)
        keep(given.kept / "results.csv", RESULT_FIELDS, results)
    print(table(results, short))


if __name__ == "__main__":
    main()
