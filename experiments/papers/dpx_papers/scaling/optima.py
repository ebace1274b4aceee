"""Finds the optimum at each of many budgets; a line of a figure plots one column of these optima against another."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dpx.cost.designs import MODELS, NEAR, Ratio, candidates
from dpx.cost.surface import Surface
from dpx.declaration import require
from dpx_papers.analysis import frame


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The least loss for (size, epsilon, compute), with its configuration.

    `smallest_model`, `smallest_token_ratio` and the other ends are those of all configurations within 1 % of that loss: McKenna et al. 2025
    draw the smaller end as a line (section 4.2), since the optimum itself is flat, and shade up to the larger one.
    """

    size: float | int
    epsilon: float | int
    compute: float
    loss: float
    smallest_model: float
    smallest_token_ratio: float
    largest_model: float
    largest_token_ratio: float
    smallest_batch_size: float
    largest_batch_size: float
    fewest_steps: float
    most_steps: float
    parameters: float
    batch_size: float
    steps: float
    ratio: float
    epochs: float
    tokens_per_parameter: float
    marks: tuple[str, ...]

    @property
    def is_censored(self) -> bool:
        """Returns whether the optimum is at an end of the trained models, so that the true one may lie beyond.

        Without noise the batch is fixed, so the largest number of steps that was run is such an end too.
        """
        ends = ("smallest model", "largest model", *(() if np.isfinite(self.epsilon) else ("largest steps",)))
        return any(mark in ends for mark in self.marks)


def optimum(
    surface: Surface, ratio: Ratio, *, size: float | int, epsilon: float | int, compute: float, near: float = NEAR
) -> Optimum | None:
    """Returns the optimum of one budget, or `None` if no configuration of it is inside the grid.

    `ratio` is that of `epsilon`; what is within `near` of the least loss, as a share, has the ends.

    Without noise the batch is the measured one, since the effect of the batch alone on the loss was not measured.
    """
    surface = surface.for_epsilon(epsilon)
    batch_sizes = None if np.isfinite(epsilon) else [surface.batch_size]
    asked = candidates(surface, ratio, compute=compute, size=size, batch_sizes=batch_sizes)
    if not np.isfinite(asked.loss).any():
        return None
    place, within = asked.best, asked.near(near)
    tokens = asked.batch_size * asked.steps * surface.tokens / asked.parameters
    marks = asked.at_edge(surface, place)
    spacing = (surface.parameters_M[-1] / surface.parameters_M[0]) ** (1 / (MODELS - 1))
    if not np.isfinite(epsilon) and "largest steps" not in marks and asked.steps[place] * spacing > surface.steps_T[-1]:
        # The next smaller model would take more steps than are there.
        marks += ("largest steps",)
    marks += ("extrapolated steps",) if asked.is_extrapolated[place] else ()
    marks += ("less noise than measured",) if asked.is_below_ratios[place] else ()
    return Optimum(
        size,
        epsilon,
        float(compute),
        loss=float(asked.loss[place]),
        smallest_model=float(asked.parameters[within].min()),
        smallest_token_ratio=float(tokens[within].min()),
        largest_model=float(asked.parameters[within].max()),
        largest_token_ratio=float(tokens[within].max()),
        smallest_batch_size=float(asked.batch_size[within].min()),
        largest_batch_size=float(asked.batch_size[within].max()),
        fewest_steps=float(asked.steps[within].min()),
        most_steps=float(asked.steps[within].max()),
        parameters=float(asked.parameters[place]),
        batch_size=float(asked.batch_size[place]),
        steps=float(asked.steps[place]),
        ratio=float(asked.ratio[place]),
        epochs=float(asked.batch_size[place] * asked.steps[place] / size),
        tokens_per_parameter=float(tokens[place]),
        marks=marks,
    )


def optima(
    surface: Surface,
    ratio_of: Callable[[float | int], Ratio],
    sizes: Iterable[float | int],
    epsilons: Iterable[float | int],
    computes: Iterable[float],
    near: float = NEAR,
) -> Any:
    """Returns the optimum at every (size, epsilon, compute) that has one, in this order: rows whose columns are the fields of `Optimum`,
    with its marks as text, and `is_censored`.

    An infinite epsilon has none if nothing was measured without noise.
    """
    kept = [epsilon for epsilon in epsilons if np.isfinite(epsilon) or surface.noiseless is not None]
    each = (
        optimum(surface, ratio_of(epsilon), size=size, epsilon=epsilon, compute=compute, near=near)
        for size, epsilon, compute in itertools.product(sizes, kept, list(computes))
    )
    rows = [vars(one) | {"marks": "; ".join(one.marks), "is_censored": one.is_censored} for one in each if one is not None]
    columns = [*(field.name for field in dataclasses.fields(Optimum)), "is_censored"]
    # Objects, so that whole numbers stay whole beside an infinite epsilon.
    return frame(rows, columns=columns, dtype=object).astype({"is_censored": bool})


def saturating_compute(computes: np.ndarray, losses: np.ndarray, tolerance: float = NEAR, *, of_best: bool = False) -> float:
    """Returns the least compute whose loss is within `tolerance` of the loss at the largest compute that has one, or `of_best` of the least
    loss.

    Table 2 gives such a compute, but the text does not state its rule; the authors' code takes the least loss.
    """
    known = np.isfinite(losses)
    require(bool(known.any()), "losses", "the loss is not known at any of these values", "Ask for compute inside the grid")
    limit = losses[known].min() if of_best else losses[known][-1]
    return float(computes[known][np.argmax(losses[known] <= (1 + tolerance) * limit)])


def ends_flat(computes: np.ndarray, losses: np.ndarray) -> bool:
    """Returns whether the last doubling of compute gains less than `NEAR`.

    Otherwise the curve has not shown where it saturates; nor has a curve that is known over less than a doubling.
    """
    if computes[0] > computes[-1] / 2:
        return False
    halved = np.interp(np.log(computes[-1] / 2), np.log(computes), losses)
    return bool(halved <= (1 + NEAR) * losses[-1])


def knee(computes: np.ndarray, losses: np.ndarray) -> float:
    """Returns the point where the loss against log compute bends most: the point furthest below the chord between its ends."""
    known = np.isfinite(losses)
    x, y = np.log(computes[known]), losses[known]
    require(len(x) >= 3, "losses", "the loss is known at fewer than three values", "Ask for more compute inside the grid")
    chord = y[0] + (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0])
    return float(computes[known][np.argmax(chord - y)])
