"""Computes F1 and Matthews' correlation of a classifier from its confusion matrix, as scikit-learn defines them. Starts no jax.

K: classes; rows are the true classes, columns the answers.
"""

import math

import numpy as np
from jaxtyping import Float


def of_confusion(confusion_KK: Float[np.ndarray, "K K"]) -> dict[str, float]:
    """Returns the metrics `macro_f1`, `micro_f1` and `matthews`.

    `macro_f1` is the mean over classes that occur, as truth or as answer; `micro_f1`, for one label a row, is accuracy.
    """
    right_K, true_K, answered_K = np.diag(confusion_KK), confusion_KK.sum(axis=1), confusion_KK.sum(axis=0)
    occurs_K = true_K + answered_K > 0
    f1_K = 2 * right_K[occurs_K] / (true_K + answered_K)[occurs_K]
    count = float(confusion_KK.sum())
    return {
        "macro_f1": float(f1_K.mean()) if len(f1_K) else 0.0,
        "micro_f1": float(right_K.sum()) / max(count, 1.0),
        "matthews": _matthews(float(right_K.sum()), true_K, answered_K, count),
    }


def _matthews(right: float, true_K: np.ndarray, answered_K: np.ndarray, count: float) -> float:
    """Returns Gorodkin's coefficient for any number of classes; 0 if truth or answers are all one class."""
    spread = (count**2 - float(true_K @ true_K)) * (count**2 - float(answered_K @ answered_K))
    return (right * count - float(true_K @ answered_K)) / math.sqrt(spread) if spread > 0 else 0.0
