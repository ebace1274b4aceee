"""Tests whether the noisy gradient is unbiased, and for which loss (Du and Mi 2021, proposition 2, F15).

DP-FP's gradient is that of the loss at noisy rows. Over noise its mean is the gradient of the mean noisy loss, and not the gradient of the
clean loss: the loss is not linear in the rows. DP-SGD's noise is added to a sum, so its mean is the sum of clipped gradients; the
difference to the gradient of the loss comes from clipping, not from noise.

B: rows, H: width, N: draws of noise.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration, require
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.du2021 import batches
from dpx_papers.du2021.batches import Demonstration, Steps
from dpx_papers.du2021.one_step import shape_of, standard_normal
from dpx_papers.report.shape import Part, verdict_table

COLUMNS = ("method", "noise_multiplier", "reference", "reference_norm", "squared_bias", "squared_bias_error")
COLUMNS += ("relative_bias", "relative_error", "along", "along_error", "along_in_errors")
NOTES = (
    "squared_bias: of the mean noisy gradient less the reference, estimated without the part that is noise; its error by a jackknife",
    "relative_bias: its root (0 for a negative estimate) over the norm of the reference; relative_error: what two errors could hide",
    "along: the same difference along the gradient of the clean loss, and its standard error over draws",
    "the slope of the mean noisy loss in that direction is a two-sided difference under other draws of noise",
    "DP-FP's draws come in pairs of opposite noise, which have the same mean and less spread; DP-SGD's are independent",
)
# The step of the two-sided difference, along a direction of norm 1.
STEP = 1e-3
# Groups of draws whose means are compared.
GROUPS = 16


@declaration
class DpfpProp2GradientBias(Demonstration):
    """Averages noisy gradients of a made-up batch over draws of noise (pairs, for DP-FP).

    The parameters take some plain steps first: a random head gives the same output for every row.

    Attributes:
        draws: Draws of noise and simulated runs.
        clipping_norm: Norm to which the pooled vector is clipped.
        warm_up: Plain steps before the measurement.
        learning_rate: Learning rate of the plain steps.
    """

    draws: int
    clipping_norm: float
    warm_up: int
    learning_rate: float

    def __post_init__(self) -> None:
        require(self.draws >= GROUPS, f"analysis.draws={self.draws}", "a group of draws would be empty", f"Give {GROUPS} or more")

    def __call__(self) -> list[Table]:
        import jax

        with jax.enable_x64(True):
            subject = batches.made_up(self.sentences, self.init, self.data)
            point = self._trained(subject)
            rows = [row for sigma in self.noise_multipliers for row in self._dp_fp(point, float(sigma))]
            rows += self._dp_sgd(point)
        bias = Table("bias", COLUMNS, tuple(rows), "the mean gradient over noise, less what it is compared with", NOTES)
        return [bias, verdict_table(judged(bias.as_json()["rows"]))]

    def _trained(self, subject: Steps) -> "Point":
        """Returns the loss of the batch at the parameters after `warm_up` plain steps, in float64."""
        import jax
        import jax.numpy as jnp
        from jax.flatten_util import ravel_pytree

        classifier = self.classifier(subject)
        start = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), classifier.parameters(self.init, self.seed))
        flat, restore = ravel_pytree(start)

        def loss(flat: Any, batch: Any, noise_BH: Any, sigma: Any) -> Any:
            return classifier.loss(restore(flat), batch, noise_BH, sigma, self.clipping_norm)

        batch, value, gradient = subject.steps[0].batch, jax.jit(loss), jax.jit(jax.grad(loss))
        no_noise_BH = np.zeros((len(batch["label"]), shape_of(self.model).width))
        for _ in range(self.warm_up):
            flat = flat - self.learning_rate * gradient(flat, batch, no_noise_BH, 0.0)
        clean = np.asarray(gradient(flat, batch, no_noise_BH, 0.0))
        return Point(value, gradient, np.asarray(flat), clean, clean / np.linalg.norm(clean), batch, no_noise_BH)

    def _dp_fp(self, point: "Point", sigma: float) -> list[tuple[Any, ...]]:
        """Compares the mean with the gradient of the clean loss and, along that gradient, with the mean noisy loss."""
        found, slopes = NoisyMean(point.direction), []
        for draw in range(self.draws):
            noise, other = (standard_normal(self.seed, 2 * draw + part, *point.no_noise_BH.shape) for part in (0, 1))
            pair = [np.asarray(point.gradient(point.flat, point.batch, sign * noise, sigma)) for sign in (1, -1)]
            found.add((pair[0] + pair[1]) / 2)
            slopes.append(sum(point.slope(sign * other, sigma) for sign in (1, -1)) / 2)
        slope, slope_error = mean_and_error(slopes)
        along, along_error = mean_and_error(found.along)
        apart, error = along - slope, math.hypot(along_error, slope_error)
        noisy = (*(None,) * 5, apart, error, abs(apart) / error)
        return [("DP-FP", sigma, "clean loss", *found.against(point.clean)), ("DP-FP", sigma, "mean noisy loss", *noisy)]

    def _dp_sgd(self, point: "Point") -> list[tuple[Any, ...]]:
        """Compares the mean with the sum of clipped gradients, and with the sum of gradients, over the rows of the batch."""
        alone = [{name: values[row : row + 1] for name, values in point.batch.items()} for row in np.flatnonzero(point.batch["is_row"])]
        rows_BN = np.stack([np.asarray(point.gradient(point.flat, one, point.no_noise_BH[:1], 0.0)) for one in alone])
        weights_B1 = np.minimum(1.0, self.clipping_norm / np.linalg.norm(rows_BN, axis=1, keepdims=True))
        clipped, whole = (rows_BN * weights_B1).sum(axis=0), rows_BN.sum(axis=0)
        rows = []
        for sigma in map(float, self.noise_multipliers):
            found = NoisyMean(point.direction)
            for draw in range(self.draws):
                found.add(clipped + sigma * self.clipping_norm * standard_normal(self.seed, draw, 1, clipped.size)[0])
            rows += [("DP-SGD", sigma, "sum of clipped gradients", *found.against(clipped))]
            rows += [("DP-SGD", sigma, "sum of gradients", *found.against(whole))]
        return rows

    def pictures(self) -> list[Picture]:
        """Plots DP-FP's bias for the clean loss, and every difference in standard errors."""
        axes: dict[str, Any] = {"table": "bias", "x": "noise_multiplier", "x_scale": "log", "y_scale": "log", "x_label": "noise multiplier"}
        names = (("relative_bias", "bias"), ("relative_error", "what chance could hide"))
        of_the_norm = "over the norm of the clean gradient"
        panels = (
            Lines(
                y=("relative_bias", "relative_error"),
                names=names,
                where=("reference", "clean loss"),
                title="DP-FP's mean gradient, clean loss",
                y_label=of_the_norm,
                **axes,
            ),
            Lines(y=("along_in_errors",), by="reference", title="mean gradient less that of", y_label="in standard errors", **axes),
        )
        caption = (
            "The mean noisy gradient. DP-FP's is that of the mean noisy loss and leaves that of the clean loss as noise grows. DP-SGD's is "
            "the sum of clipped gradients."
        )
        return [Picture("dpfp_gradient_bias", caption, panels)]


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

    def against(self, reference: np.ndarray) -> tuple[float, ...]:
        """Returns the columns of the table from `reference_norm` on."""
        apart_GN = self._sums_GN / self._counts_G[:, None] - reference
        square, error = squared_norm_of_mean(apart_GN @ apart_GN.T)
        norm = float(np.linalg.norm(reference))
        along, along_error = mean_and_error(self.along)
        relative = (math.sqrt(max(square, 0.0)) / norm, math.sqrt(2 * error) / norm)
        apart = along - float(reference @ self._direction)
        return norm, square, error, *relative, apart, along_error, abs(apart) / along_error


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


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Returns the verdicts: which gradient the mean gradient of each method equals."""
    by_reference = {name: [row for row in rows if row["reference"] == name] for name in dict.fromkeys(row["reference"] for row in rows)}
    clean, noisy, clipped = (by_reference[name] for name in ("clean loss", "mean noisy loss", "sum of clipped gradients"))
    sure = [row["noise_multiplier"] for row in clean if row["squared_bias"] > 4 * row["squared_bias_error"]]
    largest = max(clean, key=lambda row: row["noise_multiplier"])
    most, worst = (max(row["along_in_errors"] for row in rows) for rows in (noisy, clipped))
    biased = f"bias beyond four errors at sigma / C = {', '.join(f'{one:g}' for one in sure) or 'none'}"
    biased += f"; at {largest['noise_multiplier']:g} it is {largest['relative_bias']:.2f} of the gradient's norm"
    return [
        Part.of("DP-FP's mean gradient is that of the mean noisy loss", most <= 4, f"largest difference {most:.1f} standard errors"),
        Part.of("DP-FP's mean gradient is that of the clean loss (proposition 2, as it is read)", not sure, biased),
        Part.of("DP-SGD's mean is the sum of clipped gradients", worst <= 4, f"largest difference {worst:.1f} standard errors"),
    ]
