"""The audit in its stated setting: 20,000 orthogonal Dirac canaries, full participation, a claim of epsilon 2."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpx.audit.verdict import judge
from dpx.clipping.rounding import MARGINS
from dpx.config.declared_audit import Primary
from dpx.mechanism import noise
from dpx.mechanism.clip import Flat
from dpx.randomness import RootSecret

REPLICATES = 10


def verdicts(attack, replicates=REPLICATES):
    """(verdict, p-value of the noise) of each replicate, which has its own coins and noise."""
    found = []
    for seed in range(replicates):
        secret = RootSecret.from_seed(seed)
        is_in = attack.coins(secret)
        scores = attack.scores(secret, is_in)
        found.append((judge({"gradient": (scores, is_in)}, attack.setting.claim, Primary()), attack.noise_p_value(scores, is_in)))
    return found


def scaled_noise(monkeypatch, factor):
    sound = noise.add_noise
    monkeypatch.setattr(noise, "add_noise", lambda total, keys, deviation: sound(total, keys, deviation * jnp.float32(factor)))


@pytest.fixture(scope="module")
def sound(canaries):
    return verdicts(canaries(), 5)


def test_sound_runs_stay_below_the_claim(sound):
    assert all(verdict.passes for verdict, _ in sound)
    assert min(verdict.primary.epsilon for verdict, _ in sound) > 0.8, "an audit without power would pass everything"


def test_the_noise_of_sound_runs_has_its_variance(sound):
    assert min(p_value for _, p_value in sound) > 1e-4


def test_half_the_noise_is_caught(canaries, monkeypatch):
    scaled_noise(monkeypatch, 0.5)
    found = verdicts(canaries(), 5)
    assert sum(verdict.primary.refutes for verdict, _ in found) >= 4


# Half the noise is the least of what refutes a claim, and these are more.
@pytest.mark.slow
def test_noise_for_the_mean_on_the_sum_is_caught(canaries, monkeypatch):
    scaled_noise(monkeypatch, 1 / 20_000)
    assert all(verdict.primary.refutes for verdict, _ in verdicts(canaries(), 3))


@pytest.mark.slow
def test_a_clip_that_is_off_is_caught(canaries, monkeypatch):
    monkeypatch.setattr(Flat, "weights", lambda *_: jnp.ones_like)
    assert all(verdict.primary.refutes for verdict, _ in verdicts(canaries(), 3))


@pytest.mark.slow
def test_no_noise_is_caught(canaries, monkeypatch):
    scaled_noise(monkeypatch, 0.0)
    assert all(verdict.primary.refutes for verdict, _ in verdicts(canaries()))


@pytest.mark.parametrize("factor", [pytest.param(2**0.5, marks=pytest.mark.slow), 1.1])
def test_too_much_noise_is_seen_by_its_variance_alone(canaries, monkeypatch, factor):
    """Drawn on two devices and summed, or scaled a tenth too far: private, and not what was stated."""
    scaled_noise(monkeypatch, factor)
    for verdict, p_value in verdicts(canaries(), 3):
        assert verdict.passes and p_value < 1e-6


def test_a_dirac_canary_is_clipped_to_the_norm_on_its_own_coordinate(canaries, monkeypatch):
    scaled_noise(monkeypatch, 0.0)
    attack = canaries(canaries=150)
    is_in = attack.coins(RootSecret.from_seed(1))
    np.testing.assert_allclose(attack.scores(RootSecret.from_seed(1), is_in), is_in * (1 - MARGINS["float32"]), rtol=1e-6)


def test_coins_are_fair_and_their_own(canaries):
    attack = canaries()
    first, second = (attack.coins(RootSecret.from_seed(seed)) for seed in (1, 2))
    assert abs(first.mean() - 0.5) < 0.02 and abs((first == second).mean() - 0.5) < 0.02
