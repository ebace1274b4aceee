"""The grid of losses: epsilon within 1 % of a fine grid at any noise, never below the truth, and bounded in points.

`python -m pytest -n0 -q -s tests/privacy/test_loss_grid.py` prints what `experiments/LOG.md` shows.
"""

import random

import pytest
from dp_accounting.pld import privacy_loss_distribution as losses

import dpx.privacy
from dpx.declaration import ConfigError
from dpx.privacy import accounting, closed_form, loss_grid, solve
from dpx.privacy.events import Release

Q, STEPS, DELTA, TARGET = 1e-3, 1000, 1e-6, 0.01
# Smallest noise multiplier for the setting above, bracketed from both sides by `test_the_needed_noise_is_known_from_both_sides`.
NEEDED = 9.769


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPX_CACHE", str(tmp_path))


def poisson(q, sigma, **more):
    return Release(noise_multiplier=sigma, sampling_probability=q, **more)


def spent(charges, delta, finer=1.0, adjacency="zero_out"):
    own = loss_grid.grid(charges, adjacency)
    return accounting.compose(charges, "pld", adjacency, interval=own / finer).epsilon(delta)


def test_the_needed_noise_is_known_from_both_sides():
    def spends(sigma, is_upper):
        distribution = losses.from_gaussian_mechanism(
            sigma, pessimistic_estimate=is_upper, value_discretization_interval=1e-7, sampling_prob=Q, use_connect_dots=is_upper
        )
        return distribution.self_compose(STEPS).get_epsilon_for_delta(DELTA)

    # Losses rounded down by up to 1e-7 in each of the steps are a lower bound, 0.5 % off.
    assert spends(NEEDED * 1.001, is_upper=True) <= TARGET < spends(NEEDED * 0.99, is_upper=False)


def test_a_small_target_takes_the_noise_that_it_needs():
    found = dpx.privacy.noise_multiplier([(Q, STEPS)], epsilon=TARGET, delta=DELTA)
    fixed = accounting.compose([(poisson(Q, 10.62), STEPS)], interval=1e-4).epsilon(DELTA)
    print(f"\nnoise for epsilon {TARGET}: needed {NEEDED}, found {found:.3f}, and 10.62 spends {fixed:.5f} on a fixed grid of 1e-4")
    assert NEEDED * 0.999 <= found <= NEEDED * 1.01
    assert fixed > TARGET * 0.999
    assert spent([(poisson(Q, found), STEPS)], DELTA, 8) <= spent([(poisson(Q, found), STEPS)], DELTA) <= TARGET


# The central limit, exact where sigma is large and steps are many: Gaussian with mu = q sqrt(steps) / sigma.
@pytest.mark.parametrize("sigma", [10.0, *(pytest.param(sigma, marks=pytest.mark.slow) for sigma in (30.0, 100.0, 300.0)), 1000.0])
@pytest.mark.parametrize(("q", "steps"), [(1e-3, 16_000), (1e-2, 16_000), (1e-2, 400_000)])
def test_large_noise_is_not_drowned_by_the_grid(sigma, q, steps):
    charges, delta = [(poisson(q, sigma), steps)], 1e-8
    own, fine = spent(charges, delta), spent(charges, delta, 3)
    fixed, limit = accounting.compose(charges, interval=1e-4).epsilon(delta), closed_form.epsilon(q * steps**0.5 / sigma, delta)
    print(f"\nq {q}, {steps} steps, sigma {sigma}: fixed 1e-4 {fixed:.5f}, own {own:.5f}, three times finer {fine:.5f}, limit {limit:.5f}")
    assert fine * 0.9995 <= own <= fine * 1.01
    if sigma >= 100:
        assert limit * (1 - 1e-4) <= own <= limit * 1.01


def drawn(number):
    """A setting whose epsilon is well above 0, from a fixed seed; for spreads below 1e-5 the finer grid is the one that rounding spoils."""
    chance = random.Random(number)
    while True:
        q, sigma, steps, delta = (10 ** chance.uniform(*ends) for ends in ((-8, 0), (0.3, 4), (0, 4), (-12, -3)))
        spread = q * steps**0.5 / sigma
        if max(10 * delta, 1e-5) < spread < 3 and delta > 1e-15 * steps:
            return q, sigma, int(steps), delta


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("number", [*range(4), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 12))])
def test_any_setting_is_within_one_percent_of_a_fine_grid(number, adjacency):
    q, sigma, steps, delta = drawn(number)
    charges = [(poisson(q, sigma), steps), (poisson(q / 2, sigma), steps)]
    own, fine = spent(charges, delta, 1, adjacency), spent(charges, delta, 3, adjacency)
    assert fine * 0.9995 <= own <= fine * 1.01


@pytest.mark.parametrize(("rows", "q", "sigma", "steps"), [(2, 1e-4, 30.0, 1000), (5, 1e-3, 20.0, 100)])
def test_a_unit_of_rows_at_large_noise(rows, q, sigma, steps):
    charges = [(poisson(q, sigma, kind="group", rows_per_unit=rows), steps)]
    own, fine = spent(charges, 1e-8), spent(charges, 1e-8, 3)
    assert loss_grid.grid(charges) < 1e-4
    assert fine * 0.9995 <= own <= fine * 1.01


def test_a_unit_of_one_row_costs_what_the_row_costs():
    row, unit = poisson(1e-3, 20.0), poisson(1e-3, 20.0, kind="group", rows_per_unit=1)
    assert spent([(unit, 500)], 1e-7) == pytest.approx(spent([(row, 500)], 1e-7), rel=1e-3)


@pytest.mark.parametrize(("q", "epsilon", "delta", "steps"), [(1e-4, 1e-3, 1e-8, 2000), (0.02, 0.05, 1e-7, 500), (1.0, 0.01, 1e-9, 50)])
def test_the_noise_found_never_exceeds_its_target(q, epsilon, delta, steps):
    sigma = dpx.privacy.noise_multiplier([(q, steps)], epsilon=epsilon, delta=delta)
    charges = [(poisson(q, sigma), steps)]
    assert spent(charges, delta, 4) * 0.999999 <= spent(charges, delta) <= epsilon
    # And it is no more than 1 % above what a fine grid asks for.
    assert spent([(poisson(q, sigma * 0.99), steps)], delta, 4) > epsilon


def test_a_given_grid_is_refined_where_losses_are_smaller():
    charges = [(Release(noise_multiplier=1.0, sampling_probability=Q), STEPS)]
    sigma = solve.solve(charges, epsilon=TARGET, delta=DELTA, interval=5e-4)
    assert NEEDED * 0.999 <= sigma <= NEEDED * 1.01
    assert loss_grid.grid(solve.scaled(charges, 0.5), coarsest=5e-4) == 5e-4


SMALL_Q = [pytest.param(q, steps, epsilon, marks=pytest.mark.slow) for q in (1e-4, 1e-7) for steps in (10, 10**5) for epsilon in (1, 8)]
SMALL_Q += [pytest.param(1e-3, 1000, 8, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("q", "steps", "epsilon"), [(1e-2, 10, 1), (1.0, 1000, 1), *SMALL_Q])
def test_what_a_search_solves_is_within_one_percent_and_kept(q, steps, epsilon, monkeypatch):
    charges = [(poisson(q, 1.0), steps)]
    start = {1e-2: 0.9, 1e-3: 0.5, 1.0: 100.0}.get(q, 0.4)
    sigma = solve.nearly(charges, epsilon=epsilon, delta=1e-8, start=start)
    above, below = (spent([(poisson(q, sigma * factor), steps)], 1e-8) for factor in (0.99, 1.01))
    assert below < epsilon < above
    monkeypatch.setattr(accounting, "compose", lambda *_, **__: pytest.fail("solved again"))
    assert solve.nearly(charges, epsilon=epsilon, delta=1e-8, start=1.0) == sigma


@pytest.mark.parametrize("kind", ["poisson", "gaussian"])
def test_everyone_in_every_step_is_one_gaussian_release(kind):
    charges = [(Release(noise_multiplier=1e4, kind=kind), 10**6)]
    truth = closed_form.epsilon(0.1, 1e-12)
    # Composed a million times by Fourier transforms, rounding alone would be ten times this delta.
    assert truth * (1 - 1e-6) <= accounting.compose(charges).epsilon(1e-12) <= truth * 1.001


def test_a_delta_that_rounding_swallows_is_not_claimed():
    charges = [(poisson(1e-8, 0.3), 10**6)]
    assert loss_grid.rounding(charges) == pytest.approx(1.5e-10)
    with pytest.raises(ConfigError, match="accountant=rdp"):
        solve.solve(charges, epsilon=1.0, delta=1e-10)


def test_points_are_bounded():
    for charges, adjacency in (
        ([(poisson(1e-7, 0.3), 10**6)], "zero_out"),
        ([(poisson(1e-4, 0.3), 10**6)], "replace_one"),
        ([(poisson(2e-5, 1.8, kind="truncated_poisson", size=1000, cap=1), 2000)], "zero_out"),
    ):
        reach = max(loss_grid._seen(release, count, adjacency)[0] for release, count in charges)
        assert reach / loss_grid.grid(charges, adjacency) <= loss_grid.POINTS_MAX / 3.99


@pytest.mark.parametrize(
    ("charges", "adjacency"),
    [
        ([(poisson(0.0086, 0.52), 120)], "zero_out"),
        pytest.param([(poisson(1e-4, 0.5), 5_000)], "zero_out", marks=pytest.mark.slow),
        pytest.param([(poisson(0.3, 3.0), 7)], "replace_one", marks=pytest.mark.slow),
        ([(poisson(0.01, 0.8), 10), (poisson(0.02, 0.8), 30)], "zero_out"),
        pytest.param([(poisson(0.05, 2.0, kind="truncated_poisson", size=1000, cap=60), 20)], "zero_out", marks=pytest.mark.slow),
    ],
)
def test_a_multiple_of_the_grid_is_never_below_it(charges, adjacency):
    own, multiple = loss_grid.grid(charges, adjacency), loss_grid.multiple(charges, adjacency)
    assert multiple > own and multiple / own == pytest.approx(round(multiple / own))
    whole = accounting.compose(charges, "pld", adjacency)
    quick = accounting.compose(charges, "pld", adjacency, interval=multiple)
    # Float64's rounding of a composition on the finer grid is all that may lie below.
    assert all(whole.epsilon(d) * (1 - 1e-9) <= quick.epsilon(d) <= whole.epsilon(d) * 1.003 for d in (1e-4, 1e-6, 1e-8))
