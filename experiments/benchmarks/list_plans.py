"""Processor time of `job=list list.plan=true` beside that of composing the same points.

`python experiments/benchmarks/list_plans.py 'mckenna_*'`; without a pattern it plans every recipe outside `laptop/`. It plans with an empty
cache, and then with the one that this left.
"""

import os
import sys
import tempfile
import time

from dpx.config import recipes
from dpx.job.list import Point
from dpx.privacy import cache


def main() -> None:
    match = sys.argv[1] if len(sys.argv) > 1 else "*"
    names = [name for name in recipes.names(match) if not name.startswith("laptop/")]
    points = [(name, tuple(overrides)) for name in names for overrides in recipes.points(name)]
    began = time.process_time()
    for name, overrides in points:
        recipes.plan_config(name, list(overrides))
    composing = time.process_time() - began
    print(f"{len(names)} names, {len(points)} points: composing them takes {composing:.1f} s", flush=True)
    solved, write = [], cache.write

    def counted(kind, question, value):
        solved.append(kind)
        write(kind, question, value)

    cache.write = counted
    with tempfile.TemporaryDirectory() as folder, cache.keeping():
        os.environ["DPX_CACHE"] = folder
        for turn in ("first", "again"):
            solved.clear()
            began = time.process_time()
            refused = sum(Point(name, overrides).plan_row().error is not None for name, overrides in points)
            took = time.process_time() - began
            counts = (
                f"{solved.count('calibration')} noise multipliers and {solved.count('epsilon')} epsilons solved, {refused} points refused"
            )
            print(f"{turn}: {took:.1f} s, {took / composing:.2f} of composing; {counts}", flush=True)


if __name__ == "__main__":
    main()
