"""Rows of new tokens: the table in two parts computes what the whole one does, and its new rows alone are clipped exactly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.declaration import ConfigError
from dpx.models.shape import grown, joined, with_means
from dpx.models.trained import LORA, ROWS, Adapters, Everything, Rows, either
from dpx.task.declared_task import CausalLanguageModel
from tests.clipping.batches import parameters
from tests.clipping.exactness import assert_exact, case
from tests.clipping.families import rows, subject

# Ids of the batches of these tests are from 5 to 11: tables are parted before the eighth row.
FAMILIES = ["llama_tied", "llama", "decoder", "decoder_untied", "llama_classifier", "bert_classifier", "gemma3"]
# Tied and untied, with words to tell and with labels.
QUICK = ("decoder_untied", "bert_classifier")
SELECTIONS = {"rows": ROWS, "beside adapters": either(LORA, ROWS), "all": None}


@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES])
def test_a_table_in_two_parts_is_the_table(family: str):
    whole = subject(family)
    of = subject(family, new_rows=whole.vocabulary_size - 8)
    params = parameters(whole)
    parted: Any = {**params, "embeddings": {**params["embeddings"]}}
    parted["embeddings"] |= dict(zip(("word", "new"), jnp.split(params["embeddings"]["word"], [8]), strict=True))
    if "decoder" in params:
        parted |= dict(zip(("decoder", "decoder_new"), jnp.split(params["decoder"], [8]), strict=True))
    assert jax.tree.map(jnp.shape, jax.eval_shape(of.init, jax.random.PRNGKey(0))) == jax.tree.map(jnp.shape, parted)
    found, wanted = jax.jit(of.losses)(parted, rows(of)), jax.jit(whole.losses)(params, rows(whole))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    shapes = of.task.parameter_shapes(of.model, of.vocabulary_size)
    assert {path: leaf.shape for path, leaf in _by_path(parted).items()} == shapes
    back = joined({path: np.asarray(leaf) for path, leaf in _by_path(parted).items()})
    assert all(np.array_equal(leaf, _by_path(params)[path]) for path, leaf in back.items()) and back.keys() == _by_path(params).keys()


def _by_path(tree: Any) -> dict[str, Any]:
    from dpx.files.weights import by_path

    return by_path(tree)


@pytest.mark.parametrize(
    "method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.slow), pytest.param("traced", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("trained", ["beside adapters", "all", pytest.param("rows", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama_tied", *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES if one != "llama_tied")])
def test_new_rows_are_clipped_exactly(family: str, trained: str, method: str):
    """A tied table is looked up and decoded: its norm has the products of both uses."""
    of = subject(family)
    given = case(family, with_adapters=trained == "beside adapters", new_rows=of.vocabulary_size - 8, layers=1)
    assert_exact(given, SELECTIONS[trained], method)
    gradients, _ = given.truth()
    assert any(np.any(one["embeddings"]["new"]) for one in gradients) and any(np.any(one["embeddings"]["word"]) for one in gradients)


def test_each_new_row_is_the_mean():
    word, decoder = np.arange(8, dtype=np.float32).reshape(4, 2), np.ones((4, 2), np.float32)
    found = with_means({"embeddings/word": word, "decoder": decoder}, {"embeddings/new": (3, 2), "decoder_new": (3, 2), "x": (1,)})
    assert found["embeddings/new"].tolist() == [[3.0, 4.0]] * 3 and found["decoder_new"].tolist() == [[1.0, 1.0]] * 3
    assert joined(found)["embeddings/word"].shape == (7, 2) and joined({"x": word}) == {"x": word}


def test_what_has_no_new_row_is_refused():
    with pytest.raises(ConfigError, match="model.new_tokens=mean: the tokenizer has 12 tokens, and the checkpoint's table already has 16"):
        grown(12, 16)
    of = subject("llama_tied")
    for train in (Rows(), Adapters(rank=1, alpha=1.0, rows="new")):
        with pytest.raises(ConfigError, match="train.rows=new: the table has no rows for new tokens. Add model.new_tokens=mean"):
            train.require_fits(of.model)
        train.require_fits(subject("llama_tied", new_rows=2).model)
    Everything().require_fits(of.model)
    with pytest.raises(ConfigError, match="model.new_rows=2: the head of masked words has no rows of its own"):
        subject("bert", new_rows=2).model.parameter_shapes(12)
    assert CausalLanguageModel().parameter_shapes(subject("llama", new_rows=2).model, 12)["decoder_new"] == (2, 16)
