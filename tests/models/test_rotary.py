"""The arithmetic of decoders with rotary positions against traced programs, how they start, and what is refused."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.cost.memory import Trains, forward_matmul_flops, step_memory
from dpx.cost.traced import matmul_flops, temporary_bytes
from dpx.declaration import ConfigError
from dpx.mechanism.clip import flat_weights
from dpx.models.families import Gemma, Llama
from dpx.models.lora import add_adapters
from dpx.models.rotary_layers import rates
from dpx.randomness import path_name
from dpx.statement import outside_code
from dpx.task.declared_task import CausalLanguageModel, MaskedLanguageModel
from dpx.task.objective import objective
from tests.clipping.batches import SPECIAL
from tests.clipping.families import ROTARY, subject

SMALL = Llama(name="test", layers=2, width=16, heads=4, key_value_heads=1, head_dim=6, feed_forward=20, positions=32)
# The fields that a Gemma has too.
_SHARED = {field.name for field in dataclasses.fields(SMALL)} & {field.name for field in dataclasses.fields(Gemma)} - {"family"}
WORDS, CAUSAL = 50, CausalLanguageModel()
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def _batch(of, examples: int, length: int):
    scalar, ids = jax.ShapeDtypeStruct((examples,), jnp.int32), jax.ShapeDtypeStruct((examples, length), jnp.int32)
    return jax.eval_shape(of.batch, KEY, dict.fromkeys(("length", "segment_start", "record", "label"), scalar) | {"tokens": ids})


@pytest.mark.parametrize("family", [name for name in ROTARY if "choices" not in name])
def test_shapes_and_products_are_those_of_the_program(family):
    of = subject(family)
    params = jax.eval_shape(of.init, KEY)
    found = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert found == of.task.parameter_shapes(of.model, of.vocabulary_size)
    products = matmul_flops(lambda params, batch: of.losses(params, batch)[0], params, _batch(of, 1, 12))
    outputs = of.task.pooled_outputs
    assert products == forward_matmul_flops(of.model, of.vocabulary_size, 12, 12, pooled_outputs=outputs)


@pytest.mark.parametrize(("family", "start"), [pytest.param(Llama, 1, marks=pytest.mark.slow), (Gemma, 0)])
def test_it_starts_as_declared(family, start):
    model = family(**{name: getattr(SMALL, name) for name in _SHARED})
    params = jax.jit(objective(model, CAUSAL, 500, SPECIAL).init)(jax.random.PRNGKey(0))
    assert all(np.all(params["layers"][name]["scale"] == start) for name in ("attention_norm", "feed_forward_norm"))
    # Of a normal cut at two deviations 0.88 of one is left.
    assert np.std(params["embeddings"]["word"]) == pytest.approx(0.88 * model.initialiser_range, rel=0.03)


def test_every_dense_map_takes_an_adapter_and_no_rank_above_a_matrix():
    shapes = jax.eval_shape(objective(SMALL, CAUSAL, WORDS, SPECIAL).init, KEY)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    added = add_adapters(params, jax.random.key(0), rank=2, alpha=4.0, targets=("*",))["layers"]["lora"]
    assert set(added) == {"query", "key", "value", "attention_out", "gate", "up", "down"}
    with pytest.raises(ConfigError, match=r"^rank=7: is not possible for a matrix of shape \(16, 6\)"):
        add_adapters(params, jax.random.key(0), rank=7, alpha=4.0, targets=("key",))
    with pytest.raises(ConfigError, match="^gat: does not match any target of adapters. The nearest are gate"):
        add_adapters(params, jax.random.key(0), rank=2, alpha=4.0, targets=("gat",))


def test_long_waves_are_divided_and_short_ones_kept():
    scaled = dataclasses.replace(SMALL, head_dim=64, rotary_scaling="llama3", rotary_factor=8.0, rotary_original_positions=256)
    ratio = rates(scaled, 10_000.0, is_scaled=True) / rates(scaled, 10_000.0, is_scaled=False)
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(1 / 8) and np.all(np.diff(ratio) <= 0) and len(set(ratio)) > 2


def test_it_is_dpx_own_code():
    assert outside_code.packages_of(SMALL) == ()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "least"), [("book_keeping", 0.8), ("traced", 0.9)])
def test_a_microbatch_takes_at_most_what_is_planned(method, least):
    model, examples, length, words = dataclasses.replace(SMALL, layers=4, width=64, head_dim=16, feed_forward=160, positions=64), 16, 64, 64
    of = objective(model, CAUSAL, words, SPECIAL)

    def summed(params, batch):
        return dpx.clipped_sum(of.losses, params, batch, weights=flat_weights(1.0), checked=False, method=method).total

    parameters = sum(math.prod(shape) for shape in CAUSAL.parameter_shapes(model, words).values())
    sizes = {"vocabulary_size": words, "sequence_length": length, "masked_positions": length, "microbatch": examples, "shards": 1}
    expected = step_memory(model, Trains(parameters), method=method, **sizes)
    found = temporary_bytes(summed, jax.eval_shape(of.init, KEY), _batch(of, examples, length))
    assert least < found / (expected.microbatch - expected.accumulator) < 1.15


# The products of a fused stack are of one type in every family: tests/clipping/test_cost.py has a decoder.
@pytest.mark.slow
def test_a_step_in_bfloat16_multiplies_in_bfloat16():
    sizes = {"layers": 4, "width": 768, "heads": 12, "key_value_heads": 4, "head_dim": 64, "feed_forward": 2048, "positions": 128}
    of = objective(dataclasses.replace(SMALL, **sizes, dtype="bfloat16"), CAUSAL, 32_000, SPECIAL)

    def summed(params, batch):
        return dpx.clipped_sum(of.losses, params, batch, weights=flat_weights(1.0), checked=False).total

    arguments = jax.eval_shape(of.init, KEY), _batch(of, 4, 128)
    assert 0 < matmul_flops(summed, *arguments, dtype=jnp.float32) < 0.01 * matmul_flops(summed, *arguments)


def test_only_attention_by_the_formula_is_computed_again():
    """Of its fused product, cuDNN's or XLA's, the backward pass needs what a second forward pass would give."""

    def again(attention):
        of = objective(dataclasses.replace(SMALL, attention=attention), CAUSAL, WORDS, SPECIAL)
        return str(jax.make_jaxpr(of.losses)(jax.eval_shape(of.init, KEY), _batch(of, 2, 8))).count("prevent_cse=")

    assert again("explicit") == again("xla") + 1 > 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "sizes must be positive"),
        ({"key_value_heads": 0}, "sizes must be positive"),
        ({"key_value_heads": 3}, "model.key_value_heads=3: does not divide 4 heads"),
        ({"head_dim": 5}, "model.head_dim=5"),
        ({"window": 0}, "model.window=0: is not a number of tokens"),
        ({"rotary_factor": 0.5}, "model.rotary_factor=0.5: is below 1"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(SMALL, **changes)


def test_a_task_that_it_cannot_be_trained_on_is_refused():
    with pytest.raises(ConfigError, match="a causal decoder cannot read words after the masked word"):
        MaskedLanguageModel(next_sentence=False).parameter_shapes(SMALL, WORDS)
