"""What must hold for every claim, by hypothesis, on one fixed grid and up to the error that grid is known to make."""

import math

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dpx.privacy import accounting, closed_form, solve
from dpx.privacy.accounting import compose
from dpx.privacy.events import Release

INTERVAL = 1e-3
# Twenty releases on a grid of 1e-3, and PLD's own rounding, together.
SLACK = {"pld": 2e-3, "rdp": 1e-9, "deterministic": 1e-6}

accountants = st.sampled_from(["pld", "rdp", "deterministic"])
rates = st.floats(1e-4, 1.0)
noises = st.floats(0.6, 8.0)
counts = st.integers(1, 200)
log_deltas = st.floats(-9, -3)
charges = st.lists(st.tuples(rates, noises, counts), min_size=1, max_size=3)
few = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def spent(parts, accountant, log_delta):
    listed = [(Release(noise_multiplier=sigma, sampling_probability=q), count) for q, sigma, count in parts]
    return compose(listed, accountant, interval=INTERVAL).epsilon(10**log_delta)


def not_above(low, high, accountant):
    slack = SLACK[accountant]
    assert low <= high * (1 + slack) + slack or math.isinf(high)


@few
@given(charges, accountants, log_deltas, st.floats(1.0, 3.0))
def test_more_noise_never_costs_more(parts, accountant, log_delta, factor):
    quieter = [(q, sigma * factor, count) for q, sigma, count in parts]
    not_above(spent(quieter, accountant, log_delta), spent(parts, accountant, log_delta), accountant)


@few
@given(charges, accountants, log_deltas, st.floats(0.1, 1.0))
def test_a_smaller_rate_never_costs_more(parts, accountant, log_delta, factor):
    rarer = [(q * factor, sigma, count) for q, sigma, count in parts]
    not_above(spent(rarer, accountant, log_delta), spent(parts, accountant, log_delta), accountant)


@few
@given(charges, accountants, log_deltas, st.integers(1, 100))
def test_more_steps_never_cost_less(parts, accountant, log_delta, more):
    longer = [(q, sigma, count + more) for q, sigma, count in parts]
    not_above(spent(parts, accountant, log_delta), spent(longer, accountant, log_delta), accountant)


@few
@given(charges, accountants, log_deltas, st.floats(0.0, 2.0))
def test_a_larger_delta_never_costs_more(parts, accountant, log_delta, more):
    not_above(spent(parts, accountant, log_delta + more), spent(parts, accountant, log_delta), accountant)


@few
@given(st.permutations([(0.01, 1.0, 50), (0.1, 3.0, 20), (1.0, 6.0, 5), (0.01, 2.0, 7)]), st.sampled_from(["pld", "rdp"]))
def test_order_does_not_matter(parts, accountant):
    assert spent(parts, accountant, -6) == spent(sorted(parts), accountant, -6)


@few
@given(rates, noises, counts, st.integers(1, 199), accountants)
@example(1.0, 1.0, 1, 1, "pld")
def test_splitting_a_run_does_not_matter(q, sigma, count, at, accountant):
    halves = [(q, sigma, min(at, count)), (q, sigma, count - min(at, count))]
    assert spent(halves, accountant, -6) == spent([(q, sigma, count)], accountant, -6)


@few
@given(st.lists(st.tuples(st.floats(1e-4, 0.2), st.integers(1, 50)), min_size=3, max_size=6), st.integers(1, 3))
def test_rounding_rates_up_never_lowers_epsilon_and_its_error_is_bounded(runs, buckets):
    listed = [(Release(noise_multiplier=1.0, sampling_probability=q), count) for q, count in runs]
    exact = compose(listed, "rdp").epsilon(1e-6)
    rounded = accounting.bucketed(listed, buckets)
    assert len(rounded) <= max(buckets, 1) and sum(count for _, count in rounded) == sum(count for _, count in listed)
    bound = compose(rounded, "rdp").epsilon(1e-6)
    assert exact * (1 - 1e-9) <= bound <= exact + accounting.rounding_error(listed, 1e-6, rates=buckets) + 1e-9


@pytest.mark.slow
@few
@given(st.floats(1e-3, 1.0), st.integers(1, 2000), st.floats(0.05, 20.0), st.floats(-9, -4))
def test_calibration_never_overshoots_and_is_within_a_thousandth(q, steps, target, log_delta):
    charges = [(Release(noise_multiplier=1.0, sampling_probability=q), steps)]
    sigma = solve.solve(charges, epsilon=target, delta=10**log_delta, accountant="rdp")
    assert compose(solve.scaled(charges, sigma), "rdp").epsilon(10**log_delta) <= target
    assert compose(solve.scaled(charges, sigma * 0.999), "rdp").epsilon(10**log_delta) > target


@few
@given(st.floats(0.05, 10.0), st.floats(-12, -2))
def test_the_closed_form_inverts_itself(mu, log_delta):
    epsilon = closed_form.epsilon(mu, 10**log_delta)
    assert closed_form.delta(mu, epsilon) <= 10**log_delta
    if epsilon > 0:
        assert closed_form.mu(epsilon, 10**log_delta) == pytest.approx(mu, rel=1e-6)


@pytest.mark.slow
@few
@given(st.floats(1e-4, 0.5), noises, counts, st.integers(2, 6))
def test_a_unit_of_rows_never_costs_less_than_a_row(q, sigma, count, rows):
    row = compose([(Release(noise_multiplier=sigma, sampling_probability=q), count)], interval=1e-2).epsilon(1e-6)
    group = Release(noise_multiplier=sigma, sampling_probability=q, kind="group", rows_per_unit=rows)
    not_above(row, compose([(group, count)], interval=1e-2).epsilon(1e-6) * 1.02, "pld")
