"""Processor time of `job=list list.plan=true` beside that of composing the same points.

`python experiments/benchmarks/list_plans.py <folder> <part> <parts> [pattern]` measures part 0, 1, ... of them: each point of every recipe
outside `laptop/` is composed, planned, and planned again, by turns, and a row is appended to `<folder>/rows.jsonl`. Run the parts in
order: the folder keeps what was solved, as the cache of one command does. Without a part it adds the rows up.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from dpx.config import recipes
from dpx.job.list import Point
from dpx.privacy import cache

TURNS = ("composing", "first", "again")


def main() -> None:
    folder, *more = sys.argv[1:]
    rows = Path(folder) / "rows.jsonl"
    if more:
        row = measured(Path(folder), int(more[0]), int(more[1]), more[2] if len(more) > 2 else "*")
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row)
        return
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    total = {name: round(sum(row[name] for row in found), 2) for name in found[0] if name not in ("part", "parts")}
    ratios = {name: round(total[name] / total["composing"], 2) for name in TURNS[1:]}
    print(f"{len(found)} parts of {found[0]['parts']}: {total}; beside composing: {ratios}")


def measured(folder: Path, part: int, parts: int, match: str) -> dict[str, float]:
    """Returns the seconds of each turn, and how many accounting problems were solved in each of the two plans."""
    names = [name for name in recipes.names(match) if not name.startswith("laptop/")]
    points = [(name, tuple(overrides)) for name in names for overrides in recipes.points(name)]
    # Whole stretches, since points of one recipe share what they import and solve.
    own = points[part * len(points) // parts : (part + 1) * len(points) // parts]
    solved, write = [], cache.write
    cache.write = lambda kind, question, value: (solved.append(kind), write(kind, question, value))
    seconds, counts, refused = dict.fromkeys(TURNS, 0.0), dict.fromkeys(TURNS, 0), 0
    # What the first plan of a process imports is no part of the cost of a point.
    with tempfile.TemporaryDirectory() as other:
        os.environ["DPX_CACHE"] = other
        Point(*own[0]).plan_row()
    os.environ["DPX_CACHE"] = str(folder / "cache")
    solved.clear()
    with cache.keeping():
        for name, overrides in own:
            for turn in TURNS:
                solved.clear()
                began = time.process_time()
                if turn == "composing":
                    recipes.plan_config(name, list(overrides))
                else:
                    refused += Point(name, overrides).plan_row().error is not None
                seconds[turn] += time.process_time() - began
                counts[turn] += len(solved)
    facts = {"part": part, "parts": parts, "points": len(own), "refused": refused // 2}
    return facts | {name: round(value, 3) for name, value in seconds.items()} | {"solved": counts["first"], "solved_again": counts["again"]}


if __name__ == "__main__":
    main()
