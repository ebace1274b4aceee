"""Numbers and several labels: metrics beside libraries', exactly clipped gradients, and targets that rows lack."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpx.clipping.clipped_sum import clipped_sum
from dpx.data.schema import UNKNOWN
from dpx.declaration import ConfigError
from dpx.models.families import Llama
from dpx.models.shape import Bert, Decoder
from dpx.models.trained import LAST_LAYER
from dpx.task.declared_targets import MultiLabel, Regression, pearson, ranks
from dpx.task.objective import objective
from dpx.training.microbatch import synthetic_rows
from tests.clipping.batches import SPECIAL, VOCABULARY, bert
from tests.clipping.exactness import Case, assert_exact
from tests.clipping.families import ROBERTA, decoder

LLAMA = {"name": "test", "layers": 1, "width": 8, "heads": 2, "key_value_heads": 1, "head_dim": 4, "feed_forward": 12, "positions": 32}
TASKS = {"regression": Regression(mean=2.5, scale=1.5), "multi_label": MultiLabel(labels=3)}


def rows_of(task: Any, examples: int = 5) -> dict[str, np.ndarray]:
    """Rows of which the last has no target, and the second lacks one of its labels."""
    rows, drawn = synthetic_rows(task, examples, 12, VOCABULARY), np.random.default_rng(3)
    if isinstance(task, Regression):
        return rows | {"target": drawn.uniform(0, 5, examples).astype(np.float32), "has_target": np.arange(examples) < examples - 1}
    rows["labels"] = drawn.integers(0, 2, (examples, task.labels)).astype(np.int32)
    rows["labels"][1, 0] = rows["labels"][-1] = UNKNOWN
    return rows


def subject(task: Any, model: Any) -> Any:
    of: Any = objective(model, task, VOCABULARY, SPECIAL)
    return of, of.batch(np.zeros(2, np.uint32), rows_of(task))


SLOW = pytest.mark.slow
MODELS = [
    pytest.param(bert(), None, "book_keeping", id="bert-all"),
    pytest.param(decoder(), LAST_LAYER, "book_keeping", id="decoder-last_layer"),
    pytest.param(bert(**ROBERTA), None, "ghost", id="roberta-all", marks=SLOW),
    pytest.param(bert(), LAST_LAYER, "ghost", id="bert-last_layer", marks=SLOW),
    pytest.param(Llama(**LLAMA), None, "book_keeping", id="llama-all", marks=SLOW),
]


@pytest.mark.parametrize(("model", "selection", "method"), MODELS)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_sums_are_clipped_exactly(task, model: Bert | Decoder | Llama, selection, method):
    """Beside float64 gradients of one example at a time; the third example is padding, the last has no target and a gradient of zero."""
    of, batch = subject(task, model)
    assert_exact(Case.build(of, batch), selection, method)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_target_that_a_row_lacks_adds_exactly_nothing(task):
    of, batch = subject(task, bert(layers=1))
    params = jax.jit(of.init)(np.zeros(2, np.uint32))
    weights = lambda norms_B: jnp.ones_like(norms_B)  # noqa: E731
    summed = jax.jit(lambda params, batch: clipped_sum(of.losses, params, batch, weights=weights))
    all_rows, first = (summed(params, part) for part in (batch, {name: values[:-1] for name, values in batch.items()}))
    assert all_rows.losses_B[-1] == 0 and all_rows.norms_B[-1] == 0 and bool((all_rows.norms_B[:-1] > 0).all())
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8), all_rows.total, first.total)
    if isinstance(task, MultiLabel):
        # The mean is over the labels that the row has.
        logits_BM, target_BM = np.asarray(jax.jit(of.logits)(params, batch)), np.asarray(batch["labels"])
        known = [np.logaddexp(0, -logits_BM[1, place] if target_BM[1, place] else logits_BM[1, place]) for place in (1, 2)]
        np.testing.assert_allclose(all_rows.losses_B[1], np.mean(known), rtol=1e-5)
        np.testing.assert_array_equal(all_rows.counts["with_labels"], [1, 1, 1, 1, 0])
    else:
        error_B = (np.asarray(jax.jit(of.outputs)(params, batch))[:, 0] - np.asarray(batch["target"])) / task.scale
        np.testing.assert_allclose(all_rows.losses_B[:-1], np.square(error_B[:-1]), rtol=1e-5)


def of_values(output_nM: np.ndarray, target_nM: np.ndarray, has_nM: np.ndarray) -> np.ndarray:
    return np.stack([output_nM, target_nM, has_nM], axis=1)


def test_correlations_and_errors_of_numbers():
    drawn, task = np.random.default_rng(0), Regression(mean=2.0, scale=2.0)
    target_n = drawn.integers(0, 11, 200) / 2
    output_n = target_n + drawn.normal(0, 1, 200).round(1)
    has_n = drawn.random(200) < 0.8
    squared = np.square((output_n - target_n) / task.scale)[has_n].sum()
    totals = {"loss": squared, "squared_error": squared, "with_target": has_n.sum(), "examples": 200.0}
    measured = task.metrics(totals | {"values": of_values(output_n[:, None], target_n[:, None], has_n[:, None])})
    asked = output_n[has_n], target_n[has_n]
    assert measured["pearson"] == pytest.approx(stats.pearsonr(*asked).statistic)
    assert measured["spearman"] == pytest.approx(stats.spearmanr(*asked).statistic)
    assert measured["rmse"] == pytest.approx(np.sqrt(np.square(asked[0] - asked[1]).mean()))
    assert measured["constant_rmse"] == pytest.approx(asked[1].std())
    mean = stats.ttest_1samp(np.square(asked[0] - asked[1]), 0).confidence_interval(0.95)
    assert (measured["rmse_low"], measured["rmse_high"]) == pytest.approx((np.sqrt(mean.low), np.sqrt(mean.high)), rel=2e-3)
    np.testing.assert_array_equal(ranks(output_n), stats.rankdata(output_n))
    assert set(task.metrics(totals)) == {"loss", "rmse"}, "a step keeps no outputs"
    assert task.baselines(target_n[:, None], None) == {"constant": 0.0}


@pytest.mark.parametrize(("one", "other"), [([0.1] * 4, [0.0, 1.0, 2.0, 3.0]), ([], []), ([3.0], [4.0])])
def test_a_constant_has_no_correlation(one, other):
    assert pearson(np.array(one), np.array(other)) == 0.0


def test_f1_and_subset_accuracy_of_several_labels():
    task = MultiLabel(labels=3)
    target_nM = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 0, 0]])
    output_nM = np.array([[2.0, -1, -1], [1, -1, -1], [-1, -1, 1], [1, -1, 1], [0, -1, -1]])
    has_nM = np.ones((5, 3))
    has_nM[1, 1] = 0
    totals: dict[str, Any] = {"loss": 2.0, "correct": 3.0, "with_labels": 5.0, "examples": 5.0}
    totals["values"] = of_values(output_nM, target_nM, has_nM)
    measured = task.metrics(totals)
    # By label: right 3, 0, 1; true 4, 0, 1; answered 3, 0, 2.
    assert measured["micro_f1"] == pytest.approx(8 / 10)
    assert measured["macro_f1"] == pytest.approx(np.mean([6 / 7, 2 / 3])), "a label that neither occurs nor is answered has no F1"
    assert measured["subset_accuracy"] == 3 / 5 and measured["loss"] == 2 / 5
    # Always the first label: 4 right, 5 true, 5 answered.
    assert measured["constant_micro_f1"] == pytest.approx(8 / 10)
    assert measured["constant_macro_f1"] == pytest.approx(np.mean([8 / 9, 0, 2 / 6]))
    answers = np.where(has_nM > 0, target_nM, np.nan)
    assert task.baselines(answers, None) == {"most_frequent_labels": 3 / 5}, "a label that a row lacks contradicts no answer"


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Regression(mean=float("nan"), scale=1.0), "task.mean=nan: is not a number"),
        (lambda: Regression(mean=0.0, scale=0.0), "task.scale=0.0: is not a positive number"),
        (lambda: MultiLabel(labels=0), "task.labels=0: there is no label"),
    ],
)
def test_declarations_that_cannot_be_trained_are_refused(declare, message):
    with pytest.raises(ConfigError, match=message):
        declare()
