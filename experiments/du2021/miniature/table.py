"""The tables of `runs.sh`: accuracy, statement and the words that steps show, of the runs that are finished.

python experiments/du2021/miniature/table.py <work folder> [--keep]

It reads the work folder and results.csv beside this file. `--keep` adds the folder's runs to that file and writes from it the tables that
the paper's page shows (../analyses/laptop_dpfp_table2_eps3.json, at item F6) and the one in README.md.
"""

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpx.pages.analysis_tables import Table
from dpx_papers.report import analyses, shape

HERE = Path(__file__).resolve().parent
NAME = re.compile(r"(?P<name>(?P<task>sst2|mrpc)_(?P<setting>[a-z]+(_[0-9.]+)?)_(?P<replicate>\d+))-[0-9a-f]+")
NAMED = ("name", "task", "setting", "replicate")
WORDS = ("steps_watched", "words", "recovered", "wrong")
FIELDS = [*NAMED, "accuracy", "loss", "guarantee", "epsilon", "noise_multiplier", "unsupported", "minutes", *WORDS]
# The item of the paper at whose place its page shows the tables.
ITEM = "laptop_dpfp_table2_eps3"
METHODS = {
    "none": "without privacy",
    "dpfp": "DP-FP, all trained",
    "frozen": "DP-FP, last map alone",
    "dpsgd": "DP-SGD, all trained",
    "rgp": "RGP, layers and head",
}
TARGETS = {"1.73": 1, "4.33": 2, "3": 1, "8": 2}
COLUMNS = {0: "no noise", 1: "first target", 2: "second target"}
TASKS = {"sst2": "SST-2", "mrpc": "MRPC"}
# The official development sets, on which every accuracy is measured.
DEVELOPMENT_ROWS = {"sst2": 872, "mrpc": 408}
ACCURACY = "heldout/accuracy"

Row = dict[str, str]


def finished(work: Path) -> list[Row]:
    """One row of each finished run of the work folder."""
    minutes, words = spent(work), shown_words(work / "words.csv")
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
            rows.append({field: found[field] for field in NAMED} | measured | stated(folder) | words.get(found["name"], {}))
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


def shown_words(path: Path) -> dict[str, Row]:
    """The sums over the steps of each run that `watched.py` counted; of a step that ran twice the last line counts."""
    steps: dict[str, dict[int, list[int]]] = defaultdict(dict)
    lines = path.read_text().splitlines() if path.is_file() else []
    for name, step, _, *counts in (line.split(",") for line in lines):
        steps[name][int(step)] = [int(count) for count in counts]
    sums = {name: [len(of_run), *map(sum, zip(*of_run.values(), strict=True))] for name, of_run in steps.items()}
    return {name: dict(zip(WORDS, map(str, values), strict=True)) for name, values in sums.items()}


def joined(path: Path, new: Sequence[Row]) -> list[Row]:
    """The rows noted in `path` and `new`, by name; a new one replaces a noted one."""
    noted: dict[str, Row] = {}
    if path.is_file():
        with path.open(newline="") as file:
            noted = {row["name"]: row for row in csv.DictReader(file)}
    rows = noted | {row["name"]: row for row in new}
    return [rows[name] for name in sorted(rows)]


def of_runs(rows: Iterable[Row]) -> Table:
    """A row for each run, for the rules of paper.yaml; the two targets are the two columns of Table 2."""
    lines = []
    for row in rows:
        method, _, target = row["setting"].partition("_")
        counts = {key: int(row[key]) if row.get(key) else None for key in WORDS}
        share = counts["recovered"] / counts["words"] if counts["words"] else None
        named = {
            "task": TASKS[row["task"]],
            "method": METHODS[method],
            "target": COLUMNS[TARGETS.get(target, 0)],
            "replicate": int(row["replicate"]),
        }
        named |= {ACCURACY: float(row["accuracy"]), "heldout/rows": DEVELOPMENT_ROWS[row["task"]]}
        lines.append(named | {"guarantee": row["guarantee"]} | counts | {"words_recovered": share})
    order = {method: place for place, method in enumerate(METHODS.values())}
    lines.sort(
        key=lambda line: (line["task"] != "SST-2", list(COLUMNS.values()).index(line["target"]), order[line["method"]], line["replicate"])
    )
    return Table.from_rows("miniature_runs", lines, "Table 2 in miniature, run by run")


def of_settings(rows: Sequence[Row]) -> Table:
    """A row for each task and setting: what a reader compares."""
    runs: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["task"], row["setting"]].append(row)
    lines = []
    order = [(task, name) for task in TASKS for name in sorted({setting for _, setting in runs}, key=_place)]
    for task, setting in (pair for pair in order if pair in runs):
        found, (method, _, target) = runs[task, setting], setting.partition("_")
        values = [float(row["accuracy"]) for row in found]
        of_texts = ", of texts alone" * (method == "frozen")
        lines.append(
            {
                "task": TASKS[task],
                "setting": METHODS[method],
                "target": target or "–",
                "runs": len(found),
                "accuracy": shape.of_rows(values, ACCURACY, DEVELOPMENT_ROWS[task]),
                "sigma": found[0]["noise_multiplier"] or "–",
                "guarantee": found[0]["guarantee"] + of_texts,
                "proved epsilon": found[0]["epsilon"] or "–",
                "unsupported": found[0]["unsupported"] or "–",
                "words of a batch that a step shows": _words(method, found),
            }
        )
    notes = ("a target is the central-limit epsilon for DP-FP and the RDP epsilon for DP-SGD and RGP, as Table 2 heads its columns",)
    return Table.from_rows(
        "miniature", lines, "Table 2 in miniature, means over replicates ± one standard deviation, and their 95 % intervals", notes
    )


def _place(setting: str) -> tuple[int, int]:
    method, _, target = setting.partition("_")
    return TARGETS.get(target, 0), list(METHODS).index(method)


def _words(method: str, rows: Sequence[Row]) -> str:
    """Words over all steps that were watched; what trains no word table without noise shows none."""
    watched = [row for row in rows if row.get("words")]
    if watched:
        steps, words, read, wrong = (sum(int(row[key]) for row in watched) for key in WORDS)
        return f"{read:,} of {words:,} in {steps} steps, {wrong} wrong"
    return {"frozen": "no gradient of words", "rgp": "no gradient of words", "dpsgd": "noise on every row"}.get(method, "not counted")


def markdown(table: Table) -> str:
    lines = ["| " + " | ".join(table.columns) + " |", "|" + " --- |" * len(table.columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in table.rows)])


def keep(rows: Sequence[Row]) -> None:
    """Writes results.csv, the tables of the page and the table of README.md."""
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    settings = of_settings(rows)
    analyses.write(HERE.parent, ITEM, [settings.as_json(), of_runs(rows).as_json()])
    page = (HERE / "README.md").read_text()
    begin, end = "<!-- table: begin -->\n", "\n<!-- table: end -->"
    before, _, rest = page.partition(begin)
    (HERE / "README.md").write_text(f"{before}{begin}{markdown(settings)}{end}{rest.partition(end)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--keep", action="store_true", help="note what is finished in the work folder")
    given = parser.parse_args()
    rows = joined(HERE / "results.csv", finished(given.work))
    if given.keep:
        keep(rows)
    print(markdown(of_settings(rows)))


if __name__ == "__main__":
    main()
