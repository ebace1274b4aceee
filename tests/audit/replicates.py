"""The audit in its stated setting, 20 replicates of each mechanism, into `experiments/audit/replicates.csv`.

`python -m tests.audit.replicates`, from the root of the project.
"""

import csv
from pathlib import Path

import pytest

from dpx import config
from dpx.config import recipes
from dpx.training.dirac import Attack, Setting
from tests.audit.test_dirac import REPLICATES, scaled_noise, verdicts

TABLE = Path(__file__).parents[2] / "experiments" / "audit" / "replicates.csv"
COLUMNS = ("mechanism", "replicates", "caught_by_primary", "caught_by_any", "least_bound", "median_bound", "largest_bound", "claim")


def main() -> None:
    experiment, _ = config.build(recipes.compose(["clipping_method=book_keeping"]))
    rows = []
    for name, factor in (("sound", 1.0), ("half the noise", 0.5), ("no noise", 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            scaled_noise(patch, factor)
            found = [verdict for verdict, _ in verdicts(Attack.build(experiment.one_step, experiment.mesh, Setting()))]
        bounds = sorted(verdict.primary.epsilon for verdict in found)
        caught = (sum(verdict.primary.refutes for verdict in found), sum(not verdict.passes for verdict in found))
        rows.append((name, REPLICATES, *caught, *(round(bounds[place], 3) for place in (0, len(bounds) // 2, -1)), 2.0))
    with open(TABLE, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
