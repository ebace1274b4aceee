"""Noise in the forward pass: a step against float64 and one example at a time, rows that do not count, and replays."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping.rounding import MARGINS
from dpx.data.declared_data import Data, SyntheticLabels, Vocabulary
from dpx.files.array_checksums import as_text
from dpx.mechanism.clip import Flat
from dpx.mechanism.dp_fp import DpFp, clipped
from dpx.mechanism.noise import gaussian
from dpx.models.shape import Bert
from dpx.models.trained import LastLayer, Matching
from dpx.privacy.declared_privacy import Pld, Privacy
from dpx.randomness import RootSecret
from dpx.sampler import Poisson
from dpx.task.declared_task import Classification
from dpx.task.mlm import Special
from dpx.task.objective import objective as make_objective
from dpx.training import features
from dpx.training.gradient_sum import KEY, SLOT, draw_rows
from dpx.training.step import Chunk, StepInputs, as_chunk, make_step
from tests.processes import COARSE, WIDTH

from ..composed import composed
from .conftest import LENGTH, VOCABULARY, declare, make_rows
from .sharing import run_job

ZERO = np.zeros(2, np.uint32)
SECRET = RootSecret.from_seed(3)
CLASSES, NORM, DEVIATION = 3, 0.5, np.float32(0.4)
LIMIT = NORM * (1 - MARGINS["float32"])


def declared(**changes):
    """A micro classifier with dp_fp; its vectors are longer than the norm."""
    source = SyntheticLabels(examples=50, labels=["a", "b", "c"], shortest=3, longest=9, states=8)
    fields = {
        "data": Data(name="labels", source=source, vocabulary=Vocabulary(size=VOCABULARY), sequence_length=LENGTH, pairs="none"),
        "task": Classification(classes=CLASSES),
        "mechanism": DpFp(micro_batches=3),
        "privacy": Privacy(delta=1e-4, adjacency="zero_out_text"),
        "clip": Flat(clipping_norm=NORM),
        "accountant": Pld(value_discretization_interval=WIDTH),
    }
    return declare(**(fields | changes))


def rows_of(count):
    """Rows with labels, and the keys and slots of one draw."""
    labels = np.random.default_rng(5).integers(0, CLASSES, count).astype(np.int32)
    slots = np.stack([np.zeros(count), np.arange(count)], axis=1).astype(np.int32)
    return make_rows(count) | {"label": labels, KEY: DpFp().row_keys(SECRET, 0, 0, count), SLOT: slots}


class Made:
    """A step and what it needs, of one declaration."""

    def __init__(self, microbatch=4, chunk=2, **changes):
        self.experiment = declared(**changes)
        self.objective = make_objective(self.experiment.model, self.experiment.task, VOCABULARY, Special(0, 1, 2, 3, 4))
        self.step = make_step(self.experiment.one_step, self.objective, self.experiment.mesh.make(), microbatch, chunk)
        self.state = self.step.init(ZERO, None)
        self.frozen = self.step.place_frozen(self.step.draw_frozen(ZERO, None)) if self.step.has_frozen else {}
        self.params = jax.jit(self.objective.init)(ZERO)
        self.features = jax.jit(self.objective.features)

    def sums(self, rows, deviation=DEVIATION, change=lambda chunk: chunk):
        sums, capacity = self.step.zero(), self.step.chunk * self.step.rows
        inputs = StepInputs(self.step.gather(self.state.params), ZERO, ZERO, np.float32(NORM), self.frozen, deviation)
        for start in range(0, len(rows["record"]), capacity):
            chunk = as_chunk({name: value[start : start + capacity] for name, value in rows.items()}, self.step)
            sums = self.step.accumulate(sums, change(chunk), inputs)
        return sums

    def total(self, rows, **options):
        return jax.tree.map(lambda leaf: np.asarray(leaf).sum(0), self.sums(rows, **options)["gradient"])

    def checksum(self, rows, **options):
        return as_text(self.step.reduce(self.sums(rows, **options), ())["checksum"])


@pytest.fixture(scope="module")
def head():
    """The pooler and the classifier are trained, so that gradients go through the clip; the encoder is frozen."""
    return Made(train=Matching(paths=["classifier/*", "pooler/*"]))


@pytest.fixture(scope="module")
def whole():
    return Made()


@pytest.fixture(scope="module")
def last():
    """The last layer alone is trained, which reads what noise was added to."""
    return Made(train=LastLayer())


def gradients_64(params, feature_BH, labels, keys):
    """The sum over examples, one at a time in float64, of the gradients of pooler and classifier, from formulas."""
    of = {name: np.asarray(leaf, np.float64) for part in ("pooler", "classifier") for name, leaf in _named(part, params[part])}
    total = {name: np.zeros_like(value) for name, value in of.items()}
    for feature_H, label, key in zip(np.asarray(feature_BH, np.float64), labels, keys, strict=True):
        h_H = np.tanh(feature_H @ of["pooler/kernel"] + of["pooler/bias"])
        norm = np.linalg.norm(h_H)
        noise_H = np.asarray(gaussian(jnp.asarray(key), 1, len(h_H)), np.float64)[0]
        x_H = h_H * min(1.0, LIMIT / norm) + np.float64(DEVIATION) * noise_H
        logits_K = x_H @ of["classifier/kernel"] + of["classifier/bias"]
        share_K = np.exp(logits_K - logits_K.max())
        back_K = share_K / share_K.sum() - np.eye(CLASSES)[label]
        back_H = of["classifier/kernel"] @ back_K
        if norm > LIMIT:
            unit_H = h_H / norm
            back_H = LIMIT / norm * (back_H - unit_H * (unit_H @ back_H))
        back_H = back_H * (1 - h_H**2)
        total["classifier/kernel"] += np.outer(x_H, back_K)
        total["classifier/bias"] += back_K
        total["pooler/kernel"] += np.outer(feature_H, back_H)
        total["pooler/bias"] += back_H
    return total


def _named(part, tree):
    return [(f"{part}/{name}", leaf) for name, leaf in tree.items()]


def test_the_sum_is_that_of_examples_one_at_a_time_in_float64(head):
    rows = rows_of(7)
    texts = {name: value for name, value in rows.items() if name not in (KEY, SLOT)}
    feature_BH = head.features(head.params, head.objective.batch(ZERO, texts))
    expected = gradients_64(head.params, feature_BH, rows["label"], rows[KEY])
    found = head.total(rows)
    assert set(found) == {"classifier", "pooler"}
    for part, tree in found.items():
        for name, value in _named(part, tree):
            np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)


# Slow: the test before it holds the sum to examples one at a time.
@pytest.mark.slow
def test_the_encoders_gradient_is_that_of_one_example_at_a_time(whole):
    """By autodiff of a composition written out here, with the same noise."""
    rows = rows_of(3)
    texts = {name: value for name, value in rows.items() if name not in (KEY, SLOT)}

    def loss(params, batch, noise_H):
        h_BH = jnp.tanh(whole.objective.features(params, batch) @ params["pooler"]["kernel"] + params["pooler"]["bias"])
        x_BH = clipped(h_BH, np.float32(LIMIT))[0] + DEVIATION * noise_H
        logits_BK = x_BH @ params["classifier"]["kernel"] + params["classifier"]["bias"]
        return -jax.nn.log_softmax(logits_BK)[0, batch["label"][0]]

    one = jax.jit(jax.grad(loss))
    noise = [gaussian(jnp.asarray(key), 1, whole.experiment.model.width)[0] for key in rows[KEY]]
    parts = [one(whole.params, whole.objective.batch(ZERO, {n: v[b : b + 1] for n, v in texts.items()}), noise[b]) for b in range(3)]
    expected = jax.tree.map(lambda *leaves: np.sum([np.asarray(leaf, np.float64) for leaf in leaves], axis=0), *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), whole.total(rows), expected)


def test_with_the_last_layer_alone_nothing_below_the_noise_is_trained(last):
    made = last
    assert set(made.state.params) == {"classifier"} and set(made.frozen) == {"embeddings", "layers", "pooler"}
    assert features.are_constant(made.objective, made.state.params)
    rows = rows_of(5)
    texts = {name: value for name, value in rows.items() if name not in (KEY, SLOT)}
    feature_BH = made.features(made.params, made.objective.batch(ZERO, texts))
    expected = gradients_64(made.params, feature_BH, rows["label"], rows[KEY])
    for rows_read in (rows, {name: v for name, v in rows.items() if name not in features.TEXT} | {"features": np.asarray(feature_BH)}):
        found = made.total(rows_read)
        for name, value in _named("classifier", found["classifier"]):
            np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "classifier", [pytest.param("dense", marks=pytest.mark.slow), "relu", pytest.param("linear", marks=pytest.mark.slow)]
)
def test_noise_is_added_to_what_the_last_map_reads_whatever_the_head(classifier):
    model = Bert(name="micro", layers=1, width=32, heads=2, feed_forward=64, positions=32, classifier=classifier)
    made, rows = Made(model=model, train=LastLayer()), rows_of(4)
    (last,) = jax.tree.leaves({"kernel": made.state.params["classifier"].get("out", made.state.params["classifier"])["kernel"]})
    assert last.shape == (32, CLASSES) and len(jax.tree.leaves(made.state.params)) == 2
    total = made.total(rows)["classifier"]
    first, other = made.total(rows, deviation=np.float32(0))["classifier"], total
    assert not np.allclose(jax.tree.leaves(first)[1], jax.tree.leaves(other)[1])


def test_padding_contributes_exactly_zero(head):
    rows = rows_of(5)

    def with_other_padding(chunk):
        fields = {
            name: np.where(np.broadcast_to(_like(chunk.is_padding_KB, value), value.shape), value[:1, :1], value)
            for name, value in chunk.rows_KB.items()
        }
        return Chunk(fields, chunk.is_padding_KB, chunk.count)

    plain, filled = head.sums(rows), head.sums(rows, change=with_other_padding)
    for one, other in zip(jax.tree.leaves(plain["gradient"]), jax.tree.leaves(filled["gradient"]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(np.sum(plain["count"]["examples"])) == 5
    nothing = head.total({name: value[:0] for name, value in rows.items()})
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(nothing))


def _like(flags, value):
    return flags.reshape(flags.shape + (1,) * (value.ndim - flags.ndim))


def test_a_neighbour_moves_its_own_vector_alone_and_by_no_more_than_the_norm(head):
    """Under zero_out_text its vector is zero; here it is that of any other text, so twice the norm at most."""
    rows = rows_of(6)
    other = {name: value.copy() for name, value in rows.items()}
    other["tokens"][2] = rows["tokens"][5]

    @jax.jit
    def vectors(rows, deviation):
        found = []
        texts = {name: value for name, value in rows.items() if name not in (KEY, SLOT)}

        def noised(vector_BH):
            found.append(DpFp().noisy_vectors(vector_BH, rows[KEY], deviation, np.float32(LIMIT)))
            return found[-1].noisy

        head.objective.losses(head.params, head.objective.batch(ZERO, texts), None, noised)
        return found[0].noisy, found[0].clipped

    (first_BH, clipped_BH), (second_BH, moved_BH) = (vectors(one, DEVIATION) for one in (rows, other))
    is_other_B = np.arange(6) == 2
    np.testing.assert_array_equal(first_BH[~is_other_B], second_BH[~is_other_B])
    assert np.linalg.norm(np.asarray(clipped_BH, np.float64)[2]) <= NORM
    assert 0 < np.linalg.norm((np.asarray(clipped_BH, np.float64) - np.asarray(moved_BH, np.float64))[2]) <= 2 * NORM


def test_more_rows_than_fit_add_blocks_and_none_is_dropped(head):
    rows, capacity = rows_of(11), head.step.chunk * head.step.rows
    assert capacity == 8
    parts = [head.total({name: value[place] for name, value in rows.items()}) for place in (slice(capacity), slice(capacity, None))]
    for whole, *each in zip(*map(jax.tree.leaves, (head.total(rows), *parts)), strict=True):
        np.testing.assert_allclose(whole, sum(each), rtol=1e-5, atol=1e-6)
    assert float(np.sum(head.sums(rows)["count"]["examples"])) == 11


def test_a_row_that_is_not_finite_is_noise_alone_and_is_counted_so(last):
    rows = {name: v for name, v in rows_of(3).items() if name not in features.TEXT} | {"features": np.full((3, 32), 0.1, np.float32)}
    rows["features"][1] = np.nan
    sums = last.sums(rows)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(sums["gradient"]))
    assert float(np.sum(sums["count"]["non_finite"])) == 1 and float(np.sum(sums["count"]["examples"])) == 3


def test_no_noise_is_added_to_the_sum_and_the_divisor_is_the_expected_batch(head):
    rows, state = rows_of(6), head.step.init(ZERO, None)
    total = head.total(rows)
    _, metrics = head.step.finish(state, head.step.reduce(head.sums(rows), ()), None, DEVIATION, np.float32(10), np.float32(1e-2))
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(total)))
    assert float(metrics["gradient_norm"]) == pytest.approx(norm / 10, rel=1e-5) and float(metrics["noise_norm"]) == 0


def test_the_checksum_is_of_what_noise_is_added_to_and_not_of_the_noise(head):
    rows = rows_of(6)
    before = head.checksum(rows)
    no_keys = {name: np.zeros_like(value) if name == KEY else value for name, value in rows.items()}
    assert head.checksum(no_keys, deviation=np.float32(0)) == before
    for name in ("tokens", "label", "record", SLOT):
        other = {key: value.copy() for key, value in rows.items()}
        other[name].reshape(len(other[name]), -1)[4, -1 if name == SLOT else 0] += 1
        assert head.checksum(other) != before, name
    assert head.checksum({name: value[:5] for name, value in rows.items()}) != before
    assert head.checksum({name: value[::-1] for name, value in rows.items()}) != before


def test_a_step_is_draws_that_are_independent_and_may_be_empty():
    mechanism, size = DpFp(micro_batches=5), 2000
    indices, beside = draw_rows(mechanism, Poisson(), size, 0.25, SECRET, 7, is_noised=True)
    draw_n, row_n = beside[SLOT].T
    counts = np.bincount(draw_n, minlength=5)
    assert np.all(np.abs(counts - 100) < 5 * 10) and len(np.unique(indices)) < len(indices)
    for number in range(5):
        own = indices[draw_n == number]
        assert len(np.unique(own)) == len(own) and np.array_equal(row_n[draw_n == number], np.arange(len(own)))
        np.testing.assert_array_equal(beside[KEY][draw_n == number], mechanism.row_keys(SECRET, 7, number, len(own)))
    assert not np.array_equal(indices[draw_n == 0][:20], indices[draw_n == 1][:20])
    again, without = draw_rows(mechanism, Poisson(), size, 0.25, SECRET, 7, is_noised=False)
    assert np.array_equal(again, indices) and np.array_equal(without[SLOT], beside[SLOT]) and not np.any(without[KEY])
    few, beside = draw_rows(mechanism, Poisson(), size, 1e-9, SECRET, 7, is_noised=True)
    assert len(few) == 0 and beside[KEY].shape == (0, 2) and beside[SLOT].shape == (0, 2)


def test_an_empty_draw_between_others_moves_no_slot_and_no_key(monkeypatch):
    """Slots and keys go by the number of the draw, not by its place among the draws that have rows."""
    rows = {0: [4, 9], 1: [], 2: [9]}
    monkeypatch.setattr(
        "dpx.training.gradient_sum.draw",
        lambda sampler, size, probability, generator, step: np.array(rows.pop(min(rows)), np.int64),
    )
    mechanism = DpFp(micro_batches=3)
    indices, beside = draw_rows(mechanism, Poisson(), 20, 0.1, SECRET, 2, is_noised=True)
    assert indices.tolist() == [4, 9, 9] and beside[SLOT].tolist() == [[0, 0], [0, 1], [2, 0]]
    np.testing.assert_array_equal(beside[KEY][2], SECRET.key("forward_noise", 2, 2, 0))
    assert len({tuple(key) for key in beside[KEY]}) == 3, "a row in two draws has two noises"


@pytest.mark.parametrize("label", [-1, CLASSES, 2**31 - 1])
def test_a_label_behind_the_mask_is_not_read_whatever_it_is(head, label):
    rows = rows_of(5)

    def spoilt(chunk):
        labels = np.where(chunk.is_padding_KB, np.int32(label), chunk.rows_KB["label"])
        return Chunk(chunk.rows_KB | {"label": labels}, chunk.is_padding_KB, chunk.count)

    plain, found = head.sums(rows)["gradient"], head.sums(rows, change=spoilt)["gradient"]
    jax.tree.map(np.testing.assert_array_equal, plain, found)


def test_the_model_is_evaluated_without_noise(head):
    rows = {name: value for name, value in rows_of(4).items() if name not in (KEY, SLOT)}
    batch = head.objective.batch(ZERO, rows)
    losses = jax.jit(head.objective.losses)
    first, second = (losses(head.params, batch)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


FP = ["model=micro", "model.layers=1", "task=classification", "data=synthetic_labels", "data.source.examples=200", "steps=6", "seed=7"]
FP += ["mechanism=dp_fp", "mechanism.micro_batches=3", "privacy.adjacency=zero_out_text", "privacy.delta=1e-4", "microbatch=4"]
FP += [
    COARSE,
    "noise=target_clt",
    "noise.epsilon=2",
    "batch_schedule.size=12",
    "schedule.evaluation_rows=32",
    "schedule.checkpoint_every=3",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return f"data.directory={tmp_path_factory.mktemp('data')}"


@pytest.fixture(scope="module")
def ended(data, tmp_path_factory):
    """A run of the last layer to its end."""
    path = tmp_path_factory.mktemp("ended") / "run"
    assert run_job(composed(*FP, data, "train=last_layer"), path)
    return path


def params_of(path):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(dpx.load(path).params)]


# Slow: a killed run is replayed in test_session.py and test_kill.py.
@pytest.mark.slow
@pytest.mark.parametrize("train", ["last_layer", pytest.param("all", marks=pytest.mark.slow)])
def test_a_run_that_was_killed_ends_with_the_same_bits_and_is_charged_once(data, ended, tmp_path, train):
    run, path = composed(*FP, data, f"train={train}"), ended
    if train == "all":
        path = tmp_path / "whole"
        assert run_job(run, path)
    assert not run_job(run, tmp_path / "killed", until=5)
    assert run_job(run, tmp_path / "killed")
    whole, killed = params_of(path), params_of(tmp_path / "killed")
    assert all(np.array_equal(one, other) for one, other in zip(whole, killed, strict=True))
    stated = dpx.load(tmp_path / "killed").privacy
    assert (stated["spent"]["steps"], stated["spent"]["charged_steps"]) == (6, 6)


def test_vectors_that_are_others_now_meet_no_key_that_was_used(data, tmp_path, monkeypatch):
    """As on another machine: the replayed steps have other vectors. Their keys are not derived from the old secret again."""
    path, run = tmp_path / "run", composed(*FP, data, "train=last_layer")
    assert not run_job(run, path, until=5)
    used, compute, keys = [], features._compute, DpFp.row_keys

    def slightly_other(*given):
        compute(*given)
        values = np.load(given[-1] / "features.npy")
        np.save(given[-1] / "features.npy", values * np.float32(1 + 1e-6))

    def watched(self, secret, step, draw, rows):
        used.append((secret.tag, step))
        return keys(self, secret, step, draw, rows)

    (path / "private" / features.FOLDER / "features.npy").unlink()
    monkeypatch.setattr(features, "_compute", slightly_other)
    monkeypatch.setattr(DpFp, "row_keys", watched)
    assert run_job(run, path)
    stated = dpx.load(path).privacy
    assert (stated["spent"]["steps"], stated["spent"]["charged_steps"]) == (6, 8), "steps 3 and 4 are charged again"
    assert len({tag for tag, _ in used}) == 1 and {step for _, step in used} == {3, 4, 5}


# tests/privacy/test_dp_fp_claim.py holds such an account without two more runs.
@pytest.mark.slow
def test_a_parent_whose_rows_were_protected_whole_is_charged_for_their_texts(data, tmp_path):
    """With the same rows, dp_sgd before and dp_fp after: what both released of a row's text, and nothing of its label."""
    noised = [one for one in FP if not one.startswith("seed")]
    own = [one for one in noised if not one.startswith(("mechanism", "noise", "privacy.adjacency"))]
    whole = ["noise=multiplier", "noise.noise_multiplier=2.0", "accountant=pld"]
    assert run_job(composed(*own, *whole, data), tmp_path / "parent")
    child = [data, "train=last_layer", "init=run", f"init.run={tmp_path}/parent"]
    assert run_job(composed(*noised, *child), tmp_path / "child")
    assert run_job(composed(*noised, data, "train=last_layer"), tmp_path / "alone")
    parent, stated, alone = (dpx.load(tmp_path / name).privacy for name in ("parent", "child", "alone"))
    assert (stated["guarantee"], stated["adjacency"]) == ("dp", "zero_out_text")
    counts = {one["event"]["class"]: one["count"] for one in stated["ledger"]["events"]}
    assert counts == {"RevealedGaussianDpEvent": 18, "PoissonSampledDpEvent": 6}
    least = max(one["epsilon"]["pld"] for one in (parent, alone))
    assert least < stated["epsilon"]["pld"] <= parent["epsilon"]["pld"] + alone["epsilon"]["pld"]
    assert any(line.startswith("labels:") for line in stated["not_covered"])


def test_what_a_run_tells_of_its_vectors(ended):
    lines = [json.loads(line) for line in (ended / "private" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["forward/clipped_fraction"] <= 1 and line["forward/vector_norm"] > 0 for line in lines)
    assert not any(name in line for line in lines for name in ("grad/snr", "grad/clipped_fraction", "grad/noise_norm"))


# Slow: sums on a mesh are those of one device in test_step.py.
@pytest.mark.slow
def test_dp_fp_on_devices_of_a_mesh_gives_the_sum_of_one(last):
    many = Made(microbatch=2, train=LastLayer(), mesh=dataclasses.replace(last.experiment.mesh, name="four", data=4))
    rows = rows_of(9)
    for first, second in zip(jax.tree.leaves(last.total(rows)), jax.tree.leaves(many.total(rows)), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
