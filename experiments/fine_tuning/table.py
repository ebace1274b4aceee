"""The table of `sst2.sh` and `small_tasks.sh`: accuracy by what was trained and epsilon, minutes, memory; of runs that are finished.

python experiments/fine_tuning/table.py <work folder> [--rate <what is trained>]
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

FULL = re.compile(r"(?P<task>sst2|mrpc|overruling)_(?P<trained>[a-z_]+)_(?P<epsilon>[0-9]+|none)_(?P<replicate>\d+)-[0-9a-f]+")
SHORT = re.compile(r"rate_(?P<trained>[a-z_]+)_(?P<rate>[0-9.e-]+)-[0-9a-f]+")


def finished(work: Path, name: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    folders = [path.parents[1] for path in sorted((work / "outputs").glob("*/private/results.json"))]
    return [(found, folder) for folder in folders if (found := name.fullmatch(folder.name))]


def results(folder: Path) -> dict[str, float]:
    return json.loads((folder / "private" / "results.json").read_text())["heldout"]


def rates(work: Path, trained: str) -> list[tuple[float, float, str]]:
    """(held-out loss, accuracy, rate) of the short runs, best first."""
    tried = [(results(folder), found["rate"]) for found, folder in finished(work, SHORT) if found["trained"] == trained]
    return sorted((seen["loss"], seen["accuracy"], rate) for seen, rate in tried)


def costs(work: Path) -> dict[str, list[float]]:
    """Of each run: minutes by the clock, minutes of processors and gigabytes at most, over every start of it."""
    of: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    lines = (work / "times.tsv").read_text().splitlines() if (work / "times.tsv").is_file() else []
    for fields in (line.split("\t") for line in lines if line.count("\t") == 5):
        name, (wall_s, user_s, system_s, kilobytes) = fields[0], map(float, fields[1:5])
        clock, processor, held = of[name]
        of[name] = [clock + wall_s / 60, processor + (user_s + system_s) / 60, max(held, kilobytes / 1e6)]
    return of


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def table(work: Path) -> str:
    """Mean and deviation over replicates in percent, of the official dev set (of Overruling, the test split)."""
    runs: dict[tuple[str, str, str], list[tuple[float, float, str, list[float]]]] = defaultdict(list)
    cost = costs(work)
    for found, folder in finished(work, FULL):
        claim, seen = json.loads((folder / "release" / "privacy.json").read_text()), results(folder)
        stated = f"{claim['guarantee']}, {claim['epsilon']['pld']:.3f}" if claim["guarantee"] == "dp" else claim["guarantee"]
        one = (100 * seen["accuracy"], 100 * seen["macro_f1"], stated, cost[folder.name.rpartition("-")[0]])
        runs[found["task"], found["trained"], found["epsilon"]].append(one)
    columns = "| task | trained | epsilon | runs | accuracy, % | macro-F1, % | claim (PLD) | minutes | processor minutes | GB at most |"
    lines = [columns, "|" + " --- |" * 10]
    for (task, trained, epsilon), found in sorted(runs.items()):
        accuracies, f1s, claims, spent = zip(*found, strict=True)
        # Of a run whose start was not timed nothing is said.
        timed = [one for one in spent if one[0]]
        clock, processor = (f"{statistics.mean(one[place] for one in timed):.1f}" if timed else "–" for place in (0, 1))
        held = f"{max(one[2] for one in timed):.2f}" if timed else "–"
        lines.append(
            f"| {task} | {trained} | {epsilon} | {len(found)} | {spread(accuracies)} | {spread(f1s)} | {'; '.join(sorted(set(claims)))} "
            f"| {clock} | {processor} | {held} |"
        )
    tried = [(trained, *one) for trained in ("lora", "all", "last_layer", "bias", "lora_ffa") for one in rates(work, trained)]
    lines += ["", "| trained | rate | held-out loss | held-out accuracy, % |", "|" + " --- |" * 4]
    lines += [f"| {trained} | {rate} | {loss:.4f} | {100 * accuracy:.2f} |" for trained, loss, accuracy, rate in tried]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rate", help="print the best rate of the short runs that train this")
    given = parser.parse_args()
    if given.rate is None:
        print(table(given.work))
        return
    found = rates(given.work, given.rate)
    if not found:
        parser.exit(1, f"{given.rate}: no short run is finished\n")
    print(found[0][2])


if __name__ == "__main__":
    main()
