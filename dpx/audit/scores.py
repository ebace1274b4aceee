"""Scores canaries by what was released alone: noisy gradients, and the final parameters.

A sequence's score is minus its mean loss under the final parameters; its exposure is log2 of the number of canaries that are out less
log2 of its rank among them (Carlini et al. 2019), an estimate without a finite-sample guarantee.

Shape legend: G gradient canaries, S sequences, M canaries of one kind, B rows of a batch.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from dpx.audit.canaries import Planted, WithCanaries
from dpx.declaration import require
from dpx.randomness import RootSecret
from dpx.training.update import CANARIES

BATCH_ROWS = 64


def of_gradients(params: Any, gradients: int) -> Float[np.ndarray, " G"]:
    """Returns each gradient canary's inner product with the sum of all released gradients.

    It is minus the parameter that these gradients updated.
    """
    return -np.asarray(params[CANARIES]["table"], np.float64).ravel()[:gradients]


def of_sequences(objective: Any, params: Any, store: WithCanaries, planted: Planted, secret: RootSecret, masks: int) -> np.ndarray:
    """Returns minus each sequence's mean loss under `params` (the model's alone), over `masks` draws of what is masked, [S]."""
    losses = jax.jit(lambda params, rows, key: objective.losses(params, objective.batch(key, rows))[0])
    count = len(planted.tokens_ST)
    total_S = np.zeros(count)
    for start in range(0, count, BATCH_ROWS):
        # The last batch is filled up with sequences already scored, so that one shape is compiled.
        numbers = np.arange(start, start + BATCH_ROWS) % count
        rows = store.canary_rows(planted.gradients + numbers) | {"record": numbers.astype(np.int32)}
        rows.pop("canary")
        kept = min(BATCH_ROWS, count - start)
        for draw in range(masks):
            losses_B = np.asarray(losses(params, rows, secret.key("audit_mask", draw)))
            total_S[start : start + kept] -= losses_B[:kept]
    return total_S / masks


def exposures(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"]) -> Float[np.ndarray, " n"]:
    """Returns the exposure of each canary that is in, against the canaries that are out: log2(n_out + 1) - log2(rank).

    Ties get the worse rank.
    """
    out = np.sort(scores_M[~is_in_M])
    require(len(out) > 0, "canaries", "every canary is in, so the other group is empty", "Use more canaries")
    rank = 1 + len(out) - np.searchsorted(out, scores_M[is_in_M], side="left")
    return np.log2(len(out) + 1) - np.log2(rank)


def area_under_curve(scores_M: Float[np.ndarray, " M"], is_in_M: Bool[np.ndarray, " M"]) -> float:
    """Returns the probability that a canary that is in scores above one that is out; ties count half."""
    inside, out = scores_M[is_in_M], np.sort(scores_M[~is_in_M])
    below = (np.searchsorted(out, inside, side="left") + np.searchsorted(out, inside, side="right")) / 2
    return float(below.mean() / len(out))
