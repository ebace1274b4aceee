"""Compares what a run trained with where it began, and with how far its noise alone would have moved it.

The squared norm of a change by noise alone is a sum over n coordinates. With mean e and variance v of one coordinate, estimated by m
simulated ones (`noise_alone`), it is compared with a gamma distribution of mean n e and variance n v (1 + n / m) plus a share for
rounding (`ROUNDING`). For SGD without decay this is the chi-squared distribution of Gaussian noise.

The initial values of trained parameters are known as far as they follow from public data: weights of a public file, weights that another
run released, and values that no random number decides, such as zeros. Values that were drawn from the run's secret are not known.

How far noise alone moves parameters is simulated: the run's optimiser and its schedules, on gradients that are noise. No number of it
depends on a run's data or secret: the noise has a fixed public seed, and only its standard deviation is that of the run. A few coordinates
of each parameter are simulated. That is right for an optimiser whose update of a coordinate reads that coordinate alone
(`is_coordinatewise`), as Adam's and SGD's do; a sum over all coordinates then has the mean and the variance of the sample.

T: steps, m: simulated coordinates of a parameter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.interpreters import partial_eval
from scipy.special import gammainc, gammaincc, gammainccinv

from dpx.config.declared_init import FromCheckpoint, FromFile, FromRun, Init
from dpx.config.experiment_parts import Receiver
from dpx.data.tokenizer import SpecialIds
from dpx.declaration import ConfigError
from dpx.files.weights import Leaves, by_path, checksum, nested, read_file
from dpx.init.parent import open_parent, parameters_of
from dpx.init.start import ADAPTERS, taken_from
from dpx.interop.checkpoint import Checkpoint
from dpx.optimizer import Adam, Optimizer
from dpx.optimizer.from_optax import decay_mask
from dpx.privacy.origins import ReleasedOrigin
from dpx.task.objective import objective as make_objective
from dpx.training import frozen
from dpx.training.update import Update, make_update

# Any constant: the same run must give the same numbers.
_SEED = 42
MOST_COORDINATES = 4096
LEAST_COORDINATES = 64
# Draws of a simulation, which take about a second.
_DRAWS = 40_000_000
_LAYERS = "layers/"


class Moment(NamedTuple):
    """Mean and variance of the squared change of one coordinate, and the number of coordinates that were simulated."""

    mean: float
    variance: float
    coordinates: int


def is_coordinatewise(optimizer: Optimizer) -> bool:
    """Returns whether an optimiser updates each coordinate by its own values alone: it does so for a part of some parameters.

    LAMB, which divides by norms, and Adafactor, which keeps moments of rows and columns, do not.
    """
    if isinstance(optimizer, Adam):
        return True
    draws = np.random.default_rng(_SEED)
    # Optax keeps moments of rows and columns only for matrices of at least 128 rows.
    shapes = {"layers/dense/kernel": (2, 128, 128), "head/kernel": (128, 128), "head/bias": (128,)}
    start, *gradients = ({path: draws.normal(size=shape).astype(np.float32) for path, shape in shapes.items()} for _ in range(3))

    update = make_update(optimizer)
    whole = _half(_moved(update, start, gradients))
    of_part = _moved(update, _half(start), [_half(one) for one in gradients])
    return all(np.allclose(whole[path], of_part[path], rtol=1e-5, atol=1e-6) for path in shapes)


def _half(leaves: Leaves) -> Leaves:
    """Returns every second coordinate of each parameter, and of each layer of a stack."""
    return {path: leaf.reshape(len(leaf), -1)[:, ::2] if path.startswith(_LAYERS) else leaf.ravel()[::2] for path, leaf in leaves.items()}


def _moved(update: Update, start: Leaves, gradients: list[Leaves]) -> Leaves:
    params = jax.tree.map(jnp.asarray, nested(start))
    moments = update.init(params)
    for gradient in gradients:
        params, moments = update.apply(params, moments, nested(gradient), jnp.float32(0.1))
    return by_path(params)


def moments(optimizer: Optimizer, start: Leaves, deviation_T: np.ndarray, rate_T: np.ndarray) -> dict[str, Moment]:
    """Simulates a run on noise alone.

    Args:
        optimizer: The optimiser, which must be coordinatewise.
        start: The values that each parameter began with.
        deviation_T: Standard deviation of the noise in each step's gradient.
        rate_T: Learning rate of each step.

    Returns:
        The moments of each parameter's squared change, by path.
    """
    m = int(np.clip(_DRAWS // (len(deviation_T) * len(start)), LEAST_COORDINATES, MOST_COORDINATES))
    # One array for all parameters that are updated alike, which compiles faster.
    is_decayed = by_path(decay_mask(nested(start)))
    alike = {name: [path for path in start if bool(is_decayed[path]) is (name == "kernel")] for name in ("kernel", "bias")}

    def probe(leaf: np.ndarray) -> np.ndarray:
        # Coordinates at equal distances; those of a small parameter are taken several times.
        places = np.arange(m) * leaf.size // m if leaf.size > m else np.arange(m) % leaf.size
        return np.ravel(leaf)[places].astype(np.float32)

    probes = {name: np.stack([probe(start[path]) for path in paths]) for name, paths in alike.items() if paths}
    squares = _squares(make_update(optimizer), probes, np.float32(deviation_T), np.float32(rate_T))
    rows = {path: np.float64(row_m) for name in probes for path, row_m in zip(alike[name], squares[name], strict=True)}
    return {path: Moment(float(row_m.mean()), float(row_m.var(ddof=1)), m) for path, row_m in rows.items()}


@partial(jax.jit, static_argnums=0)
def _squares(update: Update, probes: dict[str, Any], deviation_T: Any, rate_T: Any) -> dict[str, Any]:
    """Returns the squared changes of arrays by name, after steps whose gradients are noise."""

    def step(carried: Any, of_step: Any) -> tuple[Any, None]:
        (params, state), (keys, deviation, rate) = carried, of_step
        gradient = {name: jax.random.normal(key, leaf.shape) * deviation for key, (name, leaf) in zip(keys, params.items(), strict=True)}
        return update.apply(params, state, gradient, rate), None

    keys = jax.random.split(jax.random.key(_SEED), (len(deviation_T), len(probes)))
    (params, _), _ = jax.lax.scan(step, (probes, update.init(probes)), (keys, deviation_T, rate_T))
    return jax.tree.map(lambda end, begun: jnp.square(end - begun), params, probes)


# The probability with which noise alone would be taken for a change by the data, over all comparisons of a run.
CHANCE = 1e-3
# The relative deviation of a squared norm that rounding alone may give.
ROUNDING = 1e-3

Verdict = Literal["unmoved", "within", "less", "moved"]
_SENTENCES = {
    "unmoved": "WARNING: the released weights are the weights that the run began with, so it changed nothing",
    "within": "Inconclusive: a change by the data of this size or less is hidden by the noise; held-out rows show whether the run learnt",
    "less": "The change is smaller than noise alone gives, so gradients of the data opposed it; held-out rows show whether the run learnt",
    "moved": "The change is larger than noise alone gives; whether it is an improvement, held-out rows show",
}


class NotCompared(ConfigError):
    """Says why a change cannot be compared with noise alone; without a path of this machine, since it is released."""

    def __init__(self, value: str, reason: str, fix: str = "Nothing else depends on this comparison"):
        super().__init__(value, reason, fix)


@dataclass(frozen=True)
class Compared:
    """The change of some parameters beside the change that noise alone gives.

    Attributes:
        parameter: Its path, or what the row is about.
        numbers: Number of coordinates.
        change: Norm of the difference between released and initial values.
        noise_alone: Root of the mean squared norm of that difference under noise alone.
        above: Probability that noise alone gives at least this norm.
        below: Probability that noise alone gives at most this norm.
        shape: Shape of the gamma distribution of the squared norm under noise alone; infinite without variance.
    """

    parameter: str
    numbers: int
    change: float
    noise_alone: float
    above: float
    below: float
    shape: float = float("inf")

    @property
    def ratio(self) -> float | None:
        return self.change / self.noise_alone if self.noise_alone else None


@dataclass(frozen=True)
class Change:
    """What a run changed: of each compared parameter, of all of them together, and the trained numbers in all, compared or not."""

    parts: tuple[Compared, ...]
    whole: Compared
    trained: int

    @property
    def verdict(self) -> Verdict:
        """Whether the change, of all parameters or of any one, is larger than noise alone gives at the probability `CHANCE`."""
        every = (*self.parts, self.whole)
        if self.whole.change == 0:
            return "unmoved"
        if min(one.above for one in every) * len(every) < CHANCE:
            return "moved"
        return "less" if self.whole.below < CHANCE else "within"

    def sentence(self) -> str:
        """Returns what a user reads, on one line: the norms, what they show, and the smallest change that the test sees."""
        whole, ratio = self.whole, "" if self.whole.ratio is None else f", {self.whole.ratio:.4g} times as much"
        of = f"{whole.numbers:,} of {self.trained:,} trained numbers"
        line = f"What training changed: {of} by the norm {whole.change:.4g}, where noise alone gives {whole.noise_alone:.4g}{ratio}"
        if whole.numbers < self.trained:
            line += " (the others were drawn from the run's secret, so where they began is not known)"
        power = ""
        if whole.noise_alone and whole.shape != float("inf") and self.verdict != "unmoved":
            # The ratio to noise alone from which the test calls a norm larger.
            seen = float(gammainccinv(whole.shape, CHANCE / (len(self.parts) + 1)) / whole.shape) ** 0.5
            power = f" The test sees changes from {seen:.4g} times that of noise alone on."
        return f"{line}. {_SENTENCES[self.verdict]}.{power}"

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of a table, by column."""
        return [
            {
                "parameter": one.parameter,
                "numbers": one.numbers,
                "norm_of_change": one.change,
                "norm_by_noise_alone": one.noise_alone,
                "ratio": one.ratio,
                "chance_by_noise_alone": one.above,
            }
            for one in (*self.parts, self.whole)
        ]


def compare(begun: Leaves, ended: Leaves, moments: Mapping[str, Moment]) -> Change:
    """Returns the change of every trained parameter whose initial values are known.

    Args:
        begun: The known initial values, by path.
        ended: The released values of all trained parameters, by path.
        moments: The moments of a coordinate's squared change by noise alone, by path.

    Raises:
        NotCompared: If training or noise alone leads to values that are not finite.
    """
    parts = {path: _Sum.of(begun[path], ended[path], moments[path]) for path in sorted(begun)}
    whole = _Sum(*map(sum, zip(*parts.values(), strict=True)))
    compared = tuple(part.compared(path) for path, part in parts.items())
    return Change(compared, whole.compared("all of these"), sum(leaf.size for leaf in ended.values()))


class _Sum(NamedTuple):
    """Squared norm of a change, with its mean and variance under noise alone."""

    numbers: int
    squared: float
    mean: float
    variance: float

    @classmethod
    def of(cls, begun: np.ndarray, ended: np.ndarray, moment: Moment) -> "_Sum":
        difference = ended.astype(np.float64) - begun.astype(np.float64)
        # The mean is known from a sample only, whose error is common to all coordinates.
        variance = begun.size * moment.variance * (1 + begun.size / moment.coordinates)
        return cls(begun.size, float(np.square(difference).sum()), begun.size * moment.mean, variance)

    def compared(self, parameter: str) -> Compared:
        if not np.isfinite([self.squared, self.mean, self.variance]).all():
            raise NotCompared(parameter, "training, or noise alone, leads to values that are not finite")
        # After one step of Adam all coordinates moved alike, up to rounding, which the sample's variance does not show.
        variance = self.variance + (ROUNDING * self.mean) ** 2
        above, below, shape = float(self.squared == 0), 1.0, float("inf")
        if variance > 0:
            shape = self.mean**2 / variance
            place = self.squared * self.mean / variance
            above, below = float(gammaincc(shape, place)), float(gammainc(shape, place))
        return Compared(parameter, self.numbers, self.squared**0.5, self.mean**0.5, above, below, shape)


def known_start(init: Init, receiver: Receiver, origins: Sequence[ReleasedOrigin]) -> Leaves:
    """Returns, by path, the initial values of trained parameters that do not depend on the run's secret.

    `origins` are in the run's statement. Raises `NotCompared` if the weights that the run began from are missing or changed, or were never
    released.
    """
    start = None
    if origins:
        start = nested(_loaded(init, receiver, origins[0]))
    # Marks decide how rows become batches, and no initial value.
    objective = make_objective(receiver.model, receiver.task, receiver.vocabulary_size, SpecialIds(*range(5)))

    def drawn(key: Any, start: Any) -> dict[str, Any]:
        return flatten_dict(frozen.draw(receiver.train, objective, key, start)[0], sep="/")

    # The outputs of the traced program that do not read its key. Only these are computed: no random number is drawn.
    closed, shapes = jax.make_jaxpr(drawn, return_shape=True)(jax.ShapeDtypeStruct((2,), jnp.uint32), start)
    outputs = range(len(closed.jaxpr.outvars))
    reads_key = [partial_eval.dce_jaxpr(closed.jaxpr, [other == one for other in outputs])[1][0] for one in outputs]
    known = [path for path, is_read in zip(sorted(shapes), reads_key, strict=True) if not is_read]
    values = jax.jit(lambda start: {path: leaf for path, leaf in drawn(jnp.zeros(2, jnp.uint32), start).items() if path in known})
    return {path: np.asarray(leaf) for path, leaf in values(start).items()}


def _loaded(init: Init, receiver: Receiver, origin: ReleasedOrigin) -> Leaves:
    """Returns the weights that a run began from. Raises `NotCompared` for others than the origin in its statement describes."""
    value = f"init={init.kind}"
    # A fork declares random parameters.
    if init.is_random or (isinstance(init, FromRun) and init.step is not None):
        raise NotCompared(value, "the run began from a checkpoint of another run, which is not released")
    try:
        leaves = _read(init, receiver)
    except ConfigError as error:
        raise NotCompared(value, "the weights that the run began from cannot be read", str(error)) from error
    if not origin.weights:
        raise NotCompared(value, "the statement holds no checksum of weights of unknown provenance", "Vouch with init.provenance=public")
    if checksum(leaves) != origin.weights:
        raise NotCompared(value, "other weights are now in the place of the run's first ones", "Restore them")
    return leaves


def _read(init: Init, receiver: Receiver) -> Leaves:
    if isinstance(init, FromFile):
        return read_file(Path(init.file))
    if isinstance(init, FromCheckpoint):
        checkpoint = Checkpoint(init.path)
        return checkpoint.leaves(checkpoint.select(receiver.shapes, receiver.model))
    assert isinstance(init, FromRun)
    parent = open_parent(init, f"init.run={init.run}")
    taken = taken_from(parent, receiver)
    return {path: leaf for path, leaf in parameters_of(parent, receiver.train).items() if path in taken or path.startswith(ADAPTERS)}
