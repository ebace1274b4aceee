"""Judges the designs of fine-tuning: each task is designed from the runs of the other tasks, and compared with a search on the task itself.

    python experiments/fine_tuning/judge.py            # writes judged.csv and prints it

A search takes the best of the 12 measured points of one task, N, epsilon and number of passes: three shares by four paths. A design passes
if it loses at most two points, or half the width of the best accuracy's 95 % interval, whichever is more.
"""

import csv
from pathlib import Path
from typing import Any

from dpx.cost import fine_tuning
from dpx.cost.fine_tuning import Asked, Measured
from dpx.files.results import interval

HERE = Path(__file__).resolve().parent
FIELDS = ("task", "head", "size", "epsilon", "passes", "designed", "best_of_12", "lost", "allowed", "passes_test", "baseline")


Key = tuple[str, str, int, float, float]


def searches(table: list[Measured]) -> dict[Key, list[Measured]]:
    """Complete searches of a head that another task was measured with too, by task, head, N, epsilon and number of passes."""
    found: dict[Key, list[Measured]] = {}
    for row in table:
        if row.trained == "last_layer":
            found.setdefault((row.task, row.head, row.size, row.epsilon, row.point.passes), []).append(row)
    tasks = {head: {task for task, other, *_ in found if other == head} for _, head, *_ in found}
    return {key: rows for key, rows in found.items() if len(rows) == 12 and len(tasks[key[1]]) > 1}


def judged(table: list[Measured], key: Key, rows: list[Measured]) -> dict[str, Any]:
    task, head, size, epsilon, passes = key
    table = [row for row in table if row.head == head and row.trained == "last_layer"]
    others = [row for row in table if row.task != task]
    asked = Asked("last_layer", rows[0].parameters, passes, rows[0].signal, head)
    choice = fine_tuning.choose(others, asked)
    # Fewer passes than the budget allows are a valid answer, and then compared with the search of the whole budget.
    (reached,) = [row for row in table if row.condition == (task, size, epsilon) and row.point == choice.point]
    best = max(row.accuracy for row in rows)
    low, high = interval(best, rows[0].rows)
    lost, allowed = best - reached.accuracy, max(0.02, (high - low) / 2)
    values = (task, head, size, epsilon, passes, reached.accuracy, best, round(lost, 4), round(allowed, 4), lost <= allowed)
    values = (*values, rows[0].baseline)
    return dict(zip(FIELDS, values, strict=True))


def main() -> None:
    table = fine_tuning.read(HERE / "measured.csv")
    found = [judged(table, key, rows) for key, rows in sorted(searches(table).items())]
    with (HERE / "judged.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list[str](FIELDS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    for row in found:
        print(*row.values())
    passed, most = sum(row["passes_test"] for row in found), max(row["lost"] for row in found)
    print(f"{passed} of {len(found)} designs pass; lost at most {most:.4f}")


if __name__ == "__main__":
    main()
