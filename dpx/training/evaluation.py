"""Held-out loss and accuracy, and the two baselines a run has to beat.

Held-out units never take part in training and their masks come from a fixed key, so figures of different runs compare.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.data.prepare import prepare
from dpx.data.store import Store
from dpx.experiment import Experiment
from dpx.task.objective import objective as make_objective
from dpx.training import checkpoint

BATCH_ROWS = 64
_MASK_KEY = (2024, 2029)  # any constant: evaluation masks must not change from run to run


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out rows cut into batches of one fixed shape, and the jitted sums over one batch."""

    batches: list[tuple[dict[str, np.ndarray], np.ndarray]]
    sums: Callable[..., dict[str, Any]]
    frequent_token_accuracy: float
    figures: Callable[[dict[str, float]], dict[str, float]]

    def __call__(self, params: Any) -> dict[str, float]:
        """The task's figures of all held-out rows."""
        totals: dict[str, float] = {}
        for rows, is_padding_B in self.batches:
            for name, value in jax.device_get(self.sums(params, rows, is_padding_B)).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return self.figures(totals)


def held_out(objective: Any, store: Store, rows_wanted: int, batch_rows: int) -> HeldOut:
    """Cuts the first `rows_wanted` held-out rows (all, where there are fewer) into batches of `batch_rows`."""
    count = min(rows_wanted, store.manifest.rows["heldout"])
    key = jnp.asarray(_MASK_KEY, jnp.uint32)

    def sums(params: Any, rows: dict[str, Any], is_padding_B: Any) -> dict[str, Any]:
        losses_B, counts = objective.losses(params, objective.batch(key, rows))
        total = lambda values_B: jnp.sum(jnp.where(is_padding_B, 0.0, values_B))  # noqa: E731
        return {"loss": total(losses_B), "examples": total(jnp.ones_like(losses_B)), **{name: total(v) for name, v in counts.items()}}

    batches, hits, slots = [], 0.0, 0.0
    # Without a public split no token is known to be frequent, and the baseline is 0.
    frequent = store.manifest.most_frequent_public_token_id
    labels = jax.jit(lambda rows: {name: objective.batch(key, rows)[name] for name in ("labels", "is_slot")})
    for start in range(0, count, batch_rows):
        indices = np.arange(start, start + batch_rows)
        is_padding_B = indices >= count
        rows = store.rows("heldout", np.minimum(indices, count - 1))
        masked = jax.device_get(labels(rows))
        weights_BM = masked["is_slot"] * ~is_padding_B[:, None]
        hits += float(np.sum(weights_BM * (masked["labels"] == (-1 if frequent is None else frequent))))
        slots += float(np.sum(weights_BM))
        batches.append((rows, is_padding_B))
    return HeldOut(batches, jax.jit(sums), hits / max(slots, 1.0), objective.task.figures)


def of_released(experiment: Experiment, params: Path) -> dict[str, float]:
    """Held-out figures of the parameters in `release/params`, with the most frequent token's accuracy beside them."""
    store = prepare(experiment.data, experiment.privacy)
    vocabulary = experiment.model.vocabulary_size or store.manifest.vocabulary_size
    objective = make_objective(experiment.model, experiment.task, vocabulary, store.manifest)
    evaluate = held_out(objective, store, experiment.schedule.evaluation_rows, BATCH_ROWS)
    return evaluate(checkpoint.released(params)) | {"most_frequent_token_accuracy": evaluate.frequent_token_accuracy}
