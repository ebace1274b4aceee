"""Writes `metrics.json`: what scikit-learn computes of some answers. Run once, in an environment with the extra `parity`:

python -m tests.task.make_metrics
"""

import json
from pathlib import Path

import numpy as np
from sklearn import metrics

# (classes, rows, share of right answers, classes that occur)
SETTINGS = [(2, 40, 0.8, 2), (3, 100, 0.5, 3), (5, 30, 0.3, 3), (2, 20, 0.5, 1), (100, 400, 0.6, 97), (4, 60, 1.0, 4)]


def main() -> None:
    found = []
    for seed, (classes, rows, share, occur) in enumerate(SETTINGS):
        draws = np.random.RandomState(seed)
        true = draws.randint(0, occur, rows)
        answered = np.where(draws.rand(rows) < share, true, draws.randint(0, occur, rows))
        expected = {
            "macro_f1": metrics.f1_score(true, answered, average="macro"),
            "micro_f1": metrics.f1_score(true, answered, average="micro"),
            "matthews": metrics.matthews_corrcoef(true, answered),
        }
        found.append({"classes": classes, "true": true.tolist(), "answered": answered.tolist(), "expected": expected})
    Path(__file__).with_name("metrics.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
