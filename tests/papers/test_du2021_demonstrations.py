"""DP-FP's demonstrations on tiny models: exact recovery of words and labels, and which loss the mean gradient belongs to."""

import dataclasses
import gzip

import jax
import numpy as np
import pandas as pd
import pytest

from dpx.config import recipes
from dpx.config.declared_init import RandomStart
from dpx.models.shape import Bert
from dpx_papers.du2021 import batches, label_leak
from dpx_papers.du2021.label_leak import accuracy_bound, counts_of, dpfp_label_leak
from dpx_papers.du2021.one_step import NoisyClassifier
from dpx_papers.du2021.postprocessing_counterexample import dpfp_postprocessing_counterexample
from dpx_papers.du2021.prop2_gradient_bias import GROUPS, NoisyMean, dpfp_prop2_gradient_bias, squared_norm_of_mean

MODEL = Bert(name="one_layer", layers=1, width=16, heads=2, feed_forward=32, positions=48)
SENTENCES = (("the doctor confirmed my diagnosis", 0), ("she owes nine thousand dollars", 1), ("my film", 1))
OTHERS = ("bank", "june", "paris")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """SST-2's data group, with no files behind it until a test writes them."""
    monkeypatch.setenv("DPX_DATA", str(tmp_path))
    return dataclasses.replace(recipes.option("data", "glue_sst2"), sequence_length=16)


def rows(table):
    return table.as_json()["rows"]


def written_rows(folder, count=40):
    """A training file of made-up sentences in SST-2's columns."""
    (folder / "sst2").mkdir()
    words = "cold warm tedious lively plot actor scene never always rain river".split()
    lines = [f"{words[n % 11]} {words[n * 7 % 11]} {words[n * 5 % 11]}\t{n % 2}" for n in range(count)]
    with gzip.open(folder / "sst2" / "train.tsv.gz", "wt") as file:
        file.write("\n".join(["sentence\tlabel", *lines]) + "\n")


def counterexample(data, **changes):
    fields = {"noise_multipliers": [0.346, 1000], "numbers": ["float64"], "steps": 3, "batch_size": 6, "micro_batches": 8}
    fields |= {"sentences": SENTENCES, "other_words": OTHERS, "dp_sgd_noise_multiplier": 0.8, "seed": 0}
    return dpfp_postprocessing_counterexample(model=MODEL, init=RandomStart(), data=data, **(fields | changes))


def test_the_words_of_the_batch_and_no_others_have_a_gradient(data):
    recovery, words, verdicts = counterexample(data)()
    assert [(row["batch"], row["noise_multiplier"]) for row in rows(recovery)] == [("made up", 0.346), ("made up", 1000)]
    assert_exact(recovery)
    shown = {(row["word"], row["setting"]) for row in rows(words) if row["method"] == "DP-FP"}
    inside = {word for text, _ in SENTENCES for word in text.split()}
    assert shown == {(word, f"sigma = {s:g}") for word in inside for s in (0.346, 1000)} | {
        (w, "exactly 0: not in the batch") for w in OTHERS
    }
    assert {row["state"] for row in rows(verdicts)} == {"pass"}


@pytest.mark.slow
def test_the_words_of_every_step_of_labelled_rows_are_recovered(data, tmp_path):
    written_rows(tmp_path)
    recovery, _, _ = counterexample(data)()
    assert {row["batch"] for row in rows(recovery)} == {"made up", "glue_sst2"}
    assert_exact(recovery)


def assert_exact(recovery):
    for row in rows(recovery):
        assert (row["precision"], row["recall"], row["wrong"], row["missed"], row["exact_steps"]) == (1.0, 1.0, 0, 0, row["steps"])


def test_a_padded_row_gives_no_word_a_gradient():
    tokenizer = batches.of_vocabulary([*batches.SPECIAL_TOKENS, "seen", "padding"])
    step = batches.step_of(tokenizer, [("seen",)], [0], 8, 3)
    step.batch["tokens"][1:, 1] = tokenizer.vocabulary.index("padding")
    classifier = NoisyClassifier(MODEL, len(tokenizer.vocabulary), 2)
    params = classifier.parameters(RandomStart(), 0)
    gradient = jax.jit(jax.grad(classifier.loss))(params, step.batch, np.ones((3, MODEL.width), np.float32), 1.0)["embeddings"]["word"]
    names = {tokenizer.vocabulary[number] for number in np.flatnonzero(np.abs(gradient).max(axis=1))}
    assert names == {"[CLS]", "seen", "[SEP]"}


def test_counts_follow_from_the_bias_gradient_whatever_the_head_answers():
    rng = np.random.default_rng(0)
    for classes, answered in ((2, None), (3, None), (3, "known")):
        label_B = rng.integers(classes, size=17)
        p_BK = np.full((17, classes), 1 / classes) if answered is None else rng.dirichlet(np.ones(classes), 17)
        bias_K = (p_BK - np.eye(classes)[label_B]).mean(axis=0)
        assert counts_of(bias_K, 17, None if answered is None else p_BK) == pytest.approx(np.bincount(label_B, minlength=classes), abs=1e-9)


@pytest.fixture
def leak(data, monkeypatch):
    monkeypatch.setattr(label_leak, "sigma_of", lambda stages, epsilon, delta: {1.0: 1.09, 8.0: 0.496}[epsilon])
    fields = {"noise_multipliers": [0.346, 1000], "steps": 3, "batch_size": 6, "micro_batches": 8, "size": 67349, "dp_sgd_steps": 66}
    fields |= {"sentences": SENTENCES, "dp_sgd_batch_size": 1024, "epsilons": [1, 8], "draws": 2000, "seed": 0}
    return dpfp_label_leak(model=MODEL, init=RandomStart(), data=data, **fields)


def test_dp_fp_gives_the_label_counts(leak):
    subject = batches.made_up(SENTENCES, RandomStart(), leak.data)
    classifier = batches.classifier_of(MODEL, subject)
    found = label_leak.of_dp_fp(classifier, classifier.parameters(RandomStart(), 0), subject, leak.noise_multipliers, 0)
    assert len(found) == 4 and all(row["exact_steps"] == row["steps"] == 1 and row["largest_error"] < 1e-4 for row in found)


@pytest.mark.parametrize(("epsilon", "sigma"), [(1.0, 1.09), (8.0, 0.496)])
def test_guesses_on_dp_sgd_reach_their_bounds_and_no_further(epsilon, sigma):
    for row in label_leak.bounds(epsilon, sigma, [(1024 / 67349, 66)], 1 / (2 * 67349), 2000, 0):
        assert abs(row["accuracy"] - row["bound_by_profile"]) <= 4 * row["error"]
        assert 0.5 < row["bound_by_profile"] <= row["bound_by_epsilon"] < 1


@pytest.mark.slow
def test_dp_sgd_gives_counts_with_noise_where_dp_fp_gives_them_exactly(leak, tmp_path):
    written_rows(tmp_path)
    counts, errors, _, verdicts = map(rows, leak())
    assert {row["batch"] for row in counts} == {"made up", "glue_sst2"}
    exact = {row["method"]: row["share"] for row in errors if row["error"] == 0}
    assert exact["DP-FP, any noise"] == 1.0 > exact["DP-SGD, epsilon 8"] > exact["DP-SGD, epsilon 1"]
    assert {row["state"] for row in verdicts} == {"pass"}


def test_a_guess_is_right_as_often_as_epsilon_allows_at_most():
    assert accuracy_bound(0.0, 0.0) == 0.5 and accuracy_bound(0.0, 0.1) == pytest.approx(0.55)
    assert accuracy_bound(3.0, 0.0) == pytest.approx(np.exp(3) / (1 + np.exp(3)))
    guesses = pd.DataFrame([{"accuracy": 0.9, "error": 0.01, "bound_by_profile": 0.8, "bound_by_epsilon": 0.95}])
    over = label_leak.judged(pd.DataFrame([{"steps": 1, "exact_steps": 1}]), guesses)
    assert [part.state for part in over] == ["pass", "fail"]


def test_the_squared_norm_of_a_mean_is_unbiased_and_its_error_right():
    rng, size = np.random.default_rng(0), 30
    found = []
    for _ in range(400):
        vectors_GN = 0.3 + rng.standard_normal((GROUPS, size))
        found.append(squared_norm_of_mean(vectors_GN @ vectors_GN.T))
    squares, errors = np.array(found).T
    assert squares.mean() == pytest.approx(0.09 * size, abs=4 * squares.std() / 20)
    assert np.sqrt(np.square(errors).mean()) == pytest.approx(squares.std(), rel=0.2)


def test_a_mean_is_compared_with_its_reference_along_a_direction():
    mean, direction = NoisyMean(np.array([1.0, 0.0])), np.random.default_rng(1)
    for _ in range(2 * GROUPS):
        mean.add(np.array([1.0, 2.0]) + 0.01 * direction.standard_normal(2))
    norm, square, error, relative, _, along, along_error, in_errors = mean.against(np.array([0.0, 2.0])).values()
    assert norm == 2.0 and square == pytest.approx(1.0, abs=5 * error) and relative == pytest.approx(0.5, abs=0.02)
    assert along == pytest.approx(1.0, abs=5 * along_error) and in_errors == pytest.approx(along / along_error)


@pytest.mark.slow
def test_dp_fp_is_biased_for_the_clean_loss_and_dp_sgd_only_by_clipping(data):
    fields = {"noise_multipliers": [3.0], "draws": 96, "clipping_norm": 1.0, "warm_up": 30, "learning_rate": 1.0, "seed": 0}
    bias, verdicts = dpfp_prop2_gradient_bias(model=MODEL, init=RandomStart(), data=data, sentences=SENTENCES, **fields)()
    assert [row["state"] for row in rows(verdicts)] == ["pass", "fail", "pass"]
    clean = next(row for row in rows(bias) if row["reference"] == "clean loss")
    assert clean["relative_bias"] > clean["relative_error"]
