"""Judges the designs of fine-tuning: each task is designed from the runs of the other tasks, and compared with a search on the task itself.

    python experiments/fine_tuning/judge.py            # writes judged.csv and prints it
    python experiments/fine_tuning/judge.py --unread   # the tasks of unread.csv, designed from measured.csv, which has none of their runs

A search takes the best of the 12 measured points of one task, N, epsilon and number of passes: three shares by four paths. A design passes
if it loses at most two points, or half the width of the best accuracy's 95 % interval, whichever is more. Of a task that is not in
measured.csv the accuracies that `job=design` prints are shown too, one for each measured task, beside the accuracy that was reached.
"""

import argparse
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


def judged(others: list[Measured], table: list[Measured], key: Key, rows: list[Measured]) -> dict[str, Any]:
    """Judges the design that `others`, runs of other tasks, give for the task of `key`, whose runs are in `table`."""
    task, head, size, epsilon, passes = key
    others, table = ([row for row in some if row.head == head and row.trained == "last_layer"] for some in (others, table))
    asked = Asked("last_layer", rows[0].parameters, passes, rows[0].signal, head)
    choice = fine_tuning.choose([row for row in others if row.task != task], asked)
    # Fewer passes than the budget allows are a valid answer, and then compared with the search of the whole budget.
    (reached,) = [row for row in table if row.condition == (task, size, epsilon) and row.point == choice.point]
    best = max(row.accuracy for row in rows)
    low, high = interval(best, rows[0].rows)
    lost, allowed = best - reached.accuracy, max(0.02, (high - low) / 2)
    values = (task, head, size, epsilon, passes, reached.accuracy, best, round(lost, 4), round(allowed, 4), lost <= allowed)
    predicted = {f"as_{one.task}": round(one.accuracy, 4) for one in fine_tuning.expected(choice, asked)}
    return dict(zip(FIELDS, (*values, rows[0].baseline), strict=True)) | {"predicted": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unread", action="store_true")
    is_unread, measured = parser.parse_args().unread, fine_tuning.read(HERE / "measured.csv")
    table = fine_tuning.read(HERE / "unread.csv") if is_unread else measured
    found = [judged(measured, table, key, rows) for key, rows in sorted(searches(table).items())]
    if not is_unread:
        with (HERE / "judged.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list[str](FIELDS), extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    for row in found:
        print(*row.values())
    passed, most = sum(row["passes_test"] for row in found), max(row["lost"] for row in found)
    print(f"{passed} of {len(found)} designs pass; lost at most {most:.4f}")


if __name__ == "__main__":
    main()
