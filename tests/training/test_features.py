"""If only the head is trained, the encoder reads each text once: the run is the same, and each row gets its own features."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dpx
from dpx.data.prepare import prepare
from dpx.data.tokenizer import SpecialIds
from dpx.files.results import read_results
from dpx.models.shape import Bert, Decoder
from dpx.task.declared_task import MultipleChoice
from dpx.task.objective import objective as make_objective
from dpx.training import features
from dpx.training.frozen import draw
from tests.processes import COARSE

from ..composed import composed
from .sharing import run_job

HEAD = ["model=micro", "model.layers=1", "task=classification", "data=synthetic_labels", "data.source.examples=200", "steps=4", "seed=7"]
HEAD += ["train=last_layer", "length_buckets=[16]", "microbatch=8", "batch_schedule.size=16", "schedule.evaluation_rows=32"]
HEAD += ["schedule.checkpoint_every=2", "noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp", "privacy.delta=1e-4", COARSE]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return f"data.directory={tmp_path_factory.mktemp('data')}"


def ended(path: Path):
    found = dpx.load(path)
    metrics = [json.loads(line) for line in (path / "private" / "metrics.jsonl").read_text().splitlines()]
    seen = [(line["train/loss"], line["grad/example_norm"], line.get("train/tokens")) for line in metrics]
    return found.params, found.privacy, seen, read_results(path / "private")


def are_equal(first, second) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    assert run_job(composed(*HEAD, data), path)
    assert not (path / "private" / features.FOLDER).exists(), "of no more use"
    return ended(path)


@pytest.mark.slow
def test_the_run_is_that_of_reading_texts_at_every_step(whole, data, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "are_constant", lambda *_: False)
    assert run_job(composed(*HEAD, data), tmp_path / "run")
    params, privacy, seen, results = ended(tmp_path / "run")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole[0], params)
    assert results.heldout == pytest.approx(whole[3].heldout, rel=1e-5), "held-out rows too"
    assert whole[1]["spent"] == privacy["spent"] and whole[1]["mechanism"] == privacy["mechanism"]
    np.testing.assert_allclose([line[:2] for line in whole[2]], [line[:2] for line in seen], rtol=1e-5)
    assert {tokens for *_, tokens in whole[2]} == {None} and all(tokens for *_, tokens in seen)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["damaged", "kept", "lost", "of other rows"])
def test_a_run_that_was_killed_ends_with_the_same_bits(whole, data, tmp_path, monkeypatch, loss):
    calls, compute = [], features._compute
    monkeypatch.setattr(features, "_compute", lambda *given: calls.append(1) or compute(*given))
    path = tmp_path / "run"
    assert not run_job(composed(*HEAD, data), path, until=3)
    folder = path / "private" / features.FOLDER
    array, about = folder / "features.npy", folder / "features.json"
    if loss == "lost":
        array.unlink()
    elif loss == "damaged":
        array.write_bytes(array.read_bytes()[:-4] + b"\0\0\0\1")
    elif loss == "of other rows":
        about.write_text(json.dumps(json.loads(about.read_text()) | {"store": "another"}))
    assert run_job(composed(*HEAD, data), path)
    assert are_equal(ended(path)[0], whole[0]) and len(calls) == (1 if loss == "kept" else 2)


# Slow: a sum that changed on replay meets a fresh key in test_forward_noise.py and tests/job/test_accidents.py.
@pytest.mark.slow
def test_features_that_are_others_now_meet_no_key_that_was_used(data, tmp_path, monkeypatch):
    """As on another machine: a replayed step gives another sum, and the run resumes under a new key."""
    path, compute = tmp_path / "run", features._compute
    run = composed(*HEAD, data, "steps=6", "schedule.checkpoint_every=3")
    assert not run_job(run, path, until=5)

    def slightly_other(*given):
        compute(*given)
        values = np.load(given[-1] / "features.npy")
        np.save(given[-1] / "features.npy", values * np.float32(1 + 1e-6))

    (path / "private" / features.FOLDER / "features.npy").unlink()
    monkeypatch.setattr(features, "_compute", slightly_other)
    assert run_job(run, path)
    spent = dpx.load(path).privacy["spent"]
    assert (spent["steps"], spent["charged_steps"]) == (6, 8), "steps 3 and 4 were drawn twice, each time under its own key"


@pytest.fixture(scope="module")
def read(data, tmp_path_factory):
    """(experiment, objective, parameters, store, the store with features)."""
    experiment, *_ = composed(*HEAD, data, "privacy.unit=document", "privacy.rows_per_unit_max=2", "privacy.unit_mode=sample_units")
    store = prepare(experiment.data, experiment.privacy)
    of: Any = make_objective(experiment.model, experiment.task, store.manifest.vocabulary_size, store.manifest)
    params = jax.jit(of.init)(np.zeros(2, np.uint32))
    folder = tmp_path_factory.mktemp("read")
    return of, params, store, features.of_store(of, params, store, experiment.widths, experiment.mesh.make(), folder)


def test_features_that_another_encoder_made_are_not_taken(read, data, tmp_path, monkeypatch):
    of, params, store, with_features = read
    experiment, *_ = composed(*HEAD, data)
    other = params | {"embeddings": jax.tree.map(lambda leaf: leaf + 1, params["embeddings"])}
    calls, compute = [], features._compute
    monkeypatch.setattr(features, "_compute", lambda *given: calls.append(1) or compute(*given))
    found = [features.of_store(of, one, store, experiment.widths, experiment.mesh.make(), tmp_path) for one in (params, params, other)]
    assert len(calls) == 2 and np.array_equal(found[1]._features_N, with_features._features_N)
    assert not np.array_equal(found[2]._features_N, with_features._features_N)


@pytest.mark.parametrize("rows_per_example", [1, 2])
def test_what_was_read_is_of_the_row_that_is_asked_for(read, rows_per_example):
    of, params, store, with_features = read
    asked = [5, 0, 17, 5]
    rows, found = (one.examples("protected", asked, rows_per_example, 64) for one in (store, with_features))
    assert found.keys() == (rows.keys() - {"tokens", "segment_start", "length"}) | {"features"}
    np.testing.assert_array_equal(found["label"], rows["label"])
    flat = {name: values.reshape(-1, *values.shape[(rows_per_example > 1) + 1 :]) for name, values in rows.items() if name != "is_padding"}
    expected = jax.jit(of.features)(params, of.batch(np.zeros(2, np.uint32), flat))
    is_there = ~rows.get("is_padding", np.zeros(len(asked), bool)).ravel()
    np.testing.assert_allclose(found["features"].reshape(expected.shape)[is_there], expected[is_there], rtol=1e-5, atol=1e-6)


def test_rows_of_other_splits_stay_texts(read):
    *_, store, with_features = read
    assert with_features.rows("heldout", [0]).keys() == store.rows("heldout", [0]).keys()


def test_the_head_makes_the_same_of_what_was_read(read):
    of, params, store, with_features = read
    key, asked = np.zeros(2, np.uint32), np.arange(6)
    batches = [of.batch(key, one.rows("protected", asked)) for one in (store, with_features)]
    head = {name: leaf for name, leaf in params.items() if name not in ("embeddings", "layers")}
    logits = jax.jit(of.logits)
    texts, kept = logits(params, batches[0]), logits(head, batches[1])
    np.testing.assert_allclose(texts, kept, rtol=1e-5, atol=1e-6)
    assert texts.shape == (6, 2)


SIZES: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "positions": 16}


@pytest.mark.parametrize(
    "model",
    [Bert(name="bert", **SIZES), pytest.param(Decoder(name="decoder", **SIZES), marks=pytest.mark.slow)],
    ids=lambda model: model.name,
)
def test_each_choice_has_features(model):
    of: Any = make_objective(model, MultipleChoice(choices=3), 32, SpecialIds(0, 1, 2, 3, 4))
    params, generator = jax.jit(of.init)(np.zeros(2, np.uint32)), np.random.default_rng(0)
    rows = {"tokens": generator.integers(5, 32, (4, 3, 8)), "segment_start": np.full((4, 3), 8), "length": generator.integers(3, 9, (4, 3))}
    rows |= {"label": np.zeros(4, np.int32), "record": np.arange(4)}
    batch = of.batch(np.zeros(2, np.uint32), rows)
    found = jax.jit(of.features)(params, batch)
    assert found.shape == (4, 3, model.width)
    kept = of.batch(np.zeros(2, np.uint32), {"features": found, "label": rows["label"], "record": rows["record"]})
    logits = jax.jit(of.logits)
    np.testing.assert_allclose(logits(params, kept), logits(params, batch), rtol=1e-5, atol=1e-6)


READ_AT_EVERY_STEP = [("+model.dropout=0.1",), *(pytest.param(line, marks=pytest.mark.slow) for line in (("train=bias",), ("task=mlm",)))]


@pytest.mark.parametrize("changes", [(), *READ_AT_EVERY_STEP], ids=" ".join)
def test_what_changes_from_step_to_step_is_read_at_every_step(changes):
    given = HEAD if "task=mlm" not in changes else [line for line in HEAD if "labels" not in line and "examples" not in line]
    experiment, *_ = composed(*given, *changes)
    special = SpecialIds(0, 1, 2, 3, 4)
    of = make_objective(experiment.model, experiment.task, 64, special)
    trained, _ = draw(experiment.train, of, np.zeros(2, np.uint32))
    assert features.are_constant(of, trained) is (not changes)
