"""Reads Table 2 of Du and Mi 2021 as printed, from `published.csv`: scores by model, method and task."""

from collections.abc import Mapping
from pathlib import Path

from dpx.declaration import require
from dpx_papers.report.rows import read_published

# The five numbers of a row; their mean is the sixth, so MNLI counts twice.
TASKS = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2")
MODELS = ("BERT-base", "RoBERTa-base", "RoBERTa-large")
NON_PRIVATE = "no privacy"
TARGETS = (3, 8)
# Printed means have two digits after the point.
ROUNDING = 0.0051

Scores = Mapping[tuple[str, str], Mapping[str, float]]


def dp_fp(target: int) -> str:
    """Returns the name of DP-FP's row under the printed epsilon `target`, which is that of Li et al.'s DP-SGD."""
    return f"DP-FP, printed as epsilon {target}"


def dp_sgd(target: int) -> str:
    """Returns the name of the row of Li et al.'s DP-SGD at the RDP epsilon `target`."""
    return f"DP-SGD of Li et al., epsilon {target}"


def scores(path: str) -> Scores:
    """Returns by (model, method) the five scores and the printed `mean`, in percent. Raises `ConfigError` for a row with other columns."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in read_published(Path(path)):
        if line.where == "Table 2" and line.unit == "%":
            model, *method, task = line.quantity.split(", ")
            found.setdefault((model, ", ".join(method)), {})[task] = float(line.value)
    for name, row in found.items():
        require(set(row) == {*TASKS, "mean"}, f"{path}: {', '.join(name)}", "is not a whole row of Table 2", "Restore its six lines")
    return found


def mean(row: Mapping[str, float]) -> float:
    """Returns the mean over the five numbers of a row, unrounded."""
    return sum(row[task] for task in TASKS) / len(TASKS)
