"""The adaptive norm: what a step clips to, what moves it, and how far one example can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.declaration import ConfigError
from dpx.mechanism.clip import RANGE, AdaptiveClip, Flat
from dpx.mechanism.dp_sgd import NoPrivacy
from dpx.mechanism.noise import gaussian
from dpx.randomness import RootSecret
from dpx.training.step import make_step
from tests.training.conftest import declare

CLIP = AdaptiveClip(clipping_norm=0.1, target_quantile=0.7, learning_rate=0.5, count_noise_multiplier=6.0)
SECRET = RootSecret.from_seed(9)
BATCH = jnp.float32(10)


NEXT = jax.jit(CLIP.next_clipping_norm)


def following(norm, examples, clipped, step=0, non_finite=0.0):
    counts = {"units": jnp.float32(examples), "clipped": jnp.float32(clipped), "non_finite": jnp.float32(non_finite)}
    key = jnp.asarray(CLIP.draw(SECRET, step, norm))
    return float(NEXT(jnp.float32(norm), counts, key, BATCH))


def test_the_norm_moves_by_the_noisy_fraction_as_stated():
    noise = 0.5 * 6.0 * float(gaussian(jnp.asarray(SECRET.key("count_noise", 3)), 1, 1)[0, 0])
    # Eight drawn, three of them longer than the norm: five halves up, three halves down, over the expected ten.
    within = (5 * 0.5 - 3 * 0.5 + noise) / 10 + 0.5
    assert following(0.2, 8, 3, step=3) == pytest.approx(0.2 * np.exp(-0.5 * (within - 0.7)), rel=1e-5)


def test_one_example_moves_the_count_by_a_half_at_most():
    def count(*arguments, **more):
        return np.log(following(1.0, *arguments, **more)) / -0.5 * 10

    base = count(8, 3)
    # One more within, one more beyond, one replaced, one whose gradient is not finite.
    assert count(9, 3) - base == pytest.approx(0.5, abs=1e-3)
    assert count(9, 4) - base == pytest.approx(-0.5, abs=1e-3)
    assert count(8, 4) - base == pytest.approx(-1.0, abs=1e-3)
    assert count(9, 3, non_finite=1.0) - base == pytest.approx(0.0, abs=1e-3)


def test_the_count_noise_has_its_own_key_at_every_step():
    keys = {tuple(np.asarray(CLIP.draw(SECRET, step, 0.1))) for step in range(50)}
    assert len(keys) == 50
    assert tuple(SECRET.key("noise", 0)) not in keys
    noise = [np.log(following(1.0, 0, 0, step=step)) / -0.5 + 0.2 for step in range(400)]
    assert np.std(noise) * 10 == pytest.approx(3.0, rel=0.15)


def test_the_norm_finds_the_quantile_of_what_it_sees():
    rng, norm = np.random.default_rng(0), 0.1
    lengths = rng.lognormal(0.0, 0.5, 1000)
    clip = AdaptiveClip(clipping_norm=0.1, target_quantile=0.7, learning_rate=0.2, count_noise_multiplier=10.0)
    for step in range(120):
        counts = {"units": 1000.0, "clipped": float(np.sum(lengths > norm)), "non_finite": 0.0}
        counts = {name: jnp.float32(value) for name, value in counts.items()}
        key = jnp.asarray(clip.draw(SECRET, step, norm))
        norm = float(clip.next_clipping_norm(jnp.float32(norm), counts, key, jnp.float32(1000)))
    assert norm == pytest.approx(np.quantile(lengths, 0.7), rel=0.05)


def test_noise_alone_cannot_drive_the_norm_out_of_range():
    assert following(0.1 * RANGE, 1e6, 1e6) == pytest.approx(0.1 * RANGE)


def test_the_norm_stops_at_the_smallest():
    clip = AdaptiveClip(clipping_norm=1e-5, learning_rate=1.0)
    counts = {"units": jnp.float32(1e6), "clipped": jnp.float32(0), "non_finite": jnp.float32(0)}
    moved = clip.next_clipping_norm(jnp.float32(1e-5), counts, jnp.asarray(clip.draw(SECRET, 0, jnp.float32(1e-5))), BATCH)
    assert float(moved) == pytest.approx(1e-6)


def test_only_an_adaptive_norm_of_a_private_run_is_state(micro):
    _, objective = micro
    for changes in ({}, {"clip": CLIP, "mechanism": NoPrivacy()}, {"clip": CLIP}):
        experiment = declare(**changes)
        state = jax.eval_shape(make_step(experiment.one_step, objective, experiment.mesh.make(), 2).init, np.zeros(2, np.uint32), None)
        assert (state.clip is None) == (len(changes) != 1)
    for clip in (Flat(clipping_norm=0.1), CLIP):
        assert (
            clip.draw(SECRET, 0, None) is None and clip.next_clipping_norm(None, {}, None, BATCH) is None and clip.step_metrics(None) == {}
        )
        assert float(clip.in_force(None)) == pytest.approx(0.1)
    assert float(CLIP.in_force(jnp.float32(7))) == 7.0


@pytest.mark.parametrize(
    "wrong", [{"target_quantile": 1.0}, {"learning_rate": 0.0}, {"count_noise_multiplier": 0.0}, {"clipping_norm": -1.0}]
)
def test_values_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"clip.{name}="):
        AdaptiveClip(**({"clipping_norm": 1.0} | wrong))
