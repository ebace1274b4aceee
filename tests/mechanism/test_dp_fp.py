"""DP-FP: the clip and its derivative against float64, a draw's keys and noise, and what it is refused with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping.rounding import MARGINS
from dpx.declaration import ConfigError
from dpx.mechanism.dp_fp import DpFp, clipped
from dpx.mechanism.noise import gaussian
from dpx.models.trained import Adapters, Biases, Everything, LastLayer, Matching, OutputLayer, TopLayers
from dpx.randomness import RootSecret
from tests.composed import composed

SECRET = RootSecret.from_seed(3)
NORM = 0.5
LIMIT = NORM * (1 - MARGINS["float32"])
FP = ("model=micro", "task=classification", "data=synthetic_labels", "mechanism=dp_fp", "privacy.adjacency=zero_out_text")
FP += ("noise=target_clt", "noise.epsilon=2", "data.declared_size=1000", "privacy.delta=5e-4", "batch_schedule.size=32", "steps=20")


def vectors(rows=6, width=16, seed=0):
    scale_B = np.array([0.01, 0.1, 1.0, 10.0, 0.0, 1e-30])[:rows, None]
    return (scale_B * np.random.default_rng(seed).standard_normal((rows, width))).astype(np.float32)


def clipped_64(h_H):
    h_H = h_H.astype(np.float64)
    norm = np.linalg.norm(h_H)
    return h_H * (min(1.0, LIMIT / norm) if norm else 1.0)


def pulled_back_64(h_H, cotangent_H):
    """The transposed derivative of the clip, from its formula, applied to a cotangent."""
    h_H, cotangent_H = h_H.astype(np.float64), cotangent_H.astype(np.float64)
    norm = np.linalg.norm(h_H)
    if norm <= LIMIT:
        return cotangent_H
    unit_H = h_H / norm
    return LIMIT / norm * (cotangent_H - unit_H * (unit_H @ cotangent_H))


def test_vectors_are_clipped_one_by_one_as_in_float64():
    h_BH = vectors()
    found_BH, norms_B, is_finite_B = clipped(jnp.asarray(h_BH), np.float32(LIMIT))
    np.testing.assert_allclose(found_BH, [clipped_64(h_H) for h_H in h_BH], rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(norms_B, np.linalg.norm(h_BH.astype(np.float64), axis=1), rtol=1e-6, atol=1e-20)
    assert bool(jnp.all(is_finite_B))


def test_the_derivative_of_the_clip_is_exact():
    h_BH, cotangent_BH = vectors(), np.random.default_rng(1).standard_normal((6, 16)).astype(np.float32)
    _, pull = jax.vjp(lambda h_BH: clipped(h_BH, np.float32(LIMIT))[0], jnp.asarray(h_BH))
    expected = [pulled_back_64(*pair) for pair in zip(h_BH, cotangent_BH, strict=True)]
    np.testing.assert_allclose(pull(jnp.asarray(cotangent_BH))[0], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1.0, 1e3, 1e18])
@pytest.mark.parametrize("width", [1, 768, 4096])
def test_no_vector_is_longer_than_the_norm(scale, width):
    h_BH = (scale * np.random.default_rng(2).standard_normal((8, width))).astype(np.float32)
    found_BH, _, _ = jax.jit(clipped)(h_BH, np.float32(LIMIT))
    assert np.linalg.norm(np.asarray(found_BH, np.float64), axis=1).max() <= NORM


def test_a_vector_that_is_not_finite_is_zero_and_so_is_its_derivative():
    h_BH = vectors()
    h_BH[0, 0], h_BH[1, 1], h_BH[2, 2] = np.nan, np.inf, 1e30
    (found_BH, norms_B, is_finite_B), pull = jax.vjp(lambda h_BH: clipped(h_BH, np.float32(LIMIT)), jnp.asarray(h_BH))
    assert not np.any(is_finite_B[:3]) and np.all(is_finite_B[3:]) and np.all(found_BH[:3] == 0) and np.all(norms_B[:3] == 0)
    zeros = jax.tree.map(jnp.zeros_like, (norms_B,))[0]
    (back_BH,) = pull((jnp.ones_like(found_BH), zeros, np.zeros(6, jax.dtypes.float0)))
    assert np.all(np.isfinite(back_BH)) and np.all(back_BH[:3] == 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_row_has_the_noise_of_its_own_key(dtype):
    mechanism, h_BH = DpFp(), jnp.asarray(vectors(), dtype)
    keys = mechanism.row_keys(SECRET, 5, 2, 6)
    result = jax.jit(mechanism.noisy_vectors)(h_BH, keys, np.float32(0.7), np.float32(LIMIT))
    noise_BH = np.stack([np.asarray(gaussian(jnp.asarray(key), 1, 16))[0] for key in keys])
    expected_BH = np.asarray(clipped(h_BH.astype(jnp.float32), np.float32(LIMIT))[0]) + np.float32(0.7) * noise_BH
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    assert result.noisy.dtype == dtype and result.clipped.dtype == np.float32
    np.testing.assert_allclose(result.noisy.astype(np.float32), expected_BH, rtol=tolerance, atol=tolerance)


def test_keys_are_those_of_step_draw_and_row_and_of_no_other_use():
    mechanism = DpFp()
    keys = mechanism.row_keys(SECRET, 5, 2, 3)
    np.testing.assert_array_equal(keys, [SECRET.key("forward_noise", 5, 2, row) for row in range(3)])
    every = [tuple(key) for step in range(3) for draw in range(3) for key in mechanism.row_keys(SECRET, step, draw, 3)]
    assert len(set(every)) == 27 and mechanism.row_keys(SECRET, 0, 0, 0).shape == (0, 2)


def test_what_is_frozen_below_the_noise_decides_about_a_guarantee():
    def paths():
        return ("embeddings/word", "layers/qkv/kernel", "pooler/kernel", "classifier/kernel", "classifier/bias")

    trained: dict[Any, bool] = {
        LastLayer(): True,
        OutputLayer(): True,
        Everything(): False,
        Biases(head=True): False,
        TopLayers(layers=1): False,
    }
    for train, is_covered in trained.items():
        assert (DpFp().reasons_against(train, paths) == []) == is_covered, train
    assert DpFp().reasons_against(Matching(paths=["classifier/*"]), paths) == []
    (reason,) = DpFp().reasons_against(Matching(paths=["classifier/*", "pooler/*"]), paths)
    assert "trains pooler/kernel below the noise" in reason
    assert DpFp().reasons_against(Adapters(rank=2, alpha=4.0), paths) and DpFp().reasons_against(Matching(paths=["**"], layers=1), paths)
    assert isinstance(DpFp().trained(LastLayer()), OutputLayer) and DpFp().trained(Everything()) == Everything()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["task=mlm", "data=synthetic"], ["task=mlm", "one pooled vector", "Use task=classification"]),
        (["task=causal_lm", "model=decoder_tiny", "data=synthetic", "data.pairs=none"], ["task=causal_lm", "one pooled vector"]),
        (["model=decoder_tiny"], ["model=decoder_tiny", "one pooled vector", "BERT or RoBERTa"]),
        (["noise=target_epsilon"], ["noise=target_epsilon, train=all", "read the texts again", "Use train=last_layer"]),
        (["noise=target_epsilon", "train=top", "train.layers=1"], ["train=top", "no noise reaches a target"]),
        (["noise.epsilon=1e-12", "privacy.delta=1e-13"], ["noise.epsilon=1e-12", "no noise multiplier from", "Use a target from"]),
        (["noise.epsilon=1e308"], ["noise.epsilon=1e+308", "no noise multiplier from", "Use a target from"]),
        (["privacy.adjacency=zero_out"], ["privacy.adjacency=zero_out", "only their texts", "Use privacy.adjacency=zero_out_text"]),
        (["sampler=shuffled"], ["sampler=shuffled", "Use sampler=poisson"]),
        (["clip=normalised"], ["clip=normalised", "Use clip=flat"]),
        (["clip=quantile"], ["clip=quantile", "Use clip=flat"]),
        (["telemetry=released"], ["telemetry=released", "Use telemetry=secret"]),
        (["privacy.unit=document", "privacy.rows_per_unit_max=2"], ["privacy.rows_per_unit_max=2", "Use privacy.unit=row"]),
        (["length_buckets=[16]"], ["length_buckets", "need them to stay|needs them to stay"]),
        (["accountant=rdp"], ["accountant=rdp", "Use accountant=pld"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_before_anything_is_allocated(given, words):
    from dpx.claim.calibration import calibrate

    with pytest.raises(ConfigError) as refusal:
        experiment, *_ = composed(*FP, *given)
        calibrate(experiment.claim, 1000)
    text = str(refusal.value)
    assert "\n" not in text and all(any(one in text for one in word.split("|")) for word in words), text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["mechanism.micro_batches=0"], ["mechanism.micro_batches=0", "at least one draw", "Use 1 or more"]),
        (["noise.epsilon=0"], ["noise.epsilon=0", "Give a target above 0"]),
        (["audit=canaries"], ["audit=canaries, mechanism=dp_fp", "Use audit=none"]),
    ],
)
def test_values_that_are_none_are_refused_when_they_are_read(given, words):
    with pytest.raises(ConfigError) as refusal:
        composed(*FP, *given)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_noise_is_not_stated_by_the_batch():
    from dpx.claim.calibration import calibrate

    given = [one for one in FP if not one.startswith("noise")] + ["noise=noise_batch_ratio"]
    with pytest.raises(ConfigError, match="mechanism=dp_fp, noise=noise_batch_ratio.*Use noise=multiplier"):
        calibrate(composed(*given)[0].claim, 1000)


def test_the_limit_sets_the_noise_of_no_other_mechanism():
    from dpx.claim.calibration import calibrate

    with pytest.raises(ConfigError, match="noise=target_clt with mechanism=dp_sgd.*Use noise=target_epsilon"):
        calibrate(composed("noise=target_clt", "privacy.delta=1e-9")[0].claim, 10_000)


OTHERS_OF_THE_PAPER = [pytest.param(*row, marks=pytest.mark.slow) for row in ((1.73, 67_349, 0.346), (4.33, 67_349, 0.317))]


@pytest.mark.parametrize(("epsilon", "size", "sigma"), [(2.52, 392_702, 0.307), *OTHERS_OF_THE_PAPER])
def test_noise_by_the_central_limit_is_that_of_the_paper(epsilon, size, sigma):
    from dpx.claim.calibration import calibrate

    given = [f"noise.epsilon={epsilon}", f"data.declared_size={size}", f"privacy.delta={0.5 / size}", f"steps={3 * size // 32}"]
    calibrated = calibrate(composed(*FP, *given, "train=last_layer")[0].claim, size)
    assert calibrated.noise_multiplier is not None and round(calibrated.noise_multiplier, 3) == sigma
