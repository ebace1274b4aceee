"""Privacy losses of random allocation are held against integrals, and against laws that are below the true one in convex order."""

import importlib
import importlib.util
import math
import warnings

import dp_accounting
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr

from dpx.declaration import ConfigError
from dpx.privacy import accounting, allocation, closed_form, events
from dpx.privacy.allocation import Law, RandomAllocationGaussianDpEvent
from dpx.privacy.events import Release

GRID = 1e-3


def charges(steps: int, sigma: float, epochs: int = 1) -> accounting.Charges:
    return [(Release(noise_multiplier=sigma, sampling_probability=1 / steps, kind="random_allocation"), epochs)]


def call(level: float, sigma: float) -> float:
    """Returns E max(0, X - level) of one X."""
    if level <= 0:
        return 1 - level
    low = -math.log(level) * sigma - 0.5 / sigma
    return float(ndtr(low + 1 / sigma) - level * ndtr(low))


def put(level: float, sigma: float) -> float:
    """Returns E max(0, level - X) of one X."""
    if level <= 0:
        return 0.0
    low = -math.log(level) * sigma - 0.5 / sigma
    return float(level * ndtr(-low) - ndtr(-low - 1 / sigma))


def exactly(payoff, level: float, steps: int, sigma: float) -> float:
    """Returns the mean over the first `steps` - 1 of X of `payoff` of the last one, by quadrature in the normal coordinates."""
    if steps == 1:
        return payoff(level, sigma)

    def inner(z: float) -> float:
        weight = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return weight * exactly(payoff, level - math.exp(z / sigma - 0.5 / sigma**2), steps - 1, sigma)

    # Where the rest of the level is used up, the payoff has a kink.
    kink = [(math.log(level) + 0.5 / sigma**2) * sigma] if level > 0 else []
    # Both with and without the unit all but 1e-16 of X lies between these ends.
    ends = (-8.5, 8.5 + 1 / sigma)
    inside = [point for point in kink if ends[0] < point < ends[1]]
    return quad(inner, *ends, points=inside or None, epsabs=1e-14, epsrel=1e-7, limit=200)[0]


@pytest.mark.parametrize(("steps", "sigma"), [(1, 0.5), (1, 2.0), (2, 0.4), (2, 1.0), (2, 3.0), (3, 1.0)])
def test_both_directions_are_at_least_the_exact_integral_and_close_to_it(steps: int, sigma: float) -> None:
    losses = allocation.of_epoch(RandomAllocationGaussianDpEvent(steps, sigma), GRID / 10)
    for epsilon in (0.0, 0.5 / sigma, 3.5 / sigma) if steps < 3 else (0.5,):
        level = steps * math.exp(epsilon)
        removal = exactly(call, level, steps, sigma) / steps
        addition = math.exp(epsilon) * exactly(put, steps * math.exp(-epsilon), steps, sigma) / steps
        for bound, exact in ((losses._pmf_remove, removal), (losses._pmf_add, addition)):
            found = float(bound.get_delta_for_epsilon(epsilon))
            assert exact * (1 - 1e-6) <= found <= exact * 1.005 + 1e-14, (epsilon, exact, found)


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_one_step_is_the_gaussian(sigma: float) -> None:
    # Also where it is computed as an allocation: the event of one step is the Gaussian itself.
    composed = accounting.compose(charges(1, sigma, 3), "pld")
    assert composed.epsilon(1e-9) == accounting.compose([(Release(noise_multiplier=sigma, kind="gaussian"), 3)], "pld").epsilon(1e-9)
    with accounting.quiet():
        as_allocation = allocation.of_epoch(RandomAllocationGaussianDpEvent(1, sigma), GRID).self_compose(3)
    exact = closed_form.epsilon(math.sqrt(3) / sigma, 1e-9)
    assert exact <= as_allocation.get_epsilon_for_delta(1e-9) <= exact * 1.01


def below(outcomes: np.ndarray, masses: np.ndarray, points: int) -> Law:
    """Returns the law with all outcomes of a cell at their mean, and without tiny masses: no mean of a convex payoff rises."""
    kept = masses * np.maximum(1, outcomes) > 1e-25
    outcomes, masses = outcomes[kept], masses[kept]
    cells = np.linspace(np.log(outcomes.min()), np.log(outcomes.max()), points)
    place = np.clip(np.searchsorted(cells, np.log(outcomes)), 0, points - 1)
    total, means = np.bincount(place, masses, points), np.bincount(place, masses * outcomes, points)
    return Law(means[total > 0] / total[total > 0], total[total > 0])


def lower_law(steps: int, sigma: float, epochs: int, points: int = 600) -> Law:
    """Returns a law below that of the ratio of `epochs` epochs: conditional means of cells of X, of their sums, and of products."""
    ends = np.linspace(-7, 7 + 1 / sigma, points + 1)
    masses, means = (ndtr(ends[1:] - shift) - ndtr(ends[:-1] - shift) for shift in (0.0, 1 / sigma))
    one = below(means[masses > 1e-30] / masses[masses > 1e-30], masses[masses > 1e-30], points)

    def folded(law: Law, times: int, join) -> Law:
        total = law
        for digit in f"{times:b}"[1:]:
            total = joined(total, total, join)
            total = joined(total, law, join) if digit == "1" else total
        return total

    def joined(first: Law, second: Law, join) -> Law:
        return below(join.outer(first.points, second.points).ravel(), np.multiply.outer(first.masses, second.masses).ravel(), points)

    summed = folded(one, steps, np.add)
    return folded(Law(summed.points / steps, summed.masses), epochs, np.multiply)


@pytest.mark.parametrize(("steps", "sigma", "epochs"), [(3, 0.7, 2), (100, 1.0, 3)])
def test_composed_epochs_lie_just_above_a_lower_bound(steps: int, sigma: float, epochs: int) -> None:
    law = lower_law(steps, sigma, epochs)
    with accounting.quiet():
        composed = allocation.of_epoch(RandomAllocationGaussianDpEvent(steps, sigma), GRID).self_compose(epochs)
    for epsilon in (0.2, 1.0):
        removal = float(np.maximum(0, law.points - math.exp(epsilon)) @ law.masses)
        addition = float(np.maximum(0, 1 - math.exp(epsilon) * law.points) @ law.masses)
        for bound, least in ((composed._pmf_remove, removal), (composed._pmf_add, addition)):
            assert least <= float(bound.get_delta_for_epsilon(epsilon)) <= least * 1.06 + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "sigma", "epochs"), [(2, 0.4, 5), (30, 0.5, 4), (100, 1.0, 10), (1000, 0.6, 10), (7, 1.0, 20)])
def test_composed_epochs_lie_just_above_a_lower_bound_down_to_small_deltas(steps: int, sigma: float, epochs: int) -> None:
    law = lower_law(steps, sigma, epochs, 2000)
    with accounting.quiet():
        composed = allocation.of_epoch(RandomAllocationGaussianDpEvent(steps, sigma), GRID / 10).self_compose(epochs)
    for target in (1e-2, 1e-5, 1e-8):
        epsilon = composed.get_epsilon_for_delta(target)
        removal = float(np.maximum(0, law.points - math.exp(epsilon)) @ law.masses)
        addition = float(np.maximum(0, 1 - math.exp(epsilon) * law.points) @ law.masses)
        assert 0.85 * target <= max(removal, addition) <= target * (1 + 1e-9)


def test_epsilon_falls_with_noise_and_steps_and_grows_with_epochs_and_is_below_no_sampling() -> None:
    delta = 1e-7

    def epsilon(steps: int, sigma: float, epochs: int, accountant: str = "pld") -> float:
        return accounting.compose(charges(steps, sigma, epochs), accountant, orders=(1.5, 4, 16), interval=5 * GRID).epsilon(delta)

    for accountant in ("pld", "rdp"):
        by_steps = [epsilon(steps, 1.0, 4, accountant) for steps in (2, 3, 20)]
        by_noise = [epsilon(20, sigma, 4, accountant) for sigma in (0.6, 1.0, 3.0)]
        by_epochs = [epsilon(20, 1.0, epochs, accountant) for epochs in (1, 4, 9)]
        assert by_steps == sorted(by_steps, reverse=True) and by_noise == sorted(by_noise, reverse=True)
        assert by_epochs == sorted(by_epochs) and len({*by_steps, *by_noise, *by_epochs}) == 7
        assert by_steps[0] <= epsilon(20, 1.0, 4, "deterministic")
    assert epsilon(20, 1.0, 4, "rdp") >= epsilon(20, 1.0, 4)


def test_the_setting_of_the_publication_is_below_poisson_and_far_below_no_sampling() -> None:
    found = accounting.compose(charges(100, 1.0, 10), "pld", interval=GRID).epsilon(1e-6)
    # Just above the epsilon of a lower law, and below the published bound, whose sums are rounded upward.
    law = lower_law(100, 1.0, 10)
    least, beyond = (float(np.maximum(0, law.points - math.exp(epsilon)) @ law.masses) for epsilon in (found, 0.995 * found))
    assert least <= 1e-6 < beyond and found <= 2.006
    assert found < accounting.epsilon([(0.01, 1000)], noise_multiplier=1.0, delta=1e-6)


def test_renyi_divergences_bound_both_directions() -> None:
    orders = (1.5, 2.0, 3.0, 7.5, 32.0)
    for steps, sigma in ((1, 1.0), (2, 0.7), (3, 2.0), (50, 1.0)):
        found = allocation.divergences(RandomAllocationGaussianDpEvent(steps, sigma), orders)
        # The same moments from a law below the true one.
        law = lower_law(steps, sigma, 1)
        for order, bound in zip(orders, found, strict=True):
            removal = math.log(float(law.points**order @ law.masses)) / (order - 1)
            addition = math.log(float(law.points ** (1 - order) @ law.masses)) / (order - 1)
            assert max(removal, addition) <= bound <= order / (2 * sigma**2) * (1 + 1e-9)
    # At order 2, E U**2 = 1 + (exp(1 / sigma**2) - 1) / t, here above the bound of addition, 3.
    exact = math.log1p(math.expm1(4) / 2)
    assert allocation.divergences(RandomAllocationGaussianDpEvent(2, 0.5), (2.0,))[0] == pytest.approx(exact, rel=1e-9)
    assert exact > 3


def test_noise_that_no_grid_resolves_is_charged_as_if_the_place_were_told() -> None:
    for sigma in (1e-3, 0.039, 1e8, 1e15):
        (one, _), *_ = charges(7, sigma)
        assert events.event(one, "zero_out", "pld") == dp_accounting.GaussianDpEvent(sigma)
    for steps in (2, 1000):
        for sigma in (allocation.SMALLEST, 1e4, allocation.LARGEST):
            law = allocation.ratio(steps, sigma)
            assert np.isfinite(law.points).all() and (law.masses >= 0).all() and (np.diff(law.points) > 0).all()
            assert float(law.points @ law.masses) == pytest.approx(1, rel=1e-9)
    # Both sides of the change: less noise never has a smaller epsilon.
    below, at = (accounting.compose(charges(2, sigma), "pld", interval=GRID).epsilon(1e-6) for sigma in (0.0399, 0.04))
    assert below > at > closed_form.epsilon(1 / 0.04, 1e-6) - 2 * math.log(2)


def test_a_renyi_divergence_of_any_order_takes_no_time() -> None:
    event = RandomAllocationGaussianDpEvent(1000, 2.0)
    low, most, above, far = allocation.divergences(event, (2.0, 1024.0, 1024.5, 1e9))
    assert low < most < above and above == 1024.5 / 8 and far == 1e9 / 8


def test_a_probability_that_is_not_one_over_a_number_of_steps_has_no_event() -> None:
    release = Release(noise_multiplier=1.0, sampling_probability=0.28, kind="random_allocation")
    with pytest.raises(ConfigError, match="not a whole number of steps"):
        events.event(release, "zero_out", "pld")


def test_a_delta_that_the_grid_cannot_resolve_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot resolve this delta"):
        accounting.check_delta(1e-14, "pld")
    # So many epochs round at more than this delta, so no finite epsilon is given.
    assert accounting.compose(charges(2, 30.0, 10_000), "pld").epsilon(1e-13) == math.inf


def test_replaced_units_and_integer_noise_have_no_event() -> None:
    one = Release(noise_multiplier=1.0, sampling_probability=0.1, kind="random_allocation")
    for accountant in ("pld", "rdp"):
        with pytest.raises(ConfigError, match="in one neighbour only"):
            accounting.compose([(one, 1)], accountant, "replace_one")
    # Without amplification: the sum moves by twice the norm.
    unamplified = accounting.compose([(one, 2)], "deterministic", "replace_one").epsilon(1e-6)
    assert unamplified == pytest.approx(closed_form.epsilon(2 * math.sqrt(2), 1e-6), rel=1e-6)
    whole = Release(noise_multiplier=1.0, sampling_probability=0.1, kind="random_allocation", is_discrete=True)
    for accountant in ("pld", "rdp", "deterministic"):
        with pytest.raises(ConfigError, match="integer noise"):
            accounting.compose([(whole, 1)], accountant)


def test_other_releases_compose_with_an_epoch() -> None:
    of_poisson = [(Release(noise_multiplier=1.0, sampling_probability=0.05), 20)]
    of_both = [*charges(20, 1.0), *of_poisson]
    joint, first, second = (accounting.compose(one, "pld", interval=GRID).epsilon(1e-6) for one in (of_both, charges(20, 1.0), of_poisson))
    assert max(first, second) < joint < first + second
    event = RandomAllocationGaussianDpEvent(20, 1.0)
    assert events.restore(events.describe(event)) == event


@pytest.mark.skipif(importlib.util.find_spec("PLD_accounting") is None, reason="PLD_accounting is not installed")
@pytest.mark.parametrize(("steps", "sigma", "width"), [(2, 1.0, 0.05), (20, 0.8, 0.2), (100, 1.0, 0.3)])
def test_the_published_package_brackets_one_epoch(steps: int, sigma: float, width: float) -> None:
    with warnings.catch_warnings():
        # That numba is missing.
        warnings.simplefilter("ignore", ImportWarning)
        published = importlib.import_module("PLD_accounting")
    as_losses = importlib.import_module("PLD_accounting.dp_accounting_support").linear_dist_to_dp_accounting_pmf
    sides = published.BoundType.IS_DOMINATED, published.BoundType.DOMINATES
    directions = published.types.Direction

    own = allocation.of_epoch(RandomAllocationGaussianDpEvent(steps, sigma), GRID)
    params = published.PrivacyParams(sigma=sigma, num_steps=steps)
    # The default, of geometric grids: its other routes round more, and their pointwise minimum is not a bound.
    config = published.AllocationSchemeConfig(loss_discretization=width, tail_truncation=1e-14)
    for direction, bound in ((directions.REMOVE, own._pmf_remove), (directions.ADD, own._pmf_add)):
        ends = []
        for side in sides:
            law = published.gaussian_allocation_directional_pld(params=params, config=config, direction=direction, bound_type=side)
            ends.append(as_losses(dist=law, bound_type=side))
        for delta in (1e-2, 1e-6, 1e-9):
            low, high = (float(end.get_epsilon_for_delta(delta)) for end in ends)
            assert low <= float(bound.get_epsilon_for_delta(delta)) <= high
