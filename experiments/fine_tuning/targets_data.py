"""Rows with a number, and rows with several labels, from the shared text; for the evidence of `task=regression` and `task=multi_label`.

    DPX_DATA=<data> python experiments/fine_tuning/targets_data.py <folder> [rows] [rows of the test] [--phrases]

`pairs.csv` has the shape of STS-B: two references of E2E and a score from 0 to 5, five times the share of their meaning that both have (the
attributes with equal values, of all that either has). How many attributes the second must share is drawn evenly, no reference is in two
pairs, and the meanings of the test (one in three) are not among those of the training rows. With `--phrases` the pairs are phrases of
SST-2, and the score is of their words. `slots.csv` has references of E2E, each with 0 or 1 for what its meaning says. All are public
functions of public text, drawn by a fixed seed; `*_test.csv` hold further rows.
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


# At most so many words of a reference: a pair fits in 64 tokens.
MOST_WORDS = 22


def pairs(data: Path, is_test: bool, count: int) -> list[tuple[object, ...]]:
    """Returns `count` pairs of references, each reference in one pair at most."""
    with gzip.open(data / "e2e" / "train.jsonl.gz", "rt") as file:
        meaning_of = {row["reference"]: row["meaning"] for row in map(json.loads, file)}
    meanings = sorted(set(meaning_of.values()))
    of_test = set(random.Random(1).sample(meanings, len(meanings) // 3))
    said = {text: frozenset(meaning.split(" | ")) for text, meaning in meaning_of.items() if (meaning in of_test) == is_test}
    texts = sorted(text for text in said if len(text.split()) <= MOST_WORDS)
    with_part, drawn = defaultdict[str, set[int]](set), random.Random(0)
    for place, text in enumerate(texts):
        for part in said[text]:
            with_part[part].add(place)
    left, found = set(range(len(texts))), list[tuple[object, ...]]()
    for place in drawn.sample(range(len(texts)), len(texts)):
        if place not in left or len(found) == count:
            continue
        own = said[texts[place]]
        shared = drawn.sample(sorted(own), drawn.randint(0, len(own)))
        others = sorted(set.intersection(left, *(with_part[part] for part in shared)) - {place})
        if others:
            other = drawn.choice(others)
            left -= {place, other}
            both, either = own & said[texts[other]], own | said[texts[other]]
            found.append((texts[place], texts[other], round(5 * len(both) / len(either), 2)))
    return found


def phrases(data: Path, count: int) -> list[tuple[object, ...]]:
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
    parser.add_argument("--phrases", action="store_true", help="pairs of phrases of SST-2 in place of references of E2E")
    given, data = parser.parse_args(), Path(os.environ["DPX_DATA"])
    folder, rows, count = given.folder, given.rows, given.rows + given.test
    folder.mkdir(parents=True, exist_ok=True)
    of_phrases = phrases(data, count) if given.phrases else None
    scored = (pairs(data, False, rows), pairs(data, True, given.test)) if of_phrases is None else (of_phrases[:rows], of_phrases[rows:])
    of_slots = slots(data, count)
    for name, header, (train, test) in (
        ("pairs", ("text", "pair", "score"), scored),
        ("slots", ("text", *SLOTS), (of_slots[:rows], of_slots[rows:])),
    ):
        write(folder / f"{name}.csv", header, train)
        write(folder / f"{name}_test.csv", header, test)


if __name__ == "__main__":
    main()
