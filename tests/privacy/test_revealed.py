"""Rows released one by one: what holds of them, against the sum over uses, and that nothing else is taken for it."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom

from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.privacy import accounting, closed_form, events, ledger, loss_grid, solve
from dpx.privacy.events import Release
from dpx.privacy.segments import LedgerEntry, encode

# Du and Mi 2021, section 4.1: D, then (sigma at the target, epsilon of what is released) for the two targets of Table 2.
PRINTED = {
    "SST-2": (67_349, (0.346, 67.7), (0.317, 78.6)),
    "QNLI": (104_743, (0.333, 74.0), (0.308, 84.6)),
    "QQP": (363_846, (0.308, 90.2), (0.288, 101.3)),
    "MNLI": (392_702, (0.307, 91.0), (0.287, 102.3)),
}
# Every task at one of the targets, which take turns; the other four are slow.
EIGHT = [
    pytest.param(task, size, *cell, marks=[pytest.mark.slow] * ((number + at) % 2))
    for number, (task, (size, *cells)) in enumerate(PRINTED.items())
    for at, cell in enumerate(cells)
]


def draws(size, sigma):
    """Three epochs at batch 32 of 32 micro-batches: 3 D draws at p = 1 / D."""
    return [(Release(noise_multiplier=sigma, sampling_probability=1 / size, kind="slot_revealed"), 3 * size)]


def exact_delta(count, p, sigma, epsilon):
    """Delta of `count` draws by the sum over uses; the neglected tail of K is added as if nothing of it were private."""
    uses_k = np.arange(1, min(count, 100) + 1)
    terms = [
        weight * closed_form.delta(math.sqrt(k) / sigma, epsilon) for k, weight in zip(uses_k, binom.pmf(uses_k, count, p), strict=True)
    ]
    return math.fsum([*terms, binom.sf(uses_k[-1], count, p)])


def exactly(charges, delta):
    """Epsilon by the sum over uses, for charges of one kind."""
    ((release, count),) = charges
    p, sigma = release.sampling_probability, release.noise_multiplier
    return brentq(lambda epsilon: exact_delta(count, p, sigma, epsilon) / delta - 1, 0.0, 1e3, xtol=1e-9)


@pytest.mark.parametrize(("task", "size", "sigma", "printed"), EIGHT)
def test_epsilon_of_frozen_dp_fp_at_the_papers_settings(task, size, sigma, printed):
    delta = 1 / (2 * size)
    composed = accounting.compose(draws(size, sigma), "pld", "zero_out_text")
    found, exact = composed.epsilon(delta), exactly(draws(size, sigma), delta)
    assert found == pytest.approx(printed, rel=2e-3), task
    # Below by float64's rounding alone: a few 1e-16 of delta for each of up to 1.2 million draws (`loss_grid.rounding`).
    assert exact * (1 - 2e-5) <= found <= exact * (1 + 1e-4)


@pytest.mark.parametrize(("p", "count", "sigma"), [(0.5, 3, 1.0), (0.01, 40, 4.0), (0.3, 1, 0.7), (1e-4, 2000, 0.5)])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-8])
def test_the_grid_is_above_the_exact_sum_and_near_it(p, count, sigma, delta):
    charges = [(Release(noise_multiplier=sigma, sampling_probability=p, kind="slot_revealed"), count)]
    found = accounting.compose(charges, "pld", "zero_out_text")
    if exact_delta(count, p, sigma, 0.0) > delta:
        exact = exactly(charges, delta)
        assert exact * (1 - 1e-6) <= found.epsilon(delta) <= exact * 1.005
    assert found.delta(1.0) == pytest.approx(exact_delta(count, p, sigma, 1.0), rel=5e-3, abs=1e-12)


def test_the_sum_over_uses_is_what_a_simulation_of_the_releases_gives():
    """Delta by sampling privacy losses: K uses, then the loss of one Gaussian of mu = sqrt(K) / sigma."""
    count, p, sigma, epsilon = 20, 0.1, 1.2, 1.5
    rng = np.random.default_rng(0)
    uses_n = rng.binomial(count, p, 400_000)
    mu_n = np.sqrt(uses_n) / sigma
    loss_n = mu_n**2 / 2 + mu_n * rng.standard_normal(len(mu_n))
    value_n = np.maximum(0.0, -np.expm1(epsilon - loss_n))
    error = value_n.std() / math.sqrt(len(value_n))
    assert abs(value_n.mean() - exact_delta(count, p, sigma, epsilon)) < 5 * error


def test_a_draw_that_is_seen_costs_far_more_than_a_hidden_one():
    size, sigma, delta = 67_349, 0.346, 1 / (2 * 67_349)
    hidden = accounting.compose([(Release(noise_multiplier=sigma, sampling_probability=1 / size), 3 * size)], "pld", "zero_out_text")
    assert hidden.epsilon(delta) == pytest.approx(5.9, rel=0.01)
    assert accounting.compose(draws(size, sigma), "pld", "zero_out_text").epsilon(delta) > 11 * hidden.epsilon(delta)


def test_everyone_drawn_is_the_gaussian():
    charges = [(Release(noise_multiplier=8.0, kind="slot_revealed"), 10)]
    truth = closed_form.epsilon(10**0.5 / 8.0, 1e-6)
    for accountant in ("pld", "deterministic"):
        assert accounting.compose(charges, accountant, "zero_out_text").epsilon(1e-6) == pytest.approx(truth, rel=2e-3)


def test_releases_of_both_kinds_are_composed_for_the_text_alone():
    rows, sums = draws(1000, 0.6), [(Release(noise_multiplier=1.0, sampling_probability=0.01), 500)]
    both = accounting.compose(rows + sums, "pld", "zero_out_text").epsilon(1e-5)
    alone = [accounting.compose(charges, "pld", "zero_out_text").epsilon(1e-5) for charges in (rows, sums)]
    assert max(alone) < both < sum(alone)
    for relation in ("zero_out", "add_remove", "replace_one"):
        with pytest.raises(ConfigError, match="label and place are released.*zero_out_text"):
            accounting.compose(rows + sums, "pld", relation)


def test_the_noise_for_a_target_is_solved_by_the_bound_that_holds():
    charges = draws(2000, 1.0)
    sigma = solve.solve(charges, epsilon=8.0, delta=1e-5, adjacency="zero_out_text")
    spent = [exactly(solve.scaled(charges, factor * sigma), 1e-5) for factor in (1.0, 0.999)]
    assert spent[0] <= 8.0 < spent[1]


def test_its_event_goes_through_json():
    ((release, count),) = draws(1000, 0.6)
    event = dp_accounting.SelfComposedDpEvent(events.event(release, "zero_out_text", "pld"), count)
    assert events.restore(events.describe(event)) == event


def entry(**changes):
    fields = {"epoch": 0, "q": 0.032, "noise_multiplier": 0.5, "sampler": "poisson", "expected_batch_size": 32, "clipping_norm": 1.0}
    return LedgerEntry(**(fields | {"size": 1000, "noise": "forward_gaussian", "micro_batches": 32} | changes))


def test_a_ledger_alone_gives_the_draws_of_its_steps():
    segments = encode([("one", step, entry()) for step in range(5)])
    ((release, count),) = ledger.releases(segments)
    assert (release.kind, count) == ("slot_revealed", 160) and release.sampling_probability == pytest.approx(1e-3)
    assert events.kind_of(segments[0]) == "slot_revealed"
    with pytest.raises(ConfigError, match="zero_out_text"):
        events.require_proved(segments, "zero_out_text", "zero_out", "run")
    with pytest.raises(ConfigError, match="one by one"):
        ledger.releases(encode([("one", 0, entry(sampler="shuffled"))]))


def test_steps_without_such_releases_have_no_number_of_draws():
    assert to_json(entry(noise="gaussian", micro_batches=None))["micro_batches"] is None


@pytest.mark.parametrize("stated", ["zero_out", "replace_one"])
def test_charges_of_whole_rows_may_be_stated_for_the_text_alone(stated):
    segments = encode([("one", 0, entry(noise="gaussian", micro_batches=None))])
    events.require_proved(segments, stated, "zero_out_text", "run")


def test_its_grid_follows_from_the_loss_of_one_use():
    assert loss_grid.grid(draws(67_349, 0.346), "zero_out_text") < 5e-4
