"""Bytes of a step against sums worked out by hand from the shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import dpx
from dpx.cost.memory import Memory, Trains, activations, step_memory
from dpx.cost.traced import temporary_bytes
from dpx.mechanism.clip import flat_weights
from dpx.mechanism.dp_sgd import DpSgd
from dpx.mechanism.rgp import Rgp
from dpx.models.shape import Bert
from dpx.models.trained import Adapters, Biases, Everything, LastLayer, TopLayers
from dpx.task.declared_task import MaskedLanguageModel
from dpx.task.mlm import Special
from dpx.task.objective import objective
from dpx.training import frozen
from tests.models.declared import declared

KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)
TINY_BERT = declared("tiny")

# L = 2, H = 128, F = 512, A = 2; T = 8 tokens, M = 3 slots, V = 100 words, P = 1,000 parameters, b = 5 examples.
P = Trains(1000)
SIZES = {"vocabulary_size": 100, "sequence_length": 8, "masked_positions": 3, "microbatch": 5}
# 2 (8 (1280 + 1536) + 2 * 2 * 64) + 3 * 8 * 128 + 3 (200 + 256)
KEPT = 2 * (22_528 + 256) + 3_072 + 1_368
# 2 * 8 (256 + 512)
COTANGENTS = 12_288


def test_activations_of_one_example():
    assert activations(TINY_BERT, P, 100, 8, 3) == KEPT == 50_008


@pytest.mark.parametrize(
    "method, example", [("plain", 4 * KEPT), ("ghost", 4 * KEPT), ("vmap", 4 * KEPT + 4000), ("book_keeping", 4 * (KEPT + COTANGENTS))]
)
def test_each_use_on_one_device(method, example):
    found = step_memory(TINY_BERT, P, shards=1, method=method, **SIZES)
    assert found == Memory(stored=12_000, gathered=0, accumulator=4000, mechanism=0, microbatch=4000 + 5 * example, update=12_000)
    assert found.peak == 12_000 + 4000 + 4000 + 5 * example


def test_what_is_shared_and_what_is_narrow():
    narrow = dataclasses.replace(TINY_BERT, dtype="bfloat16")
    shared = step_memory(narrow, P, shards=4, method="plain", **SIZES)
    assert shared == Memory(stored=3000, gathered=2000, accumulator=4000, mechanism=0, microbatch=4000 + 5 * 2 * KEPT, update=3000)
    assert step_memory(narrow, P, shards=1, method="plain", **SIZES).gathered == 2000
    assert step_memory(TINY_BERT, P, shards=4, method="plain", **SIZES).gathered == 4000


def test_the_larger_of_a_microbatch_and_the_update_counts():
    assert Memory(stored=1, gathered=2, accumulator=4, mechanism=32, microbatch=8, update=16).peak == 55


def test_frozen_parameters_are_kept_once_and_nothing_else_of_them():
    """Biases train: no matrix's inputs and cotangents are kept; the rest is held once, in the type that is computed with."""
    bias = Trains(10, frozen=990, kernels=False)
    found = step_memory(TINY_BERT, bias, shards=1, method="book_keeping", **SIZES)
    # 2 * 8 (256 + 512) inputs less.
    example = 4 * (KEPT - COTANGENTS)
    assert found == Memory(stored=120, gathered=3960, accumulator=40, mechanism=0, microbatch=40 + 5 * example, update=120)
    one = (KEPT - COTANGENTS - 3_072 - 1_368) // 2
    assert activations(TINY_BERT, bias._replace(layers=0), 100, 8, 3) == one + 3_072 + 1_368


def test_parameters_that_are_replaced_are_constants_and_gradients_are_of_what_replaces_them():
    """A matrix of 30 x 20 in 2 layers by factors of rank 2: 2 (30 + 20) 2 numbers are summed in place of 1,200."""
    shapes = {"layers/up/kernel": (2, 30, 20), "classifier/kernel": (4, 10)}
    trains = Trains(1240).differentiated_by(shapes, Rgp(rank=2).summed_shapes(shapes))
    assert trains == Trains(1240, frozen=1200, kernels=False, summed=240, replaced=1200)
    assert Trains(1240).differentiated_by(shapes, shapes) == Trains(1240)
    extra = Rgp(rank=2).extra_memory_bytes(trains.parameters, trains.replaced)
    found = step_memory(TINY_BERT, trains, shards=1, method="book_keeping", mechanism_bytes=extra, **SIZES)
    example = 4 * (KEPT - COTANGENTS)
    # The rest of every matrix and the one with which training began, and what is computed with.
    assert extra == 2 * 4 * 1200 and Rgp(decomposes="weight").extra_memory_bytes(1240, 1200) == 4 * 1200
    assert found == Memory(stored=14_880, gathered=4 * 1200, accumulator=960, mechanism=extra, microbatch=960 + 5 * example, update=14_880)


def test_a_compilers_count_stands_in_for_the_arithmetic():
    found = Memory(stored=1, gathered=2, accumulator=4, mechanism=32, microbatch=8, update=16)
    assert found.measured(100) == dataclasses.replace(found, microbatch=104)


def test_layers_computed_again_keep_their_inputs_and_what_is_recorded():
    again = dataclasses.replace(TINY_BERT, rematerialize="layers")
    one = (KEPT - 3_072 - 1_368) // 2
    assert activations(again, P, 100, 8, 3) == 2 * 8 * 128 + one + 3_072 + 1_368
    by_cudnn = dataclasses.replace(again, attention="cudnn", dtype="bfloat16")
    assert activations(by_cudnn, P, 100, 8, 3) == activations(again, P, 100, 8, 3) - 2 * 2 * 64
    recorded, plain = (step_memory(again, P, shards=1, method=method, **SIZES).microbatch for method in ("book_keeping", "plain"))
    # Beside the input of a layer those of three more matrices, and the cotangents of all four.
    assert recorded - plain == 5 * 4 * 2 * 8 * (2 * 128 + 512 + 5 * 128 + 512)


def slow(*trains):
    return [pytest.param(train, marks=pytest.mark.slow) for train in trains]


@pytest.mark.parametrize("train", [Biases(), *slow(Everything(), LastLayer(), TopLayers(layers=1), Adapters(rank=2, alpha=4.0))])
def test_a_microbatch_takes_what_the_compiler_says(train):
    """Temporaries of the compiled sum; the compiler finds some of the room of what layers leave behind twice."""
    model, examples = Bert(name="small", layers=4, width=64, heads=4, feed_forward=256, positions=64), 16
    task = MaskedLanguageModel(next_sentence=True, max_masked_positions=8)
    of, scalar = objective(model, task, 64, Special(0, 1, 2, 3, 4)), jax.ShapeDtypeStruct((examples,), jnp.int32)
    rows = {name: scalar for name in ("segment_start", "length", "is_next", "record")}
    rows["tokens"] = jax.ShapeDtypeStruct((examples, 64), jnp.int32)
    batch = jax.eval_shape(of.batch, KEY, rows)
    trained, rests = jax.eval_shape(lambda key: frozen.draw(train, of, key), KEY)

    def summed(trained, rests, batch):
        return dpx.clipped_sum(of.losses, trained, batch, frozen=rests or None, weights=flat_weights(1.0), checked=False).total

    sizes = {"vocabulary_size": 64, "sequence_length": 64, "masked_positions": 8, "microbatch": examples, "shards": 1}
    expected = step_memory(model, frozen.trains(train, of, DpSgd()), method="book_keeping", **sizes)
    assert 0.65 < temporary_bytes(summed, trained, rests, batch) / (expected.microbatch - expected.accumulator) < 1.1
