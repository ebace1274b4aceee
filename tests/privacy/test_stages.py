"""The stages that a user's own loop accounts for: pairs (q, steps), and what is answered to anything else."""

import inspect
from typing import Any

import numpy as np
import pytest

from dpx.declaration import ConfigError
from dpx.privacy import accounting

# Epsilon and the noise multiplier both begin with it; without the check of types that the tests add to every function.
CHARGES: Any = inspect.unwrap(accounting.charges_of)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((0.01, 1000), r"^stages: 0.01: is not a pair \(q, steps\). Give a list of pairs, such as \[\(0.01, 1000\)\]\.$"),
        ([0.01, 1000], r"^stages: 0.01: is not a pair"),
        (0.01, r"^stages=0.01: is not a list of pairs"),
        ("0.01", r"^stages: '0': is not a pair"),
        ([(0.01, 1000, 1.0)], r"^stages: \(0.01, 1000, 1.0\): is not a pair"),
        ([()], r"^stages: \(\): is not a pair"),
        ([(0.01, True)], r"^stages: \(0.01, True\): is not a pair"),
        # Cut to whole steps, they would lower epsilon.
        ([(0.01, 999.9)], r"^steps=999.9: is not a whole number"),
        ([(0.01, float("nan"))], r"^steps=nan: is not a whole number"),
        ([(0.01, -1)], r"^steps=-1: is not a whole number"),
        ([(1000, 0.01)], r"^steps=0.01: is not a whole number"),
    ],
)
def test_anything_but_pairs_is_refused_in_one_line(stages: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CHARGES(stages, 1.0)


def test_pairs_of_numpy_are_pairs() -> None:
    expected = CHARGES([(0.25, 100)], 1.0)
    for stages in (np.array([[0.25, 100]]), [[np.float64(0.25), np.int64(100)]], iter([(0.25, 100.0)])):
        assert CHARGES(stages, 1.0) == expected


def test_a_noise_multiplier_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^noise_multiplier='1': is not one number\. Give the noise multiplier\.$"):
        CHARGES([(0.25, 100)], "1")
