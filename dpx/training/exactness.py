"""Checks that a clipped sum is the sum of clipped gradients: a small model of the same kind against float64, one example at a time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping.clipped_sum import clipped_sum
from dpx.mechanism.clip import Flat
from dpx.models.shape import AnyModel
from dpx.task.declared_task import Task
from dpx.task.mlm import Special
from dpx.task.objective import objective as make_objective
from dpx.training.microbatch import synthetic_rows

EXAMPLES, LENGTH, VOCABULARY = 5, 12, 16
# (objective, clip) -> (parameters, batch) -> float32 sum of clipped gradients.
SumOf = Callable[[Any, Flat], Callable[[Any, Any], Any]]
_SMALL = {"layers": 2, "width": 16, "heads": 2, "feed_forward": 24, "dtype": "float32", "dropout": 0.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model and a batch for the comparison.

    Its parameters are far from initialisation, and the batch has repeated words, labels that also occur in the input, and padding.
    """

    objective: Any
    params: Any
    batch: dict[str, jax.Array]

    @classmethod
    def build(cls, model: AnyModel, task: Task) -> "Case":
        """Returns the case for a model and a task of this kind."""
        objective = make_objective(dataclasses.replace(model, **_SMALL), task, VOCABULARY, Special(0, 1, 2, 3, 4))
        key, drawn = np.zeros(2, np.uint32), np.random.default_rng(0)
        shapes = jax.eval_shape(objective.init, key)
        params = jax.tree.map(lambda leaf: jnp.asarray(drawn.normal(0, 0.3, leaf.shape), jnp.float32), shapes)
        return cls(objective, params, jax.jit(objective.batch)(key, synthetic_rows(task, EXAMPLES, LENGTH, VOCABULARY)))

    def gradients(self) -> list[Any]:
        """Returns each example's own gradient, float64."""
        with jax.enable_x64(True):
            params_f64 = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), self.params)
            one = jax.jit(jax.grad(lambda params, row: self.objective.losses(params, row)[0][0]))
            rows = [jax.tree.map(lambda leaf, b=b: leaf[b : b + 1], self.batch) for b in range(EXAMPLES)]
            return [jax.tree.map(np.asarray, one(params_f64, row)) for row in rows]


class Exactness:
    """The comparison of clipped sums with one reference, which is computed when it is first needed."""

    def __init__(self, model: AnyModel, task: Task):
        self._model, self._task = model, task

    @functools.cached_property
    def _expected(self) -> tuple[Case, Any, float]:
        case = Case.build(self._model, self._task)
        return case, *clipped(case.gradients())

    def error(self, sum_of: SumOf) -> float:
        """Returns the largest error of any entry, relative to the largest entry of its parameter.

        The clipping norm is half the smallest gradient norm.
        """
        case, expected, clipping_norm = self._expected
        run = sum_of(case.objective, Flat(clipping_norm=clipping_norm))
        # An accelerator's default rounds the factors of a float32 product; this check is about the sum, not about that rounding.
        with jax.default_matmul_precision("highest"):
            return error(jax.jit(run)(case.params, case.batch), expected)


def sum_by(method: str) -> SumOf:
    """Returns the clipped sum of one of dpx's own methods."""

    def sum_of(objective: Any, clip: Flat) -> Callable[[Any, Any], Any]:
        def losses(params: Any, batch: Any) -> Any:
            return objective.losses(params, batch, jnp.zeros(2, jnp.uint32))

        weights = clip.weights(clip.clipping_norm)
        return lambda params, batch: clipped_sum(losses, params, batch, weights=weights, method=method, checked=False).total

    return sum_of


def clipped(gradients: list[Any]) -> tuple[Any, float]:
    """Returns sum_b g_b C / |g_b| and C, half the smallest norm, so that every example is clipped and a wrong norm shows."""
    norms = [float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))) for gradient in gradients]
    clipping_norm = 0.5 * min(norms)
    scaled = [jax.tree.map(lambda leaf, n=norm: leaf * (clipping_norm / n), one) for one, norm in zip(gradients, norms, strict=True)]
    return jax.tree.map(lambda *leaves: sum(leaves), *scaled), clipping_norm


def error(actual: Any, expected: Any) -> float:
    """Returns the largest error of any entry, relative to the largest entry of its parameter; NaN if any entry is NaN."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    # numpy's maximum keeps a NaN, wherever it stands; Python's loses it.
    return float(np.max([np.max(np.abs(np.asarray(leaf) - wanted)) / np.max(np.abs(wanted)) for leaf, wanted in pairs]))
