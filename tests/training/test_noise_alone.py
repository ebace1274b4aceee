"""Simulated noise moves parameters as its closed form says, and as the run's own update does."""

import numpy as np
import pytest

from dpx.optimizer import Adam, Optax
from dpx.training.change_measured import MOST_COORDINATES, compare, is_coordinatewise, moments

STEPS = 30
DEVIATIONS = np.linspace(0.5, 2.0, STEPS)
RATES = np.linspace(0.1, 0.01, STEPS)
START = {"layers/dense/kernel": np.zeros((2, 50, 70), np.float32), "head/bias": np.zeros(3, np.float32)}


def _require_near(found, mean: float, variance: float) -> None:
    """Within five deviations of a sample's mean, and a tenth of the variance of squares."""
    assert found.coordinates == MOST_COORDINATES
    assert abs(found.mean - mean) < 5 * (variance / found.coordinates) ** 0.5
    assert found.variance == pytest.approx(variance, rel=0.15)


def test_sgd_has_the_closed_form():
    square = float(np.sum((RATES * DEVIATIONS) ** 2))
    for found in moments(Optax(name="sgd"), START, DEVIATIONS, RATES).values():
        _require_near(found, square, 2 * square**2)


def test_momentum_has_the_closed_form():
    """The noise of step s moves the parameters at each later step by a power of the momentum."""
    weights = [sum(RATES[t] * 0.9 ** (t - s) for t in range(s, STEPS)) for s in range(STEPS)]
    square = float(np.sum((np.array(weights) * DEVIATIONS) ** 2))
    found = moments(Optax(name="sgd", arguments={"momentum": 0.9}), START, DEVIATIONS, RATES)
    _require_near(found["layers/dense/kernel"], square, 2 * square**2)


def test_decay_moves_what_did_not_begin_at_zero():
    adam = Adam(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    start = {"head/kernel": np.full((80, 80), 5, np.float32), "head/bias": np.full(6400, 5, np.float32)}
    found = moments(adam, start, np.full(STEPS, 1e-12), RATES)
    decayed = 5 - 5 * float(np.prod(1 - 0.1 * RATES))
    assert found["head/kernel"].mean == pytest.approx(decayed**2, rel=0.02)
    # Biases do not decay, and noise far below eps moves nothing.
    assert found["head/bias"].mean < 1e-6


def test_adam_does_not_depend_on_the_scale_of_noise():
    adam = Adam(beta1=0.9, beta2=0.99, eps=1e-12, weight_decay=0.0)
    one, other = (moments(adam, START, scale * np.ones(STEPS), RATES)["head/bias"].mean for scale in (1e-3, 10.0))
    assert one == pytest.approx(other, rel=1e-3)


def test_after_one_step_of_adam_rounding_is_no_change_by_the_data():
    """Every number moves by the learning rate, whatever the gradient was, so that the simulated spread is that of rounding."""
    adam = Adam(beta1=0.9, beta2=0.99, eps=1e-11, weight_decay=0.0)
    found = moments(adam, START, np.ones(1), np.full(1, 0.1))
    for scale, verdict in ((1 - 1e-6, "within"), (1 + 1e-6, "within"), (1.01, "moved"), (0.99, "less"), (0.0, "unmoved")):
        ended = {path: np.full(leaf.shape, scale * 0.1, np.float32) for path, leaf in START.items()}
        assert compare(START, ended, found).verdict == verdict, scale


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", True),
        ("adamw", True),
        ("adafactor", False),
        # tests/interop/test_change.py has `lamb`.
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("lion", True), ("rmsprop", True), ("lamb", False))),
    ],
)
def test_optimisers_that_read_whole_arrays_are_told_apart(name: str, expected: bool):
    assert is_coordinatewise(Optax(name=name)) is expected
