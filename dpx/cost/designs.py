"""Designs runs for a budget: configurations that can be run, ranked by loss, and the gain from twice the data, compute or epsilon.

Losses come from a surface that was measured at one physical batch. It is assumed that another batch of equal noise-batch ratio reaches
the same loss, as McKenna et al. 2025 do, although smaller batches are lower in their Figure 7. Configurations are trained models
with whole numbers.
"""

import dataclasses
import math

import numpy as np

from dpx.cost.design_noise import Calibration
from dpx.cost.query import Candidates, candidates, excess_by_profiles
from dpx.cost.surface import Surface
from dpx.declaration import ConfigError, require
from dpx.privacy import accounting, closed_form
from dpx.privacy.events import Release


@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget: FLOPs (6 M B S T), protected records and (epsilon, delta), and the grid on which noise is solved (`Calibration`)."""

    compute: float
    size: int
    epsilon: float
    delta: float
    coarse: float | None = None


@dataclasses.dataclass(frozen=True)
class Design:
    """One configuration, with noise solved exactly for the branch that needs less.

    Without a privacy budget `noise_multiplier` is 0 and the sampler is "none".
    """

    model: str
    parameters: float
    batch_size: int
    steps: int
    noise_multiplier: float
    sampler: str
    loss: float
    is_near: bool
    marks: tuple[str, ...]
    epochs: float
    tokens_per_parameter: float
    advantage: float
    profile: np.ndarray

    @property
    def noise_batch_ratio(self) -> float:
        """Returns the noise multiplier over the batch size."""
        return self.noise_multiplier / self.batch_size


EPSILONS = np.concatenate([[0.0], np.geomspace(1e-2, 30, 40)])


def best_of_each_model(surface: Surface, budget: Budget) -> tuple[list[Design], Candidates]:
    """Returns the best design of every trained model that fits the grid, lowest loss first, and all candidates.

    Raises `ConfigError` where none does.
    """
    calibration = Calibration(budget.epsilon, budget.delta, budget.coarse)
    asked = search(surface, calibration, budget)
    near = set(asked.near().tolist())
    designs = []
    for name, parameters in zip(surface.names, surface.parameters_M, strict=True):
        places = np.flatnonzero((asked.parameters == parameters) & np.isfinite(asked.loss))
        if len(places):
            place = int(places[np.argmin(asked.loss[places])])
            designs.append(_exact(surface, calibration, budget, asked, place, name, place in near))
    # Solved exactly, noise may lie outside the grid that it was interpolated into.
    designs = [design for design in designs if math.isfinite(design.loss)]
    require(
        bool(designs), f"epsilon={budget.epsilon:g}", "all designs within the budget are at the edge of the grid", "Measure a wider grid"
    )
    return sorted(designs, key=lambda design: design.loss), asked


def search(surface: Surface, calibration: Calibration, budget: Budget) -> Candidates:
    """Returns every trained model with every batch (whole powers of 2^(1/4)) at the budget.

    Raises `ConfigError` if no configuration has a loss. Without noise the batch is the measured one, since the effect of the batch alone on
    the loss was not measured.
    """
    batches = np.unique(np.round(2.0 ** np.arange(4, np.log2(budget.size) + 1e-9, 0.25)))
    batches = batches if math.isfinite(budget.epsilon) else np.array([surface.batch_size])
    asked = candidates(
        surface, calibration.ratio, compute=budget.compute, size=budget.size, parameters=surface.parameters_M, batch_sizes=batches
    )
    _ = asked.best
    return asked


def _exact(surface: Surface, calibration: Calibration, budget: Budget, asked: Candidates, place: int, name: str, is_near: bool) -> Design:
    batch, steps, parameters = int(asked.batch_size[place]), max(1, int(asked.steps[place])), float(asked.parameters[place])
    sigma, sampler, profile = 0.0, "none", np.ones_like(EPSILONS)
    if math.isfinite(budget.epsilon):
        solved = calibration.exact(budget.size, batch, steps)
        sigma, sampler = min(solved.poisson, solved.deterministic), solved.chosen
        profile = profile_of(budget.size, batch, steps, sigma, sampler)
    loss = surface.at(parameters, min(max(steps, surface.steps_T[0]), surface.steps_T[-1]), sigma / batch)
    marks = [f"at the {edge} of the grid: the optimum may lie beyond" for edge in asked.at_edge(surface, place)]
    if loss.is_extrapolated:
        marks.append(f"extrapolated beyond {surface.measured_steps:,.0f} steps")
    if loss.is_below_ratios:
        marks.append("less noise than was measured: the loss is an upper estimate")
    epochs = batch * steps / budget.size
    if epochs > 1:
        marks.append(f"{epochs:,.1f} epochs; the table of losses does not state the number of epochs of the measurements")
    tokens = batch * steps * surface.tokens / parameters
    return Design(
        name, parameters, batch, steps, sigma, sampler, float(loss.loss), is_near, tuple(marks), epochs, tokens, float(profile[0]), profile
    )


def profile_of(size: int, batch: int, steps: int, sigma: float, sampler: str) -> np.ndarray:
    """Returns delta at `EPSILONS` of what would run: the larger one of both directions, so that the profile is symmetric."""
    if sampler == "deterministic":
        mu = math.sqrt(math.ceil(steps * batch / size * (1 - 1e-12))) / sigma
        return np.array([closed_form.delta(mu, float(epsilon)) for epsilon in EPSILONS])
    composed = accounting.compose([(Release(noise_multiplier=sigma, sampling_probability=min(1.0, batch / size)), steps)], interval=1e-3)
    return np.array([composed.delta(float(epsilon)) for epsilon in EPSILONS])


def excess(design: Design, instead_of: Design) -> float:
    """Returns the excess vulnerability of `design`. Both profiles are symmetric, so the maximum is at an epsilon of 0 or more."""
    return excess_by_profiles(EPSILONS, instead_of.profile, design.profile)


def doubled(surface: Surface, budget: Budget) -> list[tuple[str, float | None]]:
    """Returns pairs of (what is doubled, the least loss then), the budget itself first.

    The loss is `None` if the grid does not contain it.
    """
    changed = {
        "nothing": budget,
        "data": dataclasses.replace(budget, size=2 * budget.size),
        "compute": dataclasses.replace(budget, compute=2 * budget.compute),
        "epsilon": dataclasses.replace(budget, epsilon=2 * budget.epsilon),
    }
    rows: list[tuple[str, float | None]] = []
    for name, one in changed.items():
        try:
            asked = search(surface, Calibration(one.epsilon, one.delta), one)
            loss = float(asked.loss[asked.best])
            # Compute need not be spent; where measured steps end, what twice as much leaves to choose from may be worse.
            known = rows[0][1] if name == "compute" else None
            rows.append((name, loss if known is None else min(loss, known)))
        except ConfigError:
            rows.append((name, None))
    return rows
