"""Privacy filters: costs against dp-accounting and closed forms, budgets against the conversions, and what has no proof."""

import math

import dp_accounting
import pytest
from dp_accounting import dp_event, rdp

from dpx.declaration import ConfigError
from dpx.privacy.events import Release
from dpx.privacy.search_accounting import Filter, renyi, renyi_limit, zcdp, zcdp_limit

RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
STEP = Release(noise_multiplier=1.1, sampling_probability=0.01)
PASS = Release(noise_multiplier=3.0, kind="deterministic")
DELTA = 1e-6


def _renyi(epsilon: float, order: float | int) -> Filter:
    return Filter("renyi", epsilon, DELTA, order, "zero_out")


@pytest.mark.parametrize("order", [2, 8.5, 16, 64])
def test_the_cost_is_dp_accountings_divergence_at_that_order(order: float | int) -> None:
    reference = rdp.RdpAccountant([order], RELATION)
    reference.compose(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1)), 200)
    assert renyi([(STEP, 200)], order, "zero_out") == pytest.approx(float(reference.rdp[0]), rel=1e-6)


@pytest.mark.parametrize("q", [1e-8, 1e-9])
def test_a_rate_that_floating_point_rounds_away_still_costs_its_divergence(q: float) -> None:
    truth = 1000 * math.log1p(q * q * math.expm1(1 / 1.1**2))
    assert renyi([(Release(noise_multiplier=1.1, sampling_probability=q), 1000)], 2, "zero_out") >= truth


@pytest.mark.parametrize(("epsilon", "order"), [(8.0, 16), (1.0, 64), (3.0, 12.5)])
def test_the_limit_is_what_dp_accounting_converts_to_the_budget(epsilon: float, order: float | int) -> None:
    found, _ = rdp.compute_epsilon([order], [renyi_limit(epsilon, DELTA, order)], DELTA)
    assert found == pytest.approx(epsilon)


def test_costs_add_up_over_different_trials() -> None:
    other = Release(noise_multiplier=2.0, sampling_probability=0.05)
    budget = _renyi(8.0, 16)
    apart = budget.cost([(STEP, 100)]) + budget.cost([(other, 30)])
    assert budget.cost([(STEP, 100), (other, 30)]) == pytest.approx(apart, rel=1e-9)
    assert budget.cost([]) == 0


def test_it_holds_up_to_the_budget_and_not_one_step_beyond() -> None:
    budget = _renyi(8.0, 16)
    most = int(budget.limit / budget.cost([(STEP, 1)]))
    assert budget.holds([(STEP, most)]) and not budget.holds([(STEP, most + 1)])


def test_realised_costs_are_below_the_best_order_which_is_the_price_of_fixing_one() -> None:
    charges = [(STEP, 200)]
    at_one = renyi(charges, 16, "zero_out")
    event = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1)), 200)
    free = rdp.RdpAccountant(neighboring_relation=RELATION).compose(event).get_epsilon(DELTA)
    assert rdp.compute_epsilon([16], [at_one], DELTA)[0] >= free


@pytest.mark.parametrize(("adjacency", "sensitivity"), [("zero_out", 1), ("replace_one", 2)])
def test_rho_of_gaussians_is_the_closed_form(adjacency: str, sensitivity: float | int) -> None:
    assert zcdp([(PASS, 10)], adjacency) == pytest.approx(10 * sensitivity**2 / (2 * 3.0**2))
    # Renyi divergence rho * order at every order: one zCDP filter is a Renyi filter at each.
    assert renyi([(PASS, 10)], 7, adjacency) == pytest.approx(7 * zcdp([(PASS, 10)], adjacency))


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0])
def test_the_zcdp_limit_is_bun_and_steinkes(epsilon: float) -> None:
    rho = zcdp_limit(epsilon, DELTA)
    assert rho + 2 * math.sqrt(rho * math.log(1 / DELTA)) == pytest.approx(epsilon)
    assert Filter("zcdp", epsilon, DELTA, None, "zero_out").limit == rho


@pytest.mark.parametrize(
    ("release", "words"),
    [
        (STEP, "tune.budget.kind=zcdp, sampler=poisson"),
        (Release(noise_multiplier=3.0, kind="gaussian", is_discrete=True), "only Gaussian noise"),
    ],
)
def test_zcdp_charges_gaussians_of_everyone_alone(release: Release, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        zcdp([(release, 1)], "zero_out")
    assert zcdp([(Release(noise_multiplier=1.0), 2)], "zero_out") == 1.0, "everyone is drawn"


def test_an_order_whose_conversion_alone_costs_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tune.budget.epsilon=1.0, tune.budget.order=2: at delta 1e-06"):
        _renyi(1.0, 2)


def test_integer_noise_is_bounded_at_whole_orders() -> None:
    with pytest.raises(ConfigError, match=r"tune.budget.order=2.5: integer noise"):
        renyi([(Release(noise_multiplier=4.0, sampling_probability=0.1, is_discrete=True), 5)], 2.5, "zero_out")


def test_what_renyi_accounting_does_not_know_has_no_filter() -> None:
    with pytest.raises(ConfigError, match="accountant=rdp"):
        renyi([(Release(noise_multiplier=2.0, sampling_probability=0.1, rows_per_unit=3, kind="group"), 5)], 16, "zero_out")
