"""Declares the tasks whose rows have a number, or several labels at once, and computes their metrics. Starts no jax.

A row may lack its number, or some of its labels: what it lacks adds nothing to its loss, its gradient or a metric.

Metrics need each row's output: `values` in the totals of held-out rows is [n, 3, M], for n rows the outputs, the targets, and 1 where there
is a target. The totals of a training step have no `values`.
"""

import math
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from dpx.data.schema import Schema, number, several_labels, texts
from dpx.declaration import declaration, require
from dpx.files.results import Z_95
from dpx.task.task_protocol import Pooled

# So many of the most frequent sets of labels are tried as constant answers.
_SETS = 100


@declaration
class Regression(Pooled):
    """A number for a text or a pair of texts: the squared error of (target - mean) / scale.

    `mean` and `scale` are declared, not computed from protected rows: of numbers from 0 to 5, such as 2.5 and 1.5. The headline metric is
    Pearson's correlation with the target; the constant answer has none, so its correlation is taken as 0.

    Attributes:
        mean: A number near the mean of the targets, without looking at protected rows; the answer of a head of zeros.
        scale: How far targets usually are from the mean; errors are divided by it.
    """

    metric: ClassVar[str] = "pearson"
    counts: ClassVar[tuple[str, ...]] = ("squared_error", "with_target")
    # No accuracy of one example: released telemetry is refused.
    accuracy_counts: ClassVar[None] = None

    mean: float
    scale: float
    name: Literal["regression"] = "regression"

    def __post_init__(self) -> None:
        require(math.isfinite(self.mean), f"task.mean={self.mean}", "is not a number", "Use the middle of the targets' range")
        is_scale = math.isfinite(self.scale) and self.scale > 0
        require(is_scale, f"task.scale={self.scale}", "is not a positive number", "Use a third of the targets' range")

    @property
    def pooled_outputs(self) -> int:
        return 1

    def columns(self, sequence_length: int, vocabulary_size: int) -> Schema:
        """Returns the columns of a row that the task reads."""
        return texts(sequence_length, vocabulary_size) | number()

    def baselines(self, answers: Float[np.ndarray, "n 1"], frequent_token: int | None) -> dict[str, float]:
        """Returns the correlation of a constant answer, which is none."""
        return {"constant": 0.0}

    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Returns loss and root mean squared error of the rows with a target; of held-out rows also the correlations.

        `rmse_low` and `rmse_high` are the ends of its 95 % interval over the rows, from the spread of the squared errors. `constant_rmse`
        is the error of always answering the mean of the targets of these rows: no constant has a smaller one.
        """
        count = max(float(totals["with_target"]), 1.0)
        found = {"loss": totals["loss"] / count, "rmse": self.scale * math.sqrt(totals["squared_error"] / count)}
        if "values" not in totals:
            return found
        output_n, target_n = _asked(totals["values"])
        found |= {"pearson": pearson(output_n, target_n), "spearman": pearson(ranks(output_n), ranks(target_n))}
        squared_n = np.square(output_n - target_n)
        spread = Z_95 * float(squared_n.std()) / math.sqrt(len(squared_n)) if len(squared_n) else 0.0
        ends = {f"rmse_{end}": math.sqrt(max(found["rmse"] ** 2 + way * spread, 0.0)) for end, way in (("low", -1), ("high", 1))}
        return found | ends | {"constant_rmse": float(target_n.std()) if len(target_n) else 0.0}


@declaration
class MultiLabel(Pooled):
    """Several labels of a text or a pair of texts, each true or not: the mean of the sigmoid cross-entropies of a row's labels.

    A label is answered where its logit is above 0. The headline metric is the share of the rows all of whose labels are right.

    Attributes:
        labels: Number of labels.
    """

    metric: ClassVar[str] = "subset_accuracy"
    counts: ClassVar[tuple[str, ...]] = ("correct", "with_labels")
    accuracy_counts: ClassVar[tuple[str, str | None]] = ("correct", "with_labels")

    labels: int
    name: Literal["multi_label"] = "multi_label"

    def __post_init__(self) -> None:
        require(self.labels >= 1, f"task.labels={self.labels}", "there is no label to learn", "Name them with data.source.label_names")

    @property
    def pooled_outputs(self) -> int:
        return self.labels

    def columns(self, sequence_length: int, vocabulary_size: int) -> Schema:
        """Returns the columns of a row that the task reads."""
        return texts(sequence_length, vocabulary_size) | several_labels(self.labels)

    def baselines(self, answers: Float[np.ndarray, "n M"], frequent_token: int | None) -> dict[str, float]:
        """Returns the subset accuracy of always answering one set of labels, the best of those that are frequent among the rows.

        `answers` are 0 and 1, and NaN for a label that a row lacks.
        """
        sets, counts = np.unique(answers[~np.isnan(answers).any(1)], axis=0, return_counts=True)
        frequent = sets[np.argsort(-counts, kind="stable")[:_SETS]]
        right = [float((np.isnan(answers) | (answers == one)).all(1).mean()) for one in frequent]
        return {"most_frequent_labels": max(right, default=0.0)}

    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Returns loss and subset accuracy of the rows with labels; of held-out rows also F1.

        `constant_micro_f1` and `constant_macro_f1` are those of the constant answers that are best by them.
        """
        count = max(float(totals["with_labels"]), 1.0)
        found = {"loss": totals["loss"] / count, "subset_accuracy": totals["correct"] / count}
        if "values" not in totals:
            return found
        output_nM, target_nM, has_nM = np.moveaxis(np.asarray(totals["values"], np.float64), 1, 0)
        right_M = ((output_nM > 0) * target_nM * has_nM).sum(0)
        true_M, answered_M = (target_nM * has_nM).sum(0), ((output_nM > 0) * has_nM).sum(0)
        found |= {"micro_f1": _f1(right_M.sum(), true_M.sum(), answered_M.sum()), "macro_f1": _mean_f1(right_M, true_M, answered_M)}
        asked_M = has_nM.sum(0)
        # The best constant answer by micro-F1 holds the most frequent labels, up to some number of them.
        order = np.argsort(-true_M / np.maximum(asked_M, 1.0))
        micro = [_f1(right, true_M.sum(), asked) for right, asked in zip(true_M[order].cumsum(), asked_M[order].cumsum(), strict=True)]
        return found | {"constant_micro_f1": max(micro), "constant_macro_f1": _mean_f1(true_M, true_M, asked_M)}


def pearson(one_n: Float[np.ndarray, " n"], other_n: Float[np.ndarray, " n"]) -> float:
    """Returns Pearson's correlation; 0 if one of both is constant."""
    one_n, other_n = (values - values.mean() if len(values) else values for values in (one_n, other_n))
    lengths = math.sqrt(float(one_n @ one_n)) * math.sqrt(float(other_n @ other_n))
    # Of a constant, rounding leaves differences of the size of the values' last bits.
    is_constant = min((np.ptp(values) if len(values) else 0.0) for values in (one_n, other_n)) == 0
    return 0.0 if is_constant or lengths == 0 or not math.isfinite(lengths) else float(np.clip(one_n @ other_n / lengths, -1.0, 1.0))


def ranks(values_n: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Returns the rank of each value from 1; equal values have the mean of their ranks, as in Spearman's correlation."""
    _, place_n, counts = np.unique(values_n, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[place_n]


def _asked(values: Any) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    output_n, target_n, has_n = np.moveaxis(np.asarray(values, np.float64), 1, 0)[..., 0]
    return output_n[has_n > 0], target_n[has_n > 0]


def _f1(right: float, true: float, answered: float) -> float:
    return float(2 * right / (true + answered)) if true + answered > 0 else 0.0


def _mean_f1(right_M: np.ndarray, true_M: np.ndarray, answered_M: np.ndarray) -> float:
    """Returns the mean F1 of the labels that occur, as truth or as answer."""
    occurs = [_f1(*one) for one in zip(right_M, true_M, answered_M, strict=True) if one[1] + one[2] > 0]
    return float(np.mean(occurs)) if occurs else 0.0
