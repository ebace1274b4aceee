"""dpx's own tasks for a model of one example: an example's loss does not depend on other examples or on its padding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping.clipped_sum import clipped_sum
from dpx.declaration import ConfigError
from dpx.models.model_protocol import ExampleModel
from dpx.models.trainable import split
from dpx.models.trained import top
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice
from dpx.task.mlm import Special
from dpx.task.objective import objective
from dpx.training.microbatch import synthetic_rows

VOCABULARY, LENGTH, EXAMPLES = 24, 8, 4
SPECIAL = Special(0, 1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Bag(ExampleModel):
    """Words, a product and a table."""

    causal: bool = True  # type: ignore[misc]
    name: str = "bag"
    positions: int = LENGTH

    def init(self, key, vocabulary_size, outputs):
        word, out = jax.random.split(key)
        return {"word": jax.random.normal(word, (vocabulary_size, 6)), "out": jax.random.normal(out, (6, outputs or vocabulary_size))}

    def token_logits(self, params, tokens_T, length):
        return jnp.tanh(params["word"][tokens_T]) @ params["out"]

    def class_logits(self, params, tokens_T, segment_T, length):
        is_real_T = (jnp.arange(len(tokens_T)) < length)[:, None]
        return jnp.tanh((params["word"][tokens_T] * is_real_T).sum(0)) @ params["out"]


@pytest.mark.parametrize(
    ("task", "causal"),
    [
        (CausalLanguageModel(), True),
        (MaskedLanguageModel(next_sentence=False, max_masked_positions=3), False),
        (Classification(classes=3), True),
    ],
    ids=["causal_lm", "mlm", "classification"],
)
def test_a_task_of_dpx_is_trained_exactly_by_tracing(task, causal):
    subject = objective(Bag(causal=causal), task, VOCABULARY, SPECIAL)
    params, key = jax.jit(subject.init)(np.zeros(2, np.uint32)), np.zeros(2, np.uint32)
    rows = synthetic_rows(task, EXAMPLES, LENGTH, VOCABULARY)
    batch = subject.batch(key, rows)

    @jax.jit
    def found(params, batch):
        weights = lambda norms_B: 0.1 / jnp.maximum(norms_B, 0.1)  # noqa: E731
        sums = [clipped_sum(subject.losses, params, batch, weights=weights, method=method) for method in ("traced", "vmap")]
        longer = subject.batch(key, rows | {"tokens": jnp.pad(rows["tokens"], ((0, 0), (0, 3)))})
        return sums, subject.losses(params, longer)[0], subject.answers(batch)

    (traced, reference), longer_B, (answers_BM, is_asked_BM) = found(params, batch)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=3e-5, atol=1e-6), traced, reference)
    assert set(traced.counts) == set(task.counts) and answers_BM.shape == is_asked_BM.shape and np.asarray(is_asked_BM).any()
    if causal:
        np.testing.assert_allclose(longer_B, traced.losses_B, rtol=1e-5)
    assert task.parameter_shapes(Bag(causal=causal), VOCABULARY) == {name: leaf.shape for name, leaf in params.items()}


class Stack(Bag):
    """Layers below `layers/`, of which it knows one stack."""

    def init(self, key, vocabulary_size, outputs):
        return super().init(key, vocabulary_size, outputs) | {"layers": {"mix": jax.random.normal(key, (3, 6, 6))}}

    def token_logits(self, params, tokens_T, length):
        x_T6 = jax.lax.scan(lambda x_T6, layer: (jnp.tanh(x_T6 @ layer["mix"]), None), params["word"][tokens_T], params["layers"])[0]
        return x_T6 @ params["out"]


def test_frozen_layers_are_run_by_a_model_that_knows_nothing_of_them():
    subject: Any = objective(Stack(), CausalLanguageModel(), VOCABULARY, SPECIAL)
    params, key = jax.jit(subject.init)(np.zeros(2, np.uint32)), np.zeros(2, np.uint32)
    batch = subject.batch(key, synthetic_rows(subject.task, EXAMPLES, LENGTH, VOCABULARY))
    trained, rests = split(params, top(1))

    @jax.jit
    def found(params, trained, rests, batch):
        weights = lambda norms_B: 0.1 / jnp.maximum(norms_B, 0.1)  # noqa: E731
        options = {"weights": weights, "method": "traced"}
        whole = clipped_sum(subject.losses, params, batch, **options)
        return whole.losses_B, clipped_sum(subject.losses, trained, batch, frozen=rests, **options)

    losses_B, of_top = found(params, trained, rests, batch)
    np.testing.assert_allclose(of_top.losses_B, losses_B, rtol=1e-6)
    assert of_top.total["layers"]["mix"].shape == (1, 6, 6) and np.any(of_top.total["layers"]["mix"])


def test_what_its_head_cannot_give_is_refused():
    for task, model in ((MultipleChoice(choices=2), Bag()), (MaskedLanguageModel(next_sentence=True), Bag(causal=False))):
        with pytest.raises(ConfigError, match="model=bag"):
            objective(model, task, VOCABULARY, SPECIAL)
    with pytest.raises(ConfigError, match="a causal decoder cannot read words"):
        MaskedLanguageModel(next_sentence=False).parameter_shapes(Bag(), VOCABULARY)
    with pytest.raises(ConfigError, match="an encoder can read the token"):
        CausalLanguageModel().parameter_shapes(Bag(causal=False), VOCABULARY)
