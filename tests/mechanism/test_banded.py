"""Correlated noise: its algebra, its strategy, who takes part when, what it costs, and what is refused."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import pld

from dpx import packages
from dpx.claim import calibration
from dpx.claim.calibration import calibrate
from dpx.declaration import ConfigError
from dpx.mechanism import banded, declared_mechanism
from dpx.mechanism.banded import Banded
from dpx.mechanism.clip import AdaptiveClip
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.mechanism.noise import add_noise, slice_keys
from dpx.mechanism.telemetry import ReleasedTelemetry
from dpx.privacy import ledger
from dpx.privacy.declared_privacy import GdpClt, Pld, Privacy
from dpx.privacy.events import Release
from dpx.privacy.ledger import Ledger
from dpx.randomness import RootSecret
from dpx.sampler import CyclicPoisson, Poisson, draw
from tests.training.conftest import declare

SECRET = RootSecret.from_seed(8)
STRATEGY = np.asarray([0.8, 0.4, 0.2], np.float32)
N = 10_000


def make(**changes):
    return declare(**({"mechanism": Banded(bands=3), "sampler": CyclicPoisson(cycle=4), "accountant": Pld(), "steps": 10} | changes))


@pytest.mark.parametrize("strategy", [STRATEGY, np.asarray([0.7, 0.5, 0.3, 0.2, 0.1], np.float32)], ids=len)
def test_the_noise_times_the_strategy_is_independent_noise(strategy):
    params = {"w": jnp.zeros((5, 7)), "b": jnp.zeros((3,))}
    mechanism = Banded(bands=len(strategy))
    past = mechanism.initial_state(params)
    assert past["w"].shape == (len(strategy) - 1, 5, 7) and not past["w"].any()
    run = jax.jit(lambda keys, past: mechanism.noisy_sum(params, (keys, jnp.asarray(strategy)), jnp.float32(2.0), past, 0.1)[1:])
    independent = jax.jit(lambda key: add_noise(params["w"], key, jnp.float32(2.0))[0])
    released, fresh = [], []
    for step in range(6):
        keys = jax.tree.map(jnp.asarray, slice_keys(SECRET, step, params))
        noisy, squares, past = run(keys, past)
        released.append(np.asarray(noisy["w"], np.float64))
        fresh.append(np.asarray(independent(keys["w"]), np.float64))
        total = sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in jax.tree.leaves(noisy))
        assert float(squares) == pytest.approx(total, rel=1e-5)
    for step in range(6):
        mixed = sum(float(c) * released[step - back] for back, c in enumerate(strategy) if step >= back)
        np.testing.assert_allclose(mixed, fresh[step], atol=1e-4)


def test_a_strategy_has_columns_of_norm_one_and_beats_independent_noise():
    pytest.importorskip("jax_privacy")
    found = banded.checked(banded.optimised(40, 4), 4).astype(np.float64)
    assert 1 - 1e-5 < np.linalg.norm(found) <= 1
    strategy = sum(c * np.eye(40, k=-back) for back, c in enumerate(found))
    prefix = np.tril(np.ones((40, 40)))
    assert np.sum(np.square(prefix @ np.linalg.inv(strategy))) < 0.6 * np.sum(np.square(prefix))


@pytest.mark.parametrize("wrong", [[0.9, 0.5, 0.2], [0.5, 0.5], [0.0, 0.5, 0.5], [float("nan"), 0.1, 0.1]])
def test_a_strategy_whose_columns_are_too_long_is_refused(wrong):
    with pytest.raises(ConfigError, match="strategy.json: is not a strategy"):
        banded.checked(wrong, 3)


def test_a_strategy_is_settled_once(tmp_path, monkeypatch):
    monkeypatch.setattr(banded, "optimised", lambda *_: STRATEGY)
    assert np.array_equal(Banded(bands=3).load_strategy(10, tmp_path), STRATEGY)
    monkeypatch.setattr(banded, "optimised", lambda *_: pytest.fail("settled before"))
    assert np.array_equal(Banded(bands=3).load_strategy(10, tmp_path), STRATEGY)
    assert declare().mechanism.load_strategy(10, tmp_path) is None


@pytest.mark.parametrize("content", ["", "[1]", '{"coefficients"', "\x00"])
def test_a_strategy_that_is_unreadable_is_settled_again(tmp_path, monkeypatch, content):
    (tmp_path / "strategy.json").write_text(content)
    monkeypatch.setattr(banded, "optimised", lambda *_: STRATEGY)
    assert np.array_equal(Banded(bands=3).load_strategy(10, tmp_path), STRATEGY)


def test_without_the_library_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "is_installed", lambda _: False)
    for needs_it in (lambda: banded.optimised(10, 3), lambda: Banded(bands=3).require_library(tmp_path)):
        with pytest.raises(
            ConfigError, match=r"^mechanism=banded: needs jax_privacy, which is not installed. Install the extra correlated: "
        ):
            needs_it()
    (tmp_path / "strategy.json").write_text('{"coefficients": [0.9, 0.1]}')
    Banded(bands=3).require_library(tmp_path)


def test_rows_rest_for_a_cycle_between_two_steps_and_keep_their_rate():
    sampler, last, counts = CyclicPoisson(cycle=4), {}, np.zeros(203)
    for step in range(2000):
        for row in draw(sampler, 203, 0.1, lambda *place: SECRET.generator("cyclic", *place), step):
            assert row % 4 == step % 4 and step - last.get(row, -4) >= 4
            last[row] = step
            counts[row] += 1
    # A group comes round every fourth step and is drawn from with probability 0.4.
    assert np.mean(counts) == pytest.approx(2000 * 0.1, rel=0.02)


def test_one_release_is_charged_each_time_the_busiest_group_comes_round(tmp_path):
    experiment, found = make(), Ledger(tmp_path / "ledger")
    for step in range(10):
        found.append(step, calibration.Entries.of(experiment.claim).of_step(N, 1.0, 10))
    once = Release(noise_multiplier=1.0, sampling_probability=4 * 10 / N, size=N)
    assert ledger.releases(found.segments()) == [(once, 3)]
    # Steps 6..9 again in a new noise epoch: each group takes part once more, in a separate mechanism.
    for step in range(6, 10):
        found.append(step, calibration.Entries.of(experiment.claim).of_step(N, 1.0, 10, epoch=1))
    assert ledger.releases(found.segments()) == [(once, 4)]


@pytest.mark.slow
def test_a_target_is_met_by_the_amplified_event():
    calibrated = calibrate(make(steps=40, noise=TargetEpsilon(epsilon=3.0), privacy=Privacy(delta=1e-5)).claim, N)
    assert calibrated.noise_multiplier is not None and 2.99 < calibrated.epsilon["pld"] <= 3.0
    sampled = dp_accounting.PoissonSampledDpEvent(4 * 10 / N, dp_accounting.GaussianDpEvent(calibrated.noise_multiplier))
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    theirs = accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, 10)).get_epsilon(1e-5)
    assert calibrated.epsilon["pld"] == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampler": Poisson()}, "mechanism=banded, sampler=poisson"),
        ({"sampler": CyclicPoisson(cycle=2)}, "sampler.cycle=2"),
        ({"clip": AdaptiveClip(clipping_norm=1.0)}, "mechanism=banded, clip=quantile"),
        ({"telemetry": ReleasedTelemetry()}, "mechanism=banded, telemetry=released"),
        ({"privacy": Privacy(delta=1e-5, adjacency="add_remove")}, "privacy.adjacency=add_remove"),
        ({"privacy": Privacy(delta=1e-5, unit="document", rows_per_unit_max=3)}, "privacy.rows_per_unit_max=3"),
        ({"accountant": GdpClt()}, "accountant=gdp_clt"),
    ],
)
def test_what_the_proof_does_not_cover_is_refused(change, named):
    experiment = make(**change)
    with pytest.raises(ConfigError, match=named) as caught:
        experiment.sampler.check(experiment.privacy, experiment.accountant)
        experiment.mechanism.check(experiment)
        declared_mechanism.check(experiment.mechanism, experiment)
    assert "\n" not in str(caught.value)


def test_a_batch_beyond_one_group_is_refused():
    with pytest.raises(ConfigError, match="batch size 10: a step draws from 9 rows"):
        calibrate(make(privacy=Privacy(delta=1e-3)).claim, 39)
