"""Designs runs for a budget: configurations that can be run, ranked by loss, and the gain from twice the data, compute or epsilon.

A design is the best configuration of (compute, epsilon, data, delta) among all models, batches and numbers of steps of that cost. Losses
come from a surface that was measured at one physical batch. It is assumed that another batch of equal noise-batch ratio reaches the same
loss, as McKenna et al. 2025 do, although smaller batches are lower in their Figure 7. Configurations are trained models with whole numbers.

The noise-batch ratio, the noise multiplier over the batch size, is the smaller of two branches (McKenna et al. 2025, appendix B.1). One is
Poisson sampling with amplification. In the other, batches are deterministic: a record takes part at most ceil(T B / N) times, and the noise
is that of one Gaussian release times the root of this number. Poisson noise depends on (q, T) alone at one (epsilon, delta). It is solved
by PLD, to 1 %, on the nodes of a coarse grid, kept on disk, and interpolated between them on logarithms for a search; a configuration that
is chosen is solved exactly (`exact`).

What equal (epsilon, delta) hides is the excess vulnerability of using M~ instead of M (Kaissis et al. 2024; McKenna et al. 2025,
appendix D): max over eps in R of (delta~(eps) - delta(eps)) / (1 + e^eps), of their privacy profiles delta.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpx.cost.surface import Surface
from dpx.declaration import ConfigError, require
from dpx.privacy import accounting, closed_form, solve
from dpx.privacy.accounting import Real
from dpx.privacy.events import Release


@dataclass(frozen=True)
class NoiseBatchRatio:
    """The noise of both branches; `chosen` is the branch with less noise, and the sampler that a run must use with it."""

    batch_size: Real
    poisson: float
    deterministic: float
    participations: int

    @property
    def chosen(self) -> str:
        """Returns the name of the branch with less noise."""
        return "poisson" if self.poisson <= self.deterministic else "deterministic"

    @property
    def ratio(self) -> float:
        """Returns the smaller noise multiplier over the batch size."""
        return min(self.poisson, self.deterministic) / self.batch_size


def noise_batch_ratio(
    size: Real,
    batch_size: Real,
    steps: int,
    *,
    epsilon: Real,
    delta: float,
    interval: float | None = None,
    coarse: float | None = None,
) -> NoiseBatchRatio:
    """Returns the smallest noise over batch size for (epsilon, delta) under zero_out, by PLD.

    `interval` and `coarse` have the same meaning as in `dpx.privacy.solve.solve`.
    """
    release = Release(noise_multiplier=1.0, sampling_probability=min(1.0, batch_size / size))
    poisson = solve.solve([(release, steps)], epsilon=epsilon, delta=delta, interval=interval, coarse=coarse)
    participations = math.ceil(steps * batch_size / size)
    deterministic = math.sqrt(participations) / closed_form.mu(epsilon, delta)
    return NoiseBatchRatio(batch_size, poisson, deterministic, participations)


# Nodes in a decade of q and of T.
NODES_A_DECADE = 2


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Noise-batch ratios at one (epsilon, delta). An `epsilon` of inf means no noise: a ratio of 0 by the branch "none".

    `coarse` is the width of the grid on which a chosen configuration is solved, as in `dpx.privacy.solve.solve`. With `poisson_alone` the
    ratios are those of Poisson sampling, although fixed batches may need less noise.
    """

    epsilon: float | int
    delta: float
    coarse: float | None = None
    poisson_alone: bool = False

    def __post_init__(self) -> None:
        require(
            self.epsilon > 0, f"epsilon={self.epsilon}", "a privacy budget must be positive", "Give a value above 0, or inf for no noise"
        )
        require(0 < self.delta < 1, f"delta={self.delta}", "delta is a probability above 0 and below 1", "Give a value between 0 and 1")

    def ratio(self, size: np.ndarray, batch_size: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ratio, whether fixed batches need less noise than Poisson sampling), broadcast.

        The ratio is NaN if a batch is larger than the data.
        """
        n, b, t = np.broadcast_arrays(*(np.asarray(value, float) for value in (size, batch_size, steps)))
        if math.isinf(self.epsilon):
            return np.zeros(n.shape), np.zeros(n.shape, bool)
        q = np.minimum(b / n, 1.0)
        is_possible = b <= n
        poisson = np.full(n.shape, np.nan)
        poisson[is_possible] = self._poisson(q[is_possible], t[is_possible])
        uses = np.ceil(t * b / n * (1 - 1e-12))
        fixed = np.full(n.shape, np.inf) if self.poisson_alone else np.sqrt(uses) / closed_form.mu(self.epsilon, self.delta)
        return np.where(is_possible, np.minimum(poisson, fixed) / b, np.nan), is_possible & (fixed < poisson)

    def exact(self, size: float | int, batch_size: float | int, steps: int) -> NoiseBatchRatio:
        """Returns the ratio of one setting, with both branches solved exactly instead of interpolated."""
        return noise_batch_ratio(size, batch_size, steps, epsilon=self.epsilon, delta=self.delta, coarse=self.coarse)

    def _poisson(self, q: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Returns noise multipliers, interpolated between solved nodes.

        The quotient of solved and central-limit noise is interpolated bilinearly on logarithms; no node lies beyond q = 1.
        """
        if not q.size:
            return np.zeros(0)
        x, y = np.log10(q) * NODES_A_DECADE, np.log10(steps) * NODES_A_DECADE
        out = np.zeros(q.shape)
        low_x, low_y = np.minimum(np.floor(x), -1), np.floor(y)
        for dx in (0, 1):
            for dy in (0, 1):
                weight = np.abs(1 - dx - (x - low_x)) * np.abs(1 - dy - (y - low_y))
                out += weight * _nodes(low_x + dx, low_y + dy, self.epsilon, self.delta)
        return np.exp(out) * _central_limit(q, steps, self.epsilon, self.delta)


def _central_limit(q: np.ndarray, steps: np.ndarray, epsilon: float | int, delta: float) -> np.ndarray:
    """Returns noise by the central limit of Gaussian DP, mu = q sqrt(T (e^(1 / sigma^2) - 1)) (Bu et al. 2020).

    It is not a bound, but its ratio to the solved noise hardly varies, so that little is lost between nodes.
    """
    return 1 / np.sqrt(np.log1p(closed_form.mu(epsilon, delta) ** 2 / (q**2 * steps)))


def _nodes(x: np.ndarray, y: np.ndarray, epsilon: float | int, delta: float) -> np.ndarray:
    """Returns the logarithm of the solved noise multiplier over the central-limit one at each node."""
    pairs, where = np.unique(np.stack([x, y], axis=-1).reshape(-1, 2), axis=0, return_inverse=True)
    solved, near = _solved(epsilon, delta), 0.0
    for at in pairs.tolist():
        pair = (at[0], at[1])
        if pair not in solved:
            q, steps = min(1.0, 10 ** (at[0] / NODES_A_DECADE)), max(1, round(10 ** (at[1] / NODES_A_DECADE)))
            limit = float(_central_limit(np.array([q]), np.array([steps]), epsilon, delta)[0])
            charges = [(Release(noise_multiplier=1.0, sampling_probability=q), steps)]
            # The search starts from the neighbour's.
            solved[pair] = math.log(solve.nearly(charges, epsilon=epsilon, delta=delta, start=limit * math.exp(near)) / limit)
        near = solved[pair]
    return np.array([solved[x, y] for x, y in pairs.tolist()])[where.reshape(x.shape)]


@functools.cache
def _solved(epsilon: float | int, delta: float) -> dict[tuple[float, float], float]:
    """Returns the dict of the nodes that this process has solved, by their position."""
    return {}


# (size, batch_size, steps) -> (ratio, is_fixed), as `dpx.cost.designs.Calibration.ratio`.
Ratio = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
NEAR = 0.01
MODELS = 50
FLOPS_A_TOKEN = 6


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Configurations of one compute budget, as arrays of one length; `loss` is NaN outside the grid."""

    compute: float
    size: float
    parameters: np.ndarray
    batch_size: np.ndarray
    steps: np.ndarray
    ratio: np.ndarray
    loss: np.ndarray
    is_extrapolated: np.ndarray
    is_below_ratios: np.ndarray

    @property
    def best(self) -> int:
        """Returns the configuration with the least loss; raises `ConfigError` where no configuration is inside the grid."""
        require(
            bool(np.isfinite(self.loss).any()),
            f"compute={self.compute:g}, size={self.size:g}",
            "no configuration with these values is inside the measured grid",
            "Measure a wider grid, or ask for compute and noise inside the grid",
        )
        return int(np.nanargmin(self.loss))

    def near(self, tolerance: float = NEAR) -> np.ndarray:
        """Returns the indices of configurations within `tolerance` of the least loss, by loss."""
        limit = (1 + tolerance) * self.loss[self.best]
        places = np.flatnonzero(np.nan_to_num(self.loss, nan=np.inf) <= limit)
        return places[np.argsort(self.loss[places], kind="stable")]

    def at_edge(self, surface: Surface, place: int) -> tuple[str, ...]:
        """Returns the ends of the grid at which the configuration lies. An optimum there is censored: the true one may lie beyond."""
        edges = []
        for name, value, nodes in (
            ("model", self.parameters[place], surface.parameters_M),
            ("steps", self.steps[place], surface.steps_T),
            ("ratio", self.ratio[place], surface.ratios_R),
        ):
            if value == 0:
                continue
            if value <= nodes[0] * 1.001:
                edges.append(f"smallest {name}")
            if value >= nodes[-1] / 1.001:
                edges.append(f"largest {name}")
        return tuple(edges)


def candidates(
    surface: Surface,
    ratio: Ratio,
    *,
    compute: float | int,
    size: float | int,
    parameters: Sequence[float] | np.ndarray | None = None,
    batch_sizes: Sequence[float] | np.ndarray | None = None,
) -> Candidates:
    """Returns every model with every batch at the compute budget, T = C / (6 M B S).

    By default models are `MODELS` inside the trained range, and batches powers of 2^(1/4) up to `size`. Configurations outside the grid
    stay in the table, marked and without a loss.
    """
    require(compute > 0 and size >= 1, f"compute={compute:g}, size={size:g}", "compute and size must be positive", "Give positive values")
    models = (
        np.geomspace(surface.parameters_M[0], surface.parameters_M[-1], MODELS) if parameters is None else np.asarray(parameters, float)
    )
    batches = 2.0 ** np.arange(0, np.log2(size), 0.25) if batch_sizes is None else np.asarray(batch_sizes, float)
    m, b = (axis.ravel() for axis in np.meshgrid(models, batches, indexing="ij"))
    t = compute / (FLOPS_A_TOKEN * m * b * surface.tokens)
    # Noise is solved for only where there can be a loss.
    is_inside = (t >= surface.steps_T[0]) & (t <= surface.steps_T[-1]) & (b <= size)
    m, b, t = m[is_inside], b[is_inside], t[is_inside]
    sigma, _ = ratio(np.full(m.shape, float(size)), b, t)
    predicted = surface.at(m, t, sigma)
    return Candidates(float(compute), float(size), m, b, t, sigma, predicted.loss, predicted.is_extrapolated, predicted.is_below_ratios)


def excess_by_profiles(epsilons: np.ndarray, deltas: np.ndarray, other: np.ndarray) -> float:
    """Computes the excess from both profiles at the same epsilons, which span R."""
    return max(0.0, float(((other - deltas) / (1 + np.exp(np.minimum(epsilons, 700)))).max()))


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
