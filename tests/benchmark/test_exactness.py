"""What a benchmark calls exact."""

import math

import numpy as np

from dpx.training.exactness import error


def test_a_sum_that_is_no_number_anywhere_is_not_exact() -> None:
    expected = {"a": np.ones(2), "b": np.ones(3)}
    assert error({"a": np.array([1.0, 1.5]), "b": np.ones(3)}, expected) == 0.5
    for name in expected:
        assert math.isnan(error(expected | {name: np.full_like(expected[name], math.nan)}, expected))
