"""The table of `runs.sh`: accuracy and statement of each setting, of the runs that are finished.

python experiments/du2021/miniature/table.py <work folder> [--keep]

It reads the work folder and results.csv beside this file; `--keep` adds the folder's runs to that file.
"""

import argparse
import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = re.compile(r"(?P<name>(?P<task>sst2|mrpc)_(?P<setting>[a-z]+(_[0-9.]+)?)_(?P<replicate>\d+))-[0-9a-f]+")
FIELDS = ["name", "task", "setting", "replicate", "accuracy", "loss", "guarantee", "epsilon", "noise_multiplier", "unsupported", "minutes"]

Row = dict[str, str]


def finished(work: Path) -> list[Row]:
    """One row of each finished run of the work folder."""
    minutes = spent(work)
    rows = []
    for path in sorted((work / "outputs").glob("*/private/results.json")):
        folder = path.parents[1]
        if found := NAME.fullmatch(folder.name):
            heldout = json.loads(path.read_text())["heldout"]
            measured = {
                "accuracy": f"{heldout['accuracy']:.6f}",
                "loss": f"{heldout['loss']:.6f}",
                "minutes": minutes.get(found["name"], ""),
            }
            rows.append({field: found[field] for field in ("name", "task", "setting", "replicate")} | measured | stated(folder))
    return rows


def stated(folder: Path) -> Row:
    """The guarantee, the proved epsilon, what is unsupported, and the noise multiplier of the ledger."""
    statement = json.loads((folder / "release" / "privacy.json").read_text())
    noise = sorted(
        {segment["noise_multiplier"] for segment in (statement["ledger"] or {}).get("segments", []) if segment.get("noise_multiplier")}
    )
    unsupported = {one["name"].removeprefix("epsilon/"): one["value"] for one in statement.get("unsupported") or [] if "value" in one}
    return {
        "guarantee": statement["guarantee"],
        "epsilon": " ".join(f"{value:.3f} {name}" for name, value in statement["epsilon"].items()),
        "noise_multiplier": " ".join(f"{value:.4f}" for value in noise),
        "unsupported": " ".join(f"{value:.3f} {name}" for name, value in unsupported.items()),
    }


def spent(work: Path) -> Row:
    """Minutes of wall time of each run, over every start of it."""
    seconds: dict[str, float] = defaultdict(float)
    lines = (work / "times.tsv").read_text().splitlines() if (work / "times.tsv").is_file() else []
    for fields in (line.split("\t") for line in lines if line.count("\t") == 5):
        seconds[fields[0]] += float(fields[1])
    return {name: f"{value / 60:.1f}" for name, value in seconds.items()}


def joined(path: Path, new: Sequence[Row]) -> list[Row]:
    """The rows noted in `path` and `new`, by name; a new one replaces a noted one."""
    noted: dict[str, Row] = {}
    if path.is_file():
        with path.open(newline="") as file:
            noted = {row["name"]: row for row in csv.DictReader(file)}
    rows = noted | {row["name"]: row for row in new}
    return [rows[name] for name in sorted(rows)]


def table(rows: Sequence[Row]) -> str:
    runs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["setting"]].append(row)
    lines = ["| setting | runs | accuracy, % | sigma | guarantee | epsilon | unsupported |", "|" + " --- |" * 7]
    for setting, found in sorted(runs.items()):
        values, first = [100 * float(row["accuracy"]) for row in found], found[0]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        rest = " | ".join(first[field] or "–" for field in ("noise_multiplier", "guarantee", "epsilon", "unsupported"))
        lines.append(f"| {setting} | {len(found)} | {statistics.mean(values):.1f}{spread} | {rest} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--keep", action="store_true", help="note what is finished in the work folder")
    given = parser.parse_args()
    rows = joined(HERE / "results.csv", finished(given.work))
    if given.keep:
        with (HERE / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
