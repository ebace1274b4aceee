"""A run whose clipping norm adapts and whose telemetry is released: what each step clips to, adds and shows, replay and forks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping.clipped_sum import clipped_sum
from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.mechanism.clip import AdaptiveClip, Flat, flat_weights
from dpx.mechanism.noise import gaussian
from dpx.mechanism.telemetry import ReleasedTelemetry, SecretTelemetry
from dpx.randomness import RootSecret
from dpx.training import loop, session

from .conftest import declare, make_rows, opened

CLIP = AdaptiveClip(clipping_norm=0.1, target_quantile=0.3, learning_rate=1.0, count_noise_multiplier=4.0)
SHOWN = ReleasedTelemetry(noise_multiplier=2.0, loss_limit=50.0)
STEPS, SEED = 4, 5


def synthetic(directory):
    return Data(
        name="synthetic",
        source=Synthetic(documents=60, words_per_document=80, states=16),
        vocabulary=Vocabulary(size=256),
        sequence_length=16,
        directory=directory,
        heldout_fraction=0.2,
        public_fraction=0.2,
    )


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    def make(**changes):
        data = synthetic(str(tmp_path_factory.getbasetemp() / "data"))
        schedule = Schedule(evaluate_every=100, evaluation_rows=32, checkpoint_every=2)
        return declare(**({"data": data, "steps": STEPS, "schedule": schedule, "clip": CLIP, "telemetry": SHOWN, "seed": SEED} | changes))

    return make


def train(experiment, path, fork=None):
    with opened(experiment, RunFolder(path, fork=fork)) as run:
        return jax.tree.map(np.array, session.train(run).state), run.step


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    return path, *train(experiment(), path)


def lines(path, name):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def test_each_norm_follows_from_the_noisy_count_of_the_step_before(whole):
    released, private = lines(whole[0], "release/telemetry.jsonl"), lines(whole[0], "private/metrics.jsonl")
    norms = [line["clipping_norm"] for line in released] + [float(whole[1].clip)]
    assert norms[0] == pytest.approx(0.1) and len(set(norms)) == STEPS + 1
    secret = RootSecret.from_seed(SEED)
    for step, seen in enumerate(private):
        clipped = seen["grad/clipped_fraction"] * seen["train/examples"]
        noise = 2.0 * float(gaussian(jnp.asarray(secret.key("count_noise", step)), 1, 1)[0, 0])
        within = (seen["train/examples"] / 2 - clipped + noise) / 10 + 0.5
        assert norms[step + 1] == pytest.approx(norms[step] * np.exp(-(within - 0.3)), rel=1e-4)


def test_a_step_adds_noise_for_the_norm_it_clipped_to(whole):
    path, final, _ = whole
    size = sum(leaf.size for leaf in jax.tree.leaves(final.params))
    for released, seen in zip(lines(path, "release/telemetry.jsonl"), lines(path, "private/metrics.jsonl"), strict=True):
        assert seen["grad/noise_norm"] * 10 == pytest.approx(0.5 * released["clipping_norm"] * np.sqrt(size), rel=0.02)


def test_the_loss_that_is_released_is_the_mean_with_noise(whole):
    secret = RootSecret.from_seed(SEED)
    for released, seen in zip(lines(whole[0], "release/telemetry.jsonl"), lines(whole[0], "private/metrics.jsonl"), strict=True):
        noise = float(gaussian(jnp.asarray(secret.key("telemetry_noise", released["step"] - 1)), 2, 1)[0, 0])
        centred = seen["train/examples"] * (seen["train/loss"] - 25)
        assert released["loss"] == pytest.approx((centred + 2**0.5 * 2 * 25 * noise) / 10 + 25, rel=1e-3)
        assert released.keys() == {"epoch", "step", "clipping_norm", "loss", "mlm_accuracy", "ledger"}


def test_everything_released_is_charged_as_one_release(whole):
    claim = json.loads((whole[0] / "release" / "privacy.json").read_text())
    (run,) = claim["ledger"]["segments"]
    assert (run["count_noise_multiplier"], run["telemetry_noise_multiplier"], run["steps"]) == (4.0, 2.0, [[0, STEPS]])
    (item,) = claim["ledger"]["events"]
    assert item["count"] == STEPS
    assert item["event"]["event"]["noise_multiplier"] == pytest.approx((0.5**-2 + 4.0**-2 + 2.0**-2) ** -0.5)


def test_no_step_is_compiled_anew(whole):
    assert whole[2].accumulate._cache_size() == whole[2].finish._cache_size() == 1


def test_a_replayed_run_has_the_same_norms_and_bits(experiment, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        once = loop.one_step

        def mortal(runtime, epoch, secret, step, state):
            if step == 3:
                raise KeyboardInterrupt
            return once(runtime, epoch, secret, step, state)

        patch.setattr(loop, "one_step", mortal)
        with pytest.raises(KeyboardInterrupt):
            train(experiment(), tmp_path)
    final, _ = train(experiment(), tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(final), jax.tree.leaves(whole[1]), strict=True))
    released = [[line | {"ledger": None} for line in lines(path, "release/telemetry.jsonl")] for path in (tmp_path, whole[0])]
    assert released[0] == released[1]


@pytest.mark.slow
def test_a_fork_takes_the_norm_along_and_a_parent_without_one_is_refused(experiment, whole, tmp_path):
    train(experiment(steps=3), tmp_path / "fork", fork=f"{whole[0]}@2")
    (forked,) = lines(tmp_path / "fork", "release/telemetry.jsonl")
    assert forked["step"] == 3 and forked["clipping_norm"] == lines(whole[0], "release/telemetry.jsonl")[2]["clipping_norm"]
    with pytest.raises(ConfigError, match="does not fit this config, because its clip"):
        train(experiment(steps=3, clip=Flat(clipping_norm=0.1), telemetry=SecretTelemetry()), tmp_path / "flat", fork=f"{whole[0]}@2")


# Slow: a run with such norms is trained above, and each method clips in tests/clipping.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["vmap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ghost", "book_keeping"))])
def test_every_method_clips_to_a_norm_known_only_when_it_runs(micro, method):
    _, objective = micro
    params, batch = jax.jit(lambda key, rows: (objective.init(key), objective.batch(key, rows)))(
        np.asarray([0, 1], np.uint32), make_rows(5)
    )

    @jax.jit
    def total(limit):
        found = clipped_sum(objective.losses, params, batch, weights=CLIP.weights(limit), method=method, checked=False)
        return found.total, clipped_sum(objective.losses, params, batch, weights=flat_weights(0.05), method=method, checked=False).total

    adaptive, flat = total(jnp.float32(0.05))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), adaptive, flat)
    assert float(jnp.linalg.norm(total(jnp.float32(0.1))[0]["embeddings"]["word"])) > float(jnp.linalg.norm(flat["embeddings"]["word"]))
    assert total._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
