"""Parametric fits: coefficients are recovered where the data identifies them, and are reported as not identified where it does not."""

import numpy as np
import pytest

from dpx.declaration import ConfigError
from dpx_papers.scaling import parametric

TRUE = {"E": 1.5, "A": 60.0, "B": 80.0, "C": 2.0, "alpha": 0.45, "beta": 0.35, "gamma": 0.9, "alpha2": -0.04}


def points(deviation=0.0, n=(1e5, 1e6, 1e7), seed=0, form: parametric.Form = "L2"):
    m, examples, s = (found.ravel() for found in np.meshgrid([2e4, 1e5, 5e5, 2e6], n, 2.0 ** -np.arange(6, 18), indexing="ij"))
    truth = parametric.Fit(form, TRUE, 0.0, 1).loss(m, examples, s)
    return m, examples, s, truth * np.exp(deviation * np.random.default_rng(seed).normal(size=len(m)))


def test_the_gradient_is_the_objectives():
    for form in ("L1", "L2"):
        terms = parametric._Terms(form, *points(0.01), 1e-3)
        x = terms.starts(1, np.random.default_rng(3))[0]
        _, gradient = terms.huber_loss(x)
        moved = [(terms.huber_loss(x + d)[0] - terms.huber_loss(x - d)[0]) / 2e-6 for d in 1e-6 * np.eye(len(x))]
        assert gradient == pytest.approx(moved, rel=1e-3, abs=1e-4)


def test_coefficients_are_found_again():
    found = parametric.fit("L2", *points(), starts=6)
    assert {name: found.coefficients[name] for name in ("E", "alpha", "beta", "gamma", "alpha2")} == pytest.approx(
        {name: TRUE[name] for name in ("E", "alpha", "beta", "gamma", "alpha2")}, rel=0.03, abs=3e-3
    )
    assert found.loss(*points()[:3]) == pytest.approx(points()[3], rel=1e-3)


def test_the_second_form_fits_its_own_data_better_than_the_first():
    first, second = (parametric.fit(form, *points(0.002), starts=4).huber_loss for form in ("L1", "L2"))
    assert second < first / 2


def test_an_exponent_of_examples_is_not_identified_where_they_hardly_vary():
    """As in the paper, whose filter leaves N within a factor of 1.28 and whose beta is 12.87."""
    narrow, wide = points(0.01, n=(1.0e6, 1.28e6), form="L1"), points(0.001, form="L1")
    found = [parametric.bootstrap("L1", *data, np.arange(len(data[0])) // 2, samples=4, starts=2) for data in (narrow, wide)]
    assert [one["beta"].is_identified for one in found] == [False, True]


@pytest.mark.parametrize(("low", "high", "is_identified"), [(0.9, 1.1, True), (0.1, 9.0, False), (1.1, 1.2, False), (1.0, 1.0, False)])
def test_an_interval_without_its_value_or_without_width_identifies_nothing(low, high, is_identified):
    """All bootstrap samples of one run are equal: an interval of width 0 does not mean certainty."""
    assert parametric.Interval(1.0, low, high).is_identified is is_identified


def test_fewer_points_than_coefficients_are_refused():
    m, n, s, loss = points()
    with pytest.raises(ConfigError, match="coefficients"):
        parametric.fit("L2", m[:8], n[:8], s[:8], loss[:8])


def test_the_optimum_of_the_fit_grows_with_compute():
    fit = parametric.Fit("L2", TRUE, 0.0, 1)
    found = [parametric.optimal_parameters(fit, compute, 2**-12, 32.0, 1e3, 1e9) for compute in (1e13, 1e15)]
    assert found[1] > 3 * found[0]
