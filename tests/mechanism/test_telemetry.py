"""Released loss and accuracy: how far one example moves them, and the noise that hides it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping.groups import ClippedSum
from dpx.declaration import ConfigError
from dpx.mechanism.discrete_gaussian import DiscreteGaussian
from dpx.mechanism.dp_sgd import NoPrivacy
from dpx.mechanism.noise import gaussian
from dpx.mechanism.telemetry import ReleasedTelemetry, SecretTelemetry
from dpx.privacy.closed_form import joint
from dpx.randomness import RootSecret
from dpx.task.declared_task import Classification
from tests.training.conftest import declare

TELEMETRY = ReleasedTelemetry(noise_multiplier=5.0, loss_limit=8.0)
TASK = declare().task
SECRET = RootSecret.from_seed(2)


def sums(losses, correct, predicted, counted):
    counts = {"mlm_correct": jnp.asarray(correct, jnp.float32), "mlm_predicted": jnp.asarray(predicted, jnp.float32)}
    result = ClippedSum(None, None, jnp.asarray(losses, jnp.float32), counts, jnp.asarray(counted))
    return {name: float(value) for name, value in TELEMETRY.centred_sums(TASK, result).items()}


@pytest.mark.parametrize(("loss", "moved"), [(0.0, -4.0), (3.0, -1.0), (8.0, 4.0), (1e9, 4.0), (-2.0, -4.0)])
def test_one_example_moves_the_loss_by_half_the_limit_at_most(loss, moved):
    assert sums([loss], [0], [4], [True])["released_loss"] == moved


def test_accuracy_is_a_fraction_of_each_example():
    assert sums([0, 0, 0], [4, 1, 0], [4, 4, 0], [True] * 3)["released_mlm_accuracy"] == pytest.approx(0.5 - 0.25 - 0.5)


def test_one_predicted_word_is_all_or_nothing():
    assert sums([0, 0], [1, 0], [1, 1], [True] * 2)["released_mlm_accuracy"] == 0.5 - 0.5
    assert sums([0], [1], [1], [True])["released_mlm_accuracy"] == 0.5


def test_a_label_is_right_or_wrong():
    task = Classification(classes=2)
    counts = {"correct": jnp.asarray([1.0, 1.0, 0.0])}
    result = ClippedSum(None, None, jnp.zeros(3), counts, jnp.asarray([True] * 3))
    assert float(ReleasedTelemetry().centred_sums(task, result)["released_" + task.metric]) == 0.5 + 0.5 - 0.5


def test_a_release_is_the_sum_and_its_own_noise_over_the_expected_batch():
    key = jnp.asarray(TELEMETRY.draw(SECRET, 7))
    assert np.array_equal(key, SECRET.key("telemetry_noise", 7))
    noise = np.asarray(gaussian(key, 2, 1))[:, 0]
    counts = {"released_loss": jnp.float32(-6), "released_mlm_accuracy": jnp.float32(2.5)}
    found = TELEMETRY.step_metrics(TASK.metric, counts, key, jnp.float32(20))
    assert float(found["released/loss"]) == pytest.approx((-6 + 2**0.5 * 5 * 4 * noise[0]) / 20 + 4, rel=1e-5)
    assert float(found["released/mlm_accuracy"]) == pytest.approx((2.5 + 2**0.5 * 5 / 2 * noise[1]) / 20 + 0.5, rel=1e-5)


def test_what_is_not_counted_moves_nothing():
    assert sums([7, np.nan], [4, 4], [4, 4], [False, False]) == {"released_loss": 0.0, "released_mlm_accuracy": 0.0}


def test_noise_has_the_stated_deviation_and_a_key_of_its_own():
    found, zero = {"loss": [], "mlm_accuracy": []}, {name: jnp.float32(0) for name in ("released_loss", "released_mlm_accuracy")}
    released = jax.jit(lambda key: TELEMETRY.step_metrics(TASK.metric, zero, key, jnp.float32(20)))
    for step in range(300):
        for name, value in released(jnp.asarray(TELEMETRY.draw(SECRET, step))).items():
            found[name.removeprefix("released/")].append(float(value))
    # sqrt(2) * 5 times half the range, over the expected batch; jointly that is a noise multiplier of 5.
    for name, width in (("loss", 8.0), ("mlm_accuracy", 1.0)):
        assert np.std(found[name]) == pytest.approx(2**0.5 * 5 * width / 2 / 20, rel=0.15)
        assert np.mean(found[name]) == pytest.approx(width / 2, abs=width * 0.06)
    assert abs(np.corrcoef(found["loss"], found["mlm_accuracy"])[0, 1]) < 0.25
    assert joint(2**0.5 * 5, 2**0.5 * 5) == pytest.approx(5)


def test_secret_telemetry_releases_nothing():
    telemetry = SecretTelemetry()
    assert telemetry.ranges(TASK.metric) == {} and telemetry.draw(SECRET, 0) is None and telemetry.centred_sums(TASK, None) == {}
    assert (
        telemetry.step_metrics(TASK.metric, {}, None, jnp.float32(1)) == TELEMETRY.step_metrics(TASK.metric, {}, None, jnp.float32(1)) == {}
    )


def test_combinations_without_a_claim_are_refused():
    with pytest.raises(ConfigError, match="telemetry=released: mechanism=none makes no claim"):
        declare(telemetry=ReleasedTelemetry(), mechanism=NoPrivacy())
    with pytest.raises(ConfigError, match="telemetry=released: the noise of released values is in float32"):
        DiscreteGaussian().check(declare(telemetry=ReleasedTelemetry(), mechanism=DiscreteGaussian()))
