"""A classifier on labelled texts through the same jobs: trained with dp_sgd, canaries and two lengths, measured again."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from omegaconf import OmegaConf

import dpx
from dpx import config
from dpx.config import recipes
from dpx.data.prepare import prepare, store_of
from dpx.data.store import VOCABULARY
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.interop.export import export
from dpx.job.released_jobs import Evaluate
from dpx.training.evaluation import of_run, spread
from tests.composed import composed
from tests.planned import plan
from tests.processes import COARSE
from tests.training.sharing import run_job

CLASSES = ["model=micro", "model.layers=1", "task=classification", "data=synthetic_labels", "data.source.examples=400"]
CLASSES += ["privacy.delta=1e-4", "accountant=rdp", "noise=multiplier", "noise.noise_multiplier=1.0", "length_buckets=[16]", COARSE]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("classes")
    overrides = CLASSES + ["steps=2", "microbatch=8", "batch_schedule.size=32", "schedule.evaluation_rows=64"]
    overrides += ["telemetry=released", "audit=canaries", "audit.gradients=40", "audit.sequences=10", "audit.primary.guesses=10"]
    cfg = recipes.compose([*overrides, f"data.directory={root}/data"])
    experiment, job = config.build(cfg)
    folder = RunFolder(root / "finished", OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg))))
    job(experiment, folder)
    return experiment, folder


def _read(folder, *place):
    return json.loads(folder.path.joinpath(*place).read_text())


def test_a_run_is_measured_by_its_labels_against_always_the_same_class(trained):
    experiment, folder = trained
    results, store = _read(folder, "private", "results.json"), prepare(experiment.data, experiment.privacy)
    assert results["metric"] == "accuracy" and results["heldout"].keys() == {"loss", "accuracy", "macro_f1", "micro_f1", "matthews"}
    assert results["heldout"]["micro_f1"] == pytest.approx(results["heldout"]["accuracy"])
    there = store.manifest.rows["heldout"]
    labels = store.rows("heldout", spread(there, min(64, there)))["label"]
    assert results["baselines"].keys() == {"most_frequent_class", "untrained"}
    assert results["baselines"]["most_frequent_class"] == np.bincount(labels).max() / len(labels)
    Evaluate()(experiment, folder)
    again = _read(folder, "private", "evaluation.json")
    assert again["accuracy"] == results["heldout"]["accuracy"] and again["loss"] == pytest.approx(results["heldout"]["loss"])
    assert again["most_frequent_class_accuracy"] == results["baselines"]["most_frequent_class"]


def test_weights_are_never_read_by_another_vocabulary(trained):
    """As after a row was added to the file: the vocabulary is learnt from it, and every token would be another."""
    experiment, folder = trained
    data = experiment.data
    changed = dataclasses.replace(data, source=dataclasses.replace(data.source, seed=1))
    uses = (
        Evaluate(),
        lambda one, folder: of_run(one.model, one.task, one.vocabulary_size, one.data, one.privacy, folder.release / "params"),
        lambda experiment, folder: export(experiment.fitted, folder.path, folder.path / "elsewhere"),
    )
    for use in uses:
        with pytest.raises(ConfigError, match="has another vocabulary than the weights were trained with: .* data.vocabulary.path=<"):
            use(dataclasses.replace(experiment, data=changed), folder)
    path = prepare(data, experiment.privacy).folder / VOCABULARY
    restored = dataclasses.replace(changed, vocabulary=dataclasses.replace(data.vocabulary, path=str(path)))
    assert store_of(restored, experiment.privacy, folder.release / "params").manifest.rows["heldout"] > 0


def test_what_a_file_is_sorted_by_does_not_choose_the_rows_that_are_measured():
    for there, count in ((2500, 1000), (2000, 1000), (7, 3)):
        rows = spread(there, count)
        assert len(set(rows)) == count and (np.diff(rows) > 0).all() and 0 <= rows.min() and rows.max() < there
        np.testing.assert_array_equal(rows, spread(there, count), "the same in every run")
    sorted_by_label, alternating = np.arange(2500) >= 1250, np.arange(2000) % 2
    assert abs(sorted_by_label[spread(2500, 1000)].mean() - 0.5) < 0.01, "of the first rows none would be of the second class"
    assert abs(alternating[spread(2000, 1000)].mean() - 0.5) < 0.05, "of every second row neither"
    np.testing.assert_array_equal(spread(64, 64), np.arange(64))
    assert spread(64, 0).size == spread(0, 0).size == 0


def test_the_claim_is_of_labelled_rows_and_says_who_declared_the_labels(trained):
    experiment, folder = trained
    stated = _read(folder, "release", "privacy.json")
    assert stated["guarantee"] == "dp" and stated["epsilon"]["rdp"] > 0 and stated["audit"]["verdict"] == "passes"
    size = prepare(experiment.data, experiment.privacy).manifest.rows["protected"] + 50
    assert stated["declared_size"] == size and any("2 labels was declared" in line for line in stated["assumptions"])
    released = [json.loads(line) for line in (folder.release / "telemetry.jsonl").read_text().splitlines()]
    assert [line["step"] for line in released] == [1, 2] and all("accuracy" in json.dumps(line) for line in released)


def test_canaries_have_labels_of_their_own(trained):
    known = _read(trained[1], "private", "audit_canaries.json")
    assert len(known["labels"]) == len(known["tokens"]) == 10 and set(known["labels"]) <= {0, 1}


def test_how_many_texts_are_long_is_written_down_nowhere(trained):
    """Only the lengths that were declared are."""
    folder = trained[1]
    names = {key for line in (folder.private / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert not any("width" in name or "length" in name or "microbatch" in name for name in names)
    for path in (folder.release / "privacy.json", folder.release / "telemetry.jsonl"):
        told = path.read_text().replace('"sequence_length"', "")
        assert "length" not in told and "widths" not in told


def test_a_plan_counts_whole_rows():
    experiment, _ = config.build(recipes.compose([*CLASSES, "data.declared_size=2000"]))
    bare, _ = config.build(recipes.compose([*CLASSES, "data.declared_size=2000", "length_buckets=null"]))
    assert plan(experiment) == plan(bare)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["task.classes=3"], "data=synthetic_labels: its column label has 2 different values, .* Declare the task for 2"),
        (["data=synthetic"], "data.*: its rows have no column label"),
        (["task=mlm_nsp"], "data.pairs=none"),
        (["data.pairs=same_document"], "data.pairs=same_document with data=synthetic_labels.*Use data.pairs=none"),
        (["data.source.labels=[a,a]"], r"data.source.labels=\[a, a\]: the list contains a label twice"),
        (["data.source.labels=[a,1.5,b]"], r"data.source.labels=.*1.5.*: expected a list \(each text\)"),
        (["data.source.labels=[false,true]"], r"data.source.labels=.*False.*: expected a list .* in quotation marks"),
        (["length_buckets=[64]"], r"length_buckets=\[64\]: .*Use 32 or less"),
        (["length_buckets=many"], r"length_buckets=many: expected a list \(each a whole number\) or auto"),
    ],
)
def test_what_does_not_fit_stops_before_anything_runs(changes, words):
    given = [change for change in CLASSES if not ("data=synthetic" in changes and change.startswith("data.source"))]
    with pytest.raises(ConfigError, match=f"^{words}"):
        config.build(recipes.compose([*given, *changes]))


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_lengths_change_nothing_on_a_mesh_or_through_a_kill(tmp_path):
    """Texts in two lengths on four devices, by ghost clipping to an adaptive norm, killed after a step and resumed: the norms, the
    claim and the parameters equal those of texts in one length on one device."""
    run = [*CLASSES[:-1], "seed=7", "steps=4", "microbatch=4", "batch_schedule.size=32", "schedule.evaluation_rows=16", "clip=quantile"]
    run += ["noise.noise_multiplier=8.0", "clip.clipping_norm=0.5", "schedule.checkpoint_every=2", f"data.directory={tmp_path}/data"]
    spread = ["length_buckets=[16]", "clipping_method=ghost", "mesh=cpu8", "mesh.data=2", "mesh.fsdp=2", "microbatch=2"]
    whole, cut = composed(*run), composed(*run, *spread)
    assert run_job(whole, tmp_path / "whole")
    assert not run_job(cut, tmp_path / "cut", until=3)
    assert run_job(cut, tmp_path / "cut")
    params, claims = zip(
        *((found.params, found.privacy) for found in (dpx.load(tmp_path / name) for name in ("whole", "cut"))), strict=True
    )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), *params)
    assert claims[0]["spent"] == claims[1]["spent"] and claims[0]["mechanism"]["clip"] == "quantile"
    names = ("step", "grad/example_norm", "released/clipping_norm")
    lines = [(tmp_path / name / "private" / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    seen = [[[line[name] for name in names] for line in map(json.loads, of_run) if names[1] in line] for of_run in lines]
    assert len(seen[0]) == 4 and seen[0][0][2] != seen[0][3][2], "the norm moves"
    np.testing.assert_allclose(*seen, rtol=1e-4)
