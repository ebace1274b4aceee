"""Rows with a number, and rows with several labels, from the shared text; for the evidence of `task=regression` and `task=multi_label`.

    DPX_DATA=<data> python experiments/fine_tuning/targets_data.py <folder> [rows] [rows of the test]

`pairs.csv` has the shape of STS-B: two phrases of SST-2 and a score from 0 to 5, five times the share of their words that both have. Half
of the pairs are of phrases with the same first word of four letters or more. `slots.csv` has references of E2E, each with 0 or 1 for what
its meaning says. Both are public functions of public text, drawn by a fixed seed; `*_test.csv` hold further rows.
"""

import argparse
import csv
import gzip
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SLOTS = ("food", "price", "rating", "area", "family", "near")
# The beginning of E2E's names of these, in lower case without blanks.
NAMED = {"food": "food", "price": "price", "rating": "customer", "area": "area", "family": "family", "near": "near"}


def pairs(data: Path, count: int) -> list[tuple[object, ...]]:
    with gzip.open(data / "sst2" / "train.tsv.gz", "rt") as file:
        phrases = sorted({line.split("\t")[0] for line in file if 4 <= len(line.split("\t")[0].split()) <= 14})
    drawn, sharing, found = random.Random(0), defaultdict[str, list[str]](list), dict[tuple[str, str], float]()
    key = lambda phrase: next((word for word in phrase.split() if len(word) >= 4), "")  # noqa: E731
    for phrase in phrases:
        sharing[key(phrase)].append(phrase)
    while len(found) < count:
        one = drawn.choice(phrases)
        other = drawn.choice(sharing[key(one)] if drawn.random() < 0.5 else phrases)
        first, second = set(one.split()), set(other.split())
        if one != other:
            found[one, other] = round(5 * len(first & second) / len(first | second), 2)
    return [(one, other, score) for (one, other), score in found.items()]


def slots(data: Path, count: int) -> list[tuple[object, ...]]:
    with gzip.open(data / "e2e" / "train.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    found = dict[str, tuple[object, ...]]()
    for row in random.Random(0).sample(rows, 3 * count):
        said = [part.partition(":")[0].strip().lower().replace(" ", "") for part in row["meaning"].split("|")]
        found[row["reference"]] = tuple(int(any(one.startswith(NAMED[slot]) for one in said)) for slot in SLOTS)
    return [(text, *truths) for text, truths in found.items()][:count]


def write(path: Path, header: Iterable[str], rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([tuple(header), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int, nargs="?", default=2000)
    parser.add_argument("test", type=int, nargs="?", default=500)
    given, data = parser.parse_args(), Path(os.environ["DPX_DATA"])
    folder, rows, count = given.folder, given.rows, given.rows + given.test
    folder.mkdir(parents=True, exist_ok=True)
    for name, header, drawn in (("pairs", ("text", "pair", "score"), pairs(data, count)), ("slots", ("text", *SLOTS), slots(data, count))):
        write(folder / f"{name}.csv", header, drawn[:rows])
        write(folder / f"{name}_test.csv", header, drawn[rows:])


if __name__ == "__main__":
    main()
