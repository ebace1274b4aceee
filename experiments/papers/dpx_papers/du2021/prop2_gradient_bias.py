"""Tests whether the noisy gradient is unbiased, and for which loss (Du and Mi 2021, proposition 2, F15).

DP-FP's gradient is that of the loss at noisy rows. Over noise its mean is the gradient of the mean noisy loss, and not the gradient of the
clean loss: the loss is not linear in the rows. DP-SGD's noise is added to a sum, so its mean is the sum of clipped gradients; the
difference to the gradient of the loss comes from clipping, not from noise.

B: rows, H: width, N: draws of noise.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpx.config.declared_init import FromCheckpoint, RandomStart
from dpx.data.declared_data import Data
from dpx.declaration import require
from dpx.models.checkpoint_shape import OfCheckpoint
from dpx.models.shape import Bert
from dpx_papers.analysis import Made, analysis, frame
from dpx_papers.du2021 import batches
from dpx_papers.du2021.one_step import NoisyClassifier, standard_normal
from dpx_papers.report.shape import Part

# The step of the two-sided difference, along a direction of norm 1.
STEP = 1e-3
# Groups of draws whose means are compared.
GROUPS = 16


def _require_draws(declared: Any) -> None:
    require(declared.draws >= GROUPS, f"analysis.draws={declared.draws}", "a group of draws would be empty", f"Give {GROUPS} or more")


@analysis(_require_draws)
def dpfp_prop2_gradient_bias(
    model: Bert | OfCheckpoint,
    init: RandomStart | FromCheckpoint,
    data: Data,
    sentences: Sequence[Sequence[str | int]],
    noise_multipliers: Sequence[float | int],
    draws: int,
    clipping_norm: float,
    warm_up: int,
    learning_rate: float,
    seed: int,
) -> Made:
    """Averages noisy gradients of a made-up batch over draws of noise (pairs, for DP-FP).

    The parameters take some plain steps first: a random head gives the same output for every row.

    Attributes:
        model: The model.
        init: Its initial weights.
        data: Its tokenizer is used.
        sentences: A made-up batch of (text, label).
        noise_multipliers: DP-FP's sigma over C, each of which is measured.
        draws: Draws of noise and simulated runs.
        clipping_norm: Norm to which the pooled vector is clipped.
        warm_up: Plain steps before the measurement.
        learning_rate: Learning rate of the plain steps.
        seed: Fixes all randomness of the analysis.
    """
    import jax

    subject = batches.made_up(sentences, init, data)
    classifier = batches.classifier_of(model, subject)
    with jax.enable_x64(True):
        point = _trained(classifier, classifier.parameters(init, seed), subject.steps[0].batch, clipping_norm, warm_up, learning_rate)
        rows = [row for sigma in noise_multipliers for row in _dp_fp(point, float(sigma), draws, seed)]
        rows += _dp_sgd(point, noise_multipliers, draws, clipping_norm, seed)
    bias = frame(rows)
    return {"bias": bias, "verdicts": judged(bias)}


def _trained(classifier: NoisyClassifier, params: Any, batch: Any, clipping_norm: float, warm_up: int, learning_rate: float) -> "Point":
    """Returns the loss of the batch at the parameters after `warm_up` plain steps, in float64."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    flat, restore = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params))

    def loss(flat: Any, batch: Any, noise_BH: Any, sigma: Any) -> Any:
        return classifier.loss(restore(flat), batch, noise_BH, sigma, clipping_norm)

    value, gradient = jax.jit(loss), jax.jit(jax.grad(loss))
    no_noise_BH = np.zeros((len(batch["label"]), classifier.model.width))
    for _ in range(warm_up):
        flat = flat - learning_rate * gradient(flat, batch, no_noise_BH, 0.0)
    clean = np.asarray(gradient(flat, batch, no_noise_BH, 0.0))
    return Point(value, gradient, np.asarray(flat), clean, clean / np.linalg.norm(clean), batch, no_noise_BH)


def _dp_fp(point: "Point", sigma: float, draws: int, seed: int) -> list[dict[str, Any]]:
    """Compares the mean with the gradient of the clean loss and, along that gradient, with the mean noisy loss."""
    found, slopes = NoisyMean(point.direction), []
    for draw in range(draws):
        noise, other = (standard_normal(seed, 2 * draw + part, *point.no_noise_BH.shape) for part in (0, 1))
        pair = [np.asarray(point.gradient(point.flat, point.batch, sign * noise, sigma)) for sign in (1, -1)]
        found.add((pair[0] + pair[1]) / 2)
        slopes.append(sum(point.slope(sign * other, sigma) for sign in (1, -1)) / 2)
    slope, slope_error = mean_and_error(slopes)
    along, along_error = mean_and_error(found.along)
    apart, error = along - slope, math.hypot(along_error, slope_error)
    noisy = {"along": apart, "along_error": error, "along_in_errors": abs(apart) / error}
    of_method = {"method": "DP-FP", "noise_multiplier": sigma}
    return [of_method | {"reference": "clean loss"} | found.against(point.clean), of_method | {"reference": "mean noisy loss"} | noisy]


def _dp_sgd(point: "Point", noise_multipliers: Sequence[float | int], draws: int, clipping_norm: float, seed: int) -> list[dict[str, Any]]:
    """Compares the mean with the sum of clipped gradients, and with the sum of gradients, over the rows of the batch."""
    alone = [{name: values[row : row + 1] for name, values in point.batch.items()} for row in np.flatnonzero(point.batch["is_row"])]
    rows_BN = np.stack([np.asarray(point.gradient(point.flat, one, point.no_noise_BH[:1], 0.0)) for one in alone])
    weights_B1 = np.minimum(1.0, clipping_norm / np.linalg.norm(rows_BN, axis=1, keepdims=True))
    sums = {"sum of clipped gradients": (rows_BN * weights_B1).sum(axis=0), "sum of gradients": rows_BN.sum(axis=0)}
    clipped, rows = sums["sum of clipped gradients"], []
    for sigma in map(float, noise_multipliers):
        found = NoisyMean(point.direction)
        for draw in range(draws):
            found.add(clipped + sigma * clipping_norm * standard_normal(seed, draw, 1, clipped.size)[0])
        of_method = {"method": "DP-SGD", "noise_multiplier": sigma}
        rows += [of_method | {"reference": name} | found.against(total) for name, total in sums.items()]
    return rows


@dataclasses.dataclass(frozen=True)
class Point:
    """Holds a batch's loss and gradient, functions of (flat parameters, batch, noise, sigma); the point, the clean gradient, and its
    direction."""

    value: Callable[..., Any]
    gradient: Callable[..., Any]
    flat: np.ndarray
    clean: np.ndarray
    direction: np.ndarray
    batch: dict[str, np.ndarray]
    no_noise_BH: np.ndarray

    def slope(self, noise_BH: np.ndarray, sigma: float) -> float:
        """Returns the slope of the noisy loss along the direction, by a two-sided difference."""
        ends = [float(self.value(self.flat + sign * STEP * self.direction, self.batch, noise_BH, sigma)) for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * STEP)


class NoisyMean:
    """Holds the mean of noisy gradients in `GROUPS` groups of independent draws, and each draw's value along a direction."""

    def __init__(self, direction: np.ndarray):
        self._direction, self.along = direction, []
        self._sums_GN, self._counts_G = np.zeros((GROUPS, direction.size)), np.zeros(GROUPS)

    def add(self, gradient: np.ndarray) -> None:
        group = len(self.along) % GROUPS
        self._sums_GN[group] += gradient
        self._counts_G[group] += 1
        self.along.append(float(gradient @ self._direction))

    def against(self, reference: np.ndarray) -> dict[str, float]:
        """Returns the bias of the mean against a reference, and the difference along the direction, with their errors."""
        apart_GN = self._sums_GN / self._counts_G[:, None] - reference
        square, error = squared_norm_of_mean(apart_GN @ apart_GN.T)
        norm = float(np.linalg.norm(reference))
        along, along_error = mean_and_error(self.along)
        apart = along - float(reference @ self._direction)
        bias = {"reference_norm": norm, "squared_bias": square, "squared_bias_error": error}
        bias |= {"relative_bias": math.sqrt(max(square, 0.0)) / norm, "relative_error": math.sqrt(2 * error) / norm}
        return bias | {"along": apart, "along_error": along_error, "along_in_errors": abs(apart) / along_error}


def squared_norm_of_mean(products_GG: np.ndarray) -> tuple[float, float]:
    """Returns an unbiased estimate of the squared norm of the expectation of G independent vectors, and its standard error.

    It uses products of different vectors only; the standard error is a jackknife over the vectors.
    """
    number = len(products_GG)
    apart_GG = products_GG - np.diag(np.diag(products_GG))
    whole, by_row_G = apart_GG.sum(), apart_GG.sum(axis=1)
    left_out_G = (whole - 2 * by_row_G) / ((number - 1) * (number - 2))
    error = math.sqrt((number - 1) / number * float(np.sum(np.square(left_out_G - left_out_G.mean()))))
    return float(whole / (number * (number - 1))), error


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


def judged(rows: Any) -> list[Part]:
    """Returns the verdicts: which gradient the mean gradient of each method equals."""
    by_reference = dict(list(rows.groupby("reference")))
    clean, noisy, clipped = (by_reference[name] for name in ("clean loss", "mean noisy loss", "sum of clipped gradients"))
    sure = clean.loc[clean["squared_bias"] > 4 * clean["squared_bias_error"], "noise_multiplier"]
    largest = clean.loc[clean["noise_multiplier"].idxmax()]
    most, worst = noisy["along_in_errors"].max(), clipped["along_in_errors"].max()
    biased = f"bias beyond four errors at sigma / C = {', '.join(f'{one:g}' for one in sure) or 'none'}"
    biased += f"; at {largest['noise_multiplier']:g} it is {largest['relative_bias']:.2f} of the gradient's norm"
    return [
        Part.of("DP-FP's mean gradient is that of the mean noisy loss", most <= 4, f"largest difference {most:.1f} standard errors"),
        Part.of("DP-FP's mean gradient is that of the clean loss (proposition 2, as it is read)", sure.empty, biased),
        Part.of("DP-SGD's mean is the sum of clipped gradients", worst <= 4, f"largest difference {worst:.1f} standard errors"),
    ]
