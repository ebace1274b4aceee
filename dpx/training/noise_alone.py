"""Simulates how far noise alone moves parameters: the run's optimiser and its schedules, on gradients that are noise.

No number of it depends on a run's data or secret: the noise has a fixed public seed, and only its standard deviation is that of the run.
A few coordinates of each parameter are simulated. That is right for an optimiser whose update of a coordinate reads that coordinate
alone (`is_coordinatewise`), as Adam's and SGD's do; a sum over all coordinates then has the mean and the variance of the sample.

T: steps, m: simulated coordinates of a parameter.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.init.weights import Leaves, by_path, nested
from dpx.optimizer import Adam, Optimizer
from dpx.optimizer.arguments import decay_mask
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
    probes = {name: np.stack([_probe(start[path], m) for path in paths]) for name, paths in alike.items() if paths}
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


def _probe(leaf: np.ndarray, m: int) -> np.ndarray:
    """Returns the starting values of `m` coordinates at equal distances; a small parameter's coordinates are taken several times."""
    places = np.arange(m) * leaf.size // m if leaf.size > m else np.arange(m) % leaf.size
    return np.ravel(leaf)[places].astype(np.float32)
