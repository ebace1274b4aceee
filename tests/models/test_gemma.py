"""A Gemma against what transformers computes, its arithmetic against traced programs, and its clipping against one example at a time."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.claim import outside_code
from dpx.cost.memory import Trains, step_memory
from dpx.cost.traced import matmul_flops, temporary_bytes
from dpx.declaration import ConfigError
from dpx.init.weights import nested
from dpx.mechanism.clip import flat_weights
from dpx.models.gemma import Gemma
from dpx.parameter_path import path_name
from dpx.task.declarations import CausalLanguageModel, Classification, MaskedLanguageModel
from dpx.task.objective import objective
from dpx.task.one_example import OfExamples
from tests.clipping.batches import SPECIAL
from tests.clipping.exactness import SELECTIONS, Case, assert_exact
from tests.clipping.families import rows

from .gemma_cases import LOGITS, MODELS, VOCABULARY, leaves, tokens

SMALL = Gemma(name="test", layers=2, width=16, heads=4, key_value_heads=1, head_dim=6, feed_forward=20, positions=32)
WORDS = 50
CAUSAL, CLASSES = CausalLanguageModel(), Classification(classes=3)
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    params = jax.tree.map(jnp.asarray, nested(leaves(MODELS[name])))
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.vmap(lambda tokens_T: MODELS[name].token_logits(params, tokens_T, 9)))(tokens())
    with np.load(LOGITS) as expected:
        assert set(expected.files) == set(MODELS)
        np.testing.assert_allclose(found, expected[name], atol=1e-5, rtol=1e-5)
    assert found.shape == (*tokens().shape, VOCABULARY) and np.std(found) > 0.1


def slow(*values):
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize(
    ("task", "trained", "changes"),
    [
        (CAUSAL, None, {}),
        *slow((CLASSES, None, {}), (CAUSAL, None, {"key_value_heads": 2}), (CAUSAL, "top", {}), (CLASSES, "last_layer", {})),
    ],
)
def test_it_is_clipped_exactly_and_without_copies(task, trained, changes):
    of = objective(dataclasses.replace(SMALL, **changes), task, WORDS, SPECIAL)
    assert isinstance(of, OfExamples)
    case = Case.build(of, rows(of))
    taken = dpx.clipped_grad(of.one, has_aux=True, clipping_norm=1.0).explain(case.params, case.batch)
    assert {one.route for one in taken}.isdisjoint({"copies"})
    assert {one.path for one in taken if one.route == "elementwise"} == {path for path in _shapes(of) if path.endswith("scale")}
    assert_exact(case, SELECTIONS.get(trained), "traced")


def _shapes(of) -> dict[str, tuple[int, ...]]:
    return of.task.parameter_shapes(of.model, of.vocabulary_size)


@pytest.mark.parametrize("task", [CAUSAL, CLASSES])
def test_shapes_and_products_are_those_of_the_program(task):
    model, outputs = SMALL, task.pooled_outputs
    params = jax.eval_shape(objective(model, task, WORDS, SPECIAL).init, KEY)
    found = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert found == task.parameter_shapes(model, WORDS)

    def logits(params, tokens_T):
        return model.class_logits(params, tokens_T, tokens_T, 5) if outputs else model.token_logits(params, tokens_T, 12)

    products = matmul_flops(logits, params, jax.ShapeDtypeStruct((12,), jnp.int32))
    assert products == model.forward_flops(WORDS, 12, outputs)


def test_it_starts_as_declared():
    params = SMALL.init(jax.random.PRNGKey(0), 500, 0)
    assert all(not np.any(params["layers"][name]["scale"]) for name in ("attention_norm", "feed_forward_norm"))
    # Of a normal cut at two deviations 0.88 of one is left.
    assert np.std(params["embeddings"]["word"]) == pytest.approx(0.88 * SMALL.initialiser_range, rel=0.03)


def test_bfloat16_matrices_are_computed_in_bfloat16_beside_float32_scales():
    params = jax.eval_shape(lambda key: SMALL.init(key, WORDS, 0), KEY)
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    for path in (narrow["layers"]["attention_norm"], narrow["layers"]["feed_forward_norm"], narrow["final_norm"]):
        path["scale"] = jax.ShapeDtypeStruct(path["scale"].shape, jnp.float32)
    found = jax.eval_shape(lambda params: SMALL.token_logits(params, jnp.arange(8), 8), narrow)
    assert (found.shape, found.dtype) == ((8, WORDS), jnp.bfloat16)


def test_it_is_dpx_own_code():
    assert outside_code.packages_of(SMALL) == ()


@pytest.mark.slow
def test_a_microbatch_takes_what_the_compiler_says():
    model, examples, length, words = dataclasses.replace(SMALL, layers=4, width=64, head_dim=16, feed_forward=160, positions=64), 16, 64, 64
    of, scalar = objective(model, CAUSAL, words, SPECIAL), jax.ShapeDtypeStruct((examples,), jnp.int32)
    ids = jax.ShapeDtypeStruct((examples, length), jnp.int32)
    batch = jax.eval_shape(of.batch, KEY, {"tokens": ids, "length": scalar, "segment_start": scalar, "record": scalar})

    def summed(params, batch):
        return dpx.clipped_sum(of.losses, params, batch, weights=flat_weights(1.0), checked=False, method="traced").total

    parameters = sum(math.prod(shape) for shape in _shapes(of).values())
    sizes = {"vocabulary_size": words, "sequence_length": length, "masked_positions": length, "microbatch": examples, "shards": 1}
    expected = step_memory(model, Trains(parameters), method="traced", **sizes)
    assert 0.9 < temporary_bytes(summed, jax.eval_shape(of.init, KEY), batch) / (expected.microbatch - expected.accumulator) < 1.15


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "sizes must be positive"),
        ({"key_value_heads": 0}, "sizes must be positive"),
        ({"key_value_heads": 3}, "model.key_value_heads=3: does not divide 4 heads"),
        ({"head_dim": 5}, "model.head_dim=5"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(SMALL, **changes)


def test_a_task_that_it_cannot_be_trained_on_is_refused():
    with pytest.raises(ConfigError, match="a causal decoder cannot read words after the masked word"):
        MaskedLanguageModel(next_sentence=False).parameter_shapes(SMALL, WORDS)
