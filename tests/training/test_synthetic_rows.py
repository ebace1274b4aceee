"""Random rows have the form of a store's rows, for every task that can be timed or planned on them."""

import jax
import numpy as np
import pytest

from dpx.task.declared_task import CausalLanguageModel, Classification, MultipleChoice
from dpx.training.microbatch import synthetic_rows
from tests.clipping.families import subject


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("decoder", "bert_classifier", "bert_choices"))]
)
def test_a_task_learns_from_its_own_rows(family):
    of = subject(family)
    rows = synthetic_rows(of.task, 3, 16, 50)
    key = np.zeros(2, np.uint32)
    losses_B, _ = jax.jit(lambda rows: of.losses(of.init(key), of.batch(key, rows)))(rows)
    assert losses_B.shape == (3,) and np.all(np.isfinite(losses_B)) and np.all(np.asarray(losses_B) > 0)


@pytest.mark.parametrize("task", [Classification(classes=2), MultipleChoice(choices=5)])
def test_every_label_occurs_and_no_other(task):
    assert set(synthetic_rows(task, 200, 8, 50)["label"]) == set(range(task.columns(8, 50)["label"].below))


def test_texts_are_padded_to_their_lengths_and_repeat_tokens():
    assert "label" not in synthetic_rows(CausalLanguageModel(), 2, 8, 50)
    rows = synthetic_rows(MultipleChoice(choices=3), 40, 16, 50)
    assert rows["tokens"].shape == (40, 3, 16) and rows["length"].shape == (40, 3)
    assert np.array_equal(rows["tokens"] != 0, np.arange(16) < rows["length"][..., None])
    assert len(np.unique(rows["tokens"][0, 0])) < 16
