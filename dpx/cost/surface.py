"""Makes measured losses a surface: records to a monotone grid, and the grid to losses at any (model, steps, noise-batch ratio) inside it.

The grid chooses among learning rates, takes a rolling mean, and makes losses isotonic in the steps and then in the ratio. The surface is
linear between the logarithms of nodes. A point outside the grid has no loss: it is marked and NaN, never moved to the edge. Two cases are
marked and have a value: steps beyond the measured ones (extrapolated), and a ratio below the smallest (the loss at the smallest ratio; less
noise can only lower it).

Losses are extrapolated beyond the steps that were run (McKenna et al. 2025, section 3.3): L(T) = E + A / T^alpha is fitted to the end of
each curve. The paper fits by Levenberg-Marquardt from starts it does not state. At one alpha the least squares in (E, A) have a closed
form, so alpha is found on a grid that is refined instead: this gives the same minimum without a start, for all curves at once.

Shape legend: M models, R noise-batch ratios, L learning rates, T records (numbers of steps done), all ascending; ... curves, K steps beyond
the records, G values of alpha.
"""

import dataclasses
import itertools
from typing import Any, Literal, TypeVar

import numpy as np

from dpx.cost.measured_runs import Measurements
from dpx.declaration import ConfigError, require

# The paper does not say how it chooses; the first is the default of dpx (McKenna et al. 2025, section 3.3).
Choice = Literal["pointwise_minimum", "lowest_final_loss"]
# (losses, learning rates) [T] by (parameters, model, ratio); the ratio is 0 without noise.
Cells = dict[tuple[float, str, float], tuple[np.ndarray, np.ndarray]]


Kind = TypeVar("Kind", bound="GridLosses")


@dataclasses.dataclass(frozen=True)
class GridLosses:
    """Losses [M, R, T] at models, noise-batch ratios and numbers of steps, ascending.

    `noiseless` are losses without noise, if any were measured: they have their own models and the single ratio 0.
    """

    names: tuple[str, ...]
    parameters_M: np.ndarray
    ratios_R: np.ndarray
    steps_T: np.ndarray
    losses_MRT: np.ndarray
    noiseless: Any = dataclasses.field(default=None, kw_only=True)

    def for_epsilon(self: Kind, epsilon: float | int) -> Kind:
        """Returns the losses to use for a budget of `epsilon`: those without noise if it is infinite.

        Raises `ConfigError` if they are missing.
        """
        found = self if np.isfinite(epsilon) else self.noiseless
        if found is None:
            raise ConfigError("epsilon=inf", "the measurements have no run without noise", "Also train models without noise")
        return found


@dataclasses.dataclass(frozen=True)
class Grid(GridLosses):
    """Losses at every (model, ratio, record) that was measured; `rates_MRT` are the learning rates with which they were reached."""

    rates_MRT: np.ndarray
    left_out: tuple[str, ...] = ()


def over_rates(losses_LT: np.ndarray, choice: Choice = "pointwise_minimum") -> tuple[np.ndarray, np.ndarray]:
    """Returns (losses [T], index of the best rate [T]) of one model and ratio; a record that is NaN was not measured at that rate.

    Raises `ConfigError` where no rate has all records.
    """
    is_whole_L = np.asarray(np.isfinite(losses_LT).all(1))
    require(
        bool(is_whole_L.any()),
        "a model and ratio",
        "no learning rate has a complete record of its losses",
        "Finish at least one run of this model and ratio",
    )
    known_LT = np.where(is_whole_L[:, None], losses_LT, np.inf)
    if choice == "lowest_final_loss":
        winner_T = np.full(losses_LT.shape[1], int(np.argmin(known_LT[:, -1])))
    else:
        winner_T = np.argmin(known_LT, axis=0)
    return known_LT[winner_T, np.arange(losses_LT.shape[1])], winner_T


def grid_of(measurements: Measurements, choice: Choice = "pointwise_minimum") -> Grid:
    """Returns the largest full rectangle of models and ratios that were measured at common steps; replicates count as their mean.

    Models and ratios that are left out are named. Losses without noise are not part of it, and are kept of every model that has them.
    Several physical batches or lengths in one table are refused: their losses are not comparable.
    """
    for name in ("batch_size", "sequence_length"):
        values = np.unique(getattr(measurements, name))
        require(
            len(values) == 1,
            f"{name} of {', '.join(f'{value:g}' for value in values)}",
            "one grid has one value only",
            "Choose the rows of one value",
        )
    # Parameters identify a model.
    pairs = sorted(set(zip(measurements.parameters.tolist(), measurements.model.tolist(), strict=True)))
    for (m, name), (next_m, next_name) in itertools.pairwise(pairs):
        require(
            m != next_m,
            f"{m:,.0f} parameters",
            f"is the number of parameters of both {name} and {next_name}",
            "Give each model one name only",
        )
    for (name, m), (next_name, next_m) in itertools.pairwise(sorted((name, m) for m, name in pairs)):
        require(name != next_name, f"model {name}", f"has {m:,.0f} and {next_m:,.0f} parameters", "Give each model its own name")
    # The records that most models and ratios have, the longest of equally frequent ones: an unfinished run is left out, and the grid is
    # not shortened to it.
    having: dict[tuple[float, ...], set] = {}
    for (m, _, ratio, *_), (steps, _) in _runs(measurements).items():
        having.setdefault(tuple(steps.tolist()), set()).add((m, ratio))
    steps_T = np.array(max(having, key=lambda steps: (len(having[steps]), len(steps), steps)))
    cells = _cells(measurements, steps_T, choice)
    others = {(m, name, ratio) for m, name, ratio, *_ in _runs(measurements)} - set(cells)
    unlike = tuple(f"{name} at ratio {ratio:g}: no run has the grid's {len(steps_T)} records" for _, name, ratio in sorted(others))
    noisy, noiseless = ({cell: found for cell, found in cells.items() if (cell[2] > 0) is has_noise} for has_noise in (True, False))
    grid, without = _grid(noisy, steps_T), _grid(noiseless, steps_T) if noiseless else None
    left_out = grid.left_out + (without.left_out if without else ()) + unlike
    return dataclasses.replace(grid, noiseless=without, left_out=left_out)


def _grid(cells: Cells, steps_T: np.ndarray) -> Grid:
    names = sorted({(m, name) for m, name, _ in cells})
    ratios = sorted({ratio for *_, ratio in cells})
    models, kept = _rectangle(set(cells), names, ratios)
    losses = np.array([[cells[m, name, ratio][0] for ratio in kept] for m, name in models])
    rates = np.array([[cells[m, name, ratio][1] for ratio in kept] for m, name in models])
    outside = [f"{name} at ratio {ratio:g}" for m, name, ratio in sorted(cells) if (m, name) not in models or ratio not in kept]
    parameters = np.array([m for m, _ in models])
    return Grid(tuple(name for _, name in models), parameters, np.array(kept), steps_T, losses, rates, tuple(outside))


def _runs(measurements: Measurements) -> dict[tuple[float, str, float, float, float], tuple[np.ndarray, np.ndarray]]:
    """Returns (steps, losses) by (parameters, model, ratio, learning rate, replicate), steps ascending; the ratio is 0 without noise."""
    keys = list(
        zip(
            measurements.parameters.tolist(),
            measurements.model.tolist(),
            np.where(measurements.is_noisy, measurements.noise_batch_ratio, 0.0).tolist(),
            measurements.learning_rate.tolist(),
            measurements.replicate.tolist(),
            strict=True,
        )
    )
    places: dict[tuple, list[int]] = {}
    for index, key in enumerate(keys):
        places.setdefault(key, []).append(index)
    ordered = {key: np.array(sorted(where, key=lambda index: measurements.step[index])) for key, where in places.items()}
    return {key: (measurements.step[where], measurements.loss[where]) for key, where in ordered.items()}


def _cells(measurements: Measurements, steps_T: np.ndarray, choice: Choice) -> Cells:
    """Returns (losses, rates) [T] by (parameters, model, ratio), only if every record exists at some rate."""
    by_cell: dict[tuple[float, str, float], dict[float, list[np.ndarray]]] = {}
    for (m, name, ratio, rate, _), (steps, losses) in _runs(measurements).items():
        if np.array_equal(steps, steps_T):
            by_cell.setdefault((m, name, ratio), {}).setdefault(rate, []).append(losses)
    cells = {}
    for cell, by_rate in by_cell.items():
        rates_L = np.array(sorted(by_rate))
        losses_T, winner_T = over_rates(np.array([np.mean(by_rate[rate], axis=0) for rate in rates_L]), choice)
        cells[cell] = losses_T, rates_L[winner_T]
    return cells


def _rectangle(cells: set, names: list[tuple[float, str]], ratios: list[float]) -> tuple[list[tuple[float, str]], list[float]]:
    """Returns the models and ratios of the largest rectangle in which nothing is missing.

    Of two equally large ones, it takes the one with more models.
    """
    best: tuple[list, list] = ([], [])
    part: Any
    # The parts of the shorter side are few.
    shorter = names if len(names) <= len(ratios) else ratios
    for count in range(len(shorter), 0, -1):
        for part in itertools.combinations(shorter, count):
            if shorter is names:
                models, kept = list(part), [ratio for ratio in ratios if all((*model, ratio) in cells for model in part)]
            else:
                models, kept = [model for model in names if all((*model, ratio) in cells for ratio in part)], list(part)
            if (len(models) * len(kept), len(models)) > (len(best[0]) * len(best[1]), len(best[0])):
                best = models, kept
    return best


def rolling_mean(losses: np.ndarray, width: int = 10) -> np.ndarray:
    """Returns the mean of the last `width` records along the last axis; the first records use as many as there are."""
    total = np.cumsum(losses, axis=-1)
    before = np.zeros_like(total)
    before[..., width:] = total[..., :-width] if width < total.shape[-1] else 0.0
    counted = np.minimum(np.arange(1, losses.shape[-1] + 1), width)
    return (total - before) / counted


def isotonic(losses: np.ndarray, axis: int, *, increasing: bool) -> np.ndarray:
    """Returns the closest monotone values along `axis`, in least squares (pool adjacent violators, scipy)."""
    from scipy.optimize import isotonic_regression

    return np.apply_along_axis(lambda line: isotonic_regression(line, increasing=increasing).x, axis, losses)


def smooth(losses_MRT: np.ndarray, width: int = 10) -> np.ndarray:
    """Smooths losses: rolling mean, then non-increasing in the steps, then non-decreasing in the ratio; models are not constrained.

    Isotonic regression preserves order, so the second pass keeps what the first made true.
    """
    return isotonic(isotonic(rolling_mean(losses_MRT, width), 2, increasing=False), 1, increasing=True)


# The paper fits records 16K to 128K of 128K steps.
FITTED_PART = 1 / 8
_ALPHAS, _REFINED = np.geomspace(0.02, 4.0, 60), 4


def fit_power_law(steps_T: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (E, A, alpha) of the least-squares fit L = E + A / T^alpha to `losses` [..., T], with E, A >= 0 and 0.02 <= alpha <= 4."""
    alphas = np.broadcast_to(_ALPHAS, (*losses.shape[:-1], len(_ALPHAS)))
    for _ in range(_REFINED):
        _, _, errors = _linear_part(steps_T, losses, alphas)
        place = np.argmin(errors, axis=-1)[..., None]
        low = np.take_along_axis(alphas, np.maximum(place - 1, 0), -1)
        high = np.take_along_axis(alphas, np.minimum(place + 1, alphas.shape[-1] - 1), -1)
        alphas = low * (high / low) ** np.linspace(0, 1, 21)
    e, a, errors = _linear_part(steps_T, losses, alphas)
    place = np.argmin(errors, axis=-1)[..., None]
    e, a, alpha = (np.take_along_axis(values, place, -1)[..., 0] for values in (e, a, alphas))
    return np.asarray(e), np.asarray(a * steps_T[0] ** alpha), np.asarray(alpha)


def _linear_part(steps_T: np.ndarray, losses: np.ndarray, alphas: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the best E and A [..., G] at each alpha [..., G], and the remaining sum of squares; A is for steps relative to the first."""
    basis = np.exp(-alphas[..., None] * np.log(steps_T / steps_T[0]))
    mean, target = basis.mean(-1, keepdims=True), losses[..., None, :]
    centred = basis - mean
    a = np.maximum((centred * target).sum(-1) / (centred**2).sum(-1), 0.0)
    e = target.mean(-1) - a * mean[..., 0]
    # With E at its bound, only A is free.
    a = np.where(e < 0, (basis * target).sum(-1) / (basis**2).sum(-1), a)
    e = np.maximum(e, 0.0)
    return e, a, ((e[..., None] + a[..., None] * basis - target) ** 2).sum(-1)


def extend(steps_T: np.ndarray, losses: np.ndarray, beyond_K: np.ndarray) -> np.ndarray:
    """Returns losses [..., K] at the steps `beyond_K`, each above the last measured one.

    They never lie above the last measured loss, and do not rise with the steps.
    """
    fitted = steps_T >= FITTED_PART * steps_T[-1]
    e, a, alpha = fit_power_law(steps_T[fitted], losses[..., fitted])
    out = e[..., None] + a[..., None] / beyond_K ** alpha[..., None]
    return np.minimum.accumulate(np.minimum(out, losses[..., -1:]), axis=-1)


Real = np.ndarray | float | int


@dataclasses.dataclass(frozen=True)
class Found:
    """Losses, and marks of how each was found, as arrays of one shape."""

    loss: np.ndarray
    is_outside: np.ndarray
    is_extrapolated: np.ndarray
    is_below_ratios: np.ndarray


@dataclasses.dataclass(frozen=True)
class Surface(GridLosses):
    """Smooth losses at the nodes of a grid; `measured_steps` is the last step that was run, `tokens` the length of an example. `is_log`
    interpolates logarithms of losses."""

    measured_steps: float
    batch_size: float
    tokens: float
    is_log: bool = dataclasses.field(default=False, kw_only=True)

    def at(self, parameters: Real, steps: Real, ratio: Real) -> Found:
        """Returns the losses at models (parameters), steps and noise-batch ratios, broadcast against one another.

        `ratio` 0 asks for no noise; raises `ConfigError` where that was not measured.
        """
        m, t, r = np.broadcast_arrays(*(np.asarray(value, float) for value in (parameters, steps, ratio)))
        found = self._at(m, t, r)
        is_noiseless = np.asarray(r == 0)
        if self.ratios_R[0] == 0 or not is_noiseless.any():
            return found
        without = self.for_epsilon(np.inf)._at(m, t, np.zeros_like(r))
        pairs = [(getattr(without, field.name), getattr(found, field.name)) for field in dataclasses.fields(Found)]
        return Found(*(np.asarray(np.where(is_noiseless, *pair)) for pair in pairs))

    def _at(self, m: np.ndarray, t: np.ndarray, r: np.ndarray) -> Found:
        is_outside = np.asarray((r > self.ratios_R[-1] * (1 + 1e-9)) | (r < 0) | ~np.isfinite(r))
        for values, nodes in ((m, self.parameters_M), (t, self.steps_T)):
            is_outside |= (values < nodes[0] * (1 - 1e-9)) | (values > nodes[-1] * (1 + 1e-9)) | ~np.isfinite(values)
        is_below = np.asarray(r < self.ratios_R[0] * (1 - 1e-9))
        held = np.asarray(np.clip(r, self.ratios_R[0], self.ratios_R[-1]))
        nodes, losses = [self.parameters_M, self.ratios_R, self.steps_T], np.log(self.losses_MRT) if self.is_log else self.losses_MRT
        loss = _interpolated(nodes, losses, [m, held, t], np.asarray(~is_outside))
        loss = np.exp(loss) if self.is_log else loss
        is_extrapolated = ~is_outside & (t > self.measured_steps * (1 + 1e-9))
        return Found(*map(np.asarray, (loss, is_outside, is_extrapolated, is_below & ~is_outside)))


def _interpolated(nodes: list[np.ndarray], values: np.ndarray, places: list[np.ndarray], wanted: np.ndarray) -> np.ndarray:
    """Returns values interpolated linearly between logarithms of nodes where `wanted`, NaN elsewhere.

    An axis of one node has values at that node alone.
    """
    from scipy.interpolate import RegularGridInterpolator

    kept = [axis for axis, node in enumerate(nodes) if len(node) > 1]
    values = values[tuple(slice(None) if axis in kept else 0 for axis in range(len(nodes)))]
    out = np.full(wanted.shape, np.nan)
    if not wanted.any():
        return out
    logs = [np.log(nodes[axis]) for axis in kept]
    at = np.stack([np.clip(np.log(places[axis][wanted]), log[0], log[-1]) for axis, log in zip(kept, logs, strict=True)], axis=-1)
    out[wanted] = RegularGridInterpolator(logs, values)(at) if kept else values
    return out


def surface_of(grid: Grid, batch_size: float, tokens: float, *, width: int | None = None, reach: float | int = 1) -> Surface:
    """Returns the surface of a grid: smooth, extend to `reach` times the measured steps, interpolate.

    The rolling mean takes `width` records, by default a tenth of them and at most the paper's 10 (of 1,280): it lags, and on 20 records 10
    of them move the optimum. Steps beyond the measured ones can be chosen only with `reach` > 1: on synthetic surfaces the chosen
    configuration was within 1 % of the best for every surface of 40 inside them, and for 23 of 40 at a reach of 8.
    Raises `ConfigError` for a grid with less than two ratios or records.
    """
    require(
        len(grid.ratios_R) > 0 and len(grid.parameters_M) > 0,
        "an empty grid",
        "no model was measured at all ratios",
        "Finish the runs of at least one model",
    )
    require(len(grid.ratios_R) >= 2, f"{len(grid.ratios_R)} ratios", "interpolation needs at least two", "Train more ratios")
    require(len(grid.steps_T) >= 2, f"{len(grid.steps_T)} records", "interpolation needs at least two", "Train longer")
    fitted = int((grid.steps_T >= FITTED_PART * grid.steps_T[-1]).sum())
    require(
        reach == 1 or fitted >= 3,
        f"{fitted} late records",
        "the law for later steps has three coefficients, so it needs at least three records",
        "Use a reach of 1",
    )
    width = width or max(1, min(10, len(grid.steps_T) // 10))
    noiseless = _surface(grid.noiseless, batch_size, tokens, width, reach) if grid.noiseless else None
    return dataclasses.replace(_surface(grid, batch_size, tokens, width, reach), noiseless=noiseless)


def _surface(grid: Grid, batch_size: float, tokens: float, width: int, reach: float | int) -> Surface:
    losses = smooth(grid.losses_MRT, width)
    steps, measured = grid.steps_T.astype(float), float(grid.steps_T[-1])
    if reach > 1:
        beyond = np.geomspace(measured, measured * reach, 1 + max(1, round(np.log2(reach) * 2)))[1:]
        losses = np.concatenate([losses, isotonic(extend(steps, losses, beyond), 1, increasing=True)], axis=2)
        steps = np.concatenate([steps, beyond])
    return Surface(grid.names, grid.parameters_M, grid.ratios_R, steps, losses, measured, batch_size, tokens)
