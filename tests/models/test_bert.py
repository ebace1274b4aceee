"""Module parameters are the declared ones, for every size, and sizes are the published ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.cost.memory import forward_matmul_flops, published_flops, training_matmul_flops
from dpx.models.shape import Bert
from dpx.task.declared_task import MaskedLanguageModel
from dpx.task.objective import objective as objective_of
from tests.clipping.batches import SPECIAL, batch, objective, parameters
from tests.clipping.families import FAMILIES
from tests.clipping.families import subject as family_subject
from tests.models.declared import declared

SIZES = ("micro", "tiny", "mini", "small", "medium", "base", "large", "mega")

# Devlin et al. 2019, Turc et al. 2019, McKenna et al. 2025, counted exactly: at vocabulary 30,522 and at 32,000.
PUBLISHED = {
    "tiny": (4_433_468, 4_624_130),
    "mini": (11_267_900, 11_647_746),
    "small": (29_058_876, 29_817_090),
    "medium": (41_668_412, 42_426_626),
    "base": (110_106_428, 111_243_010),
    "large": (336_226_108, 337_741_058),
    "mega": (732_389_180, 734_660_866),
}

# Liu et al. 2019 with its masked-word head; Radford et al. 2019 (tied head, so the word table counts once).
OTHERS = {
    "roberta_base": (50_265, 124_697_433),
    "roberta_large": (50_265, 355_412_057),
    "decoder_small": (50_257, 124_439_808),
    "decoder_medium": (50_257, 354_823_168),
    "decoder_large": (50_257, 774_030_080),
    "decoder_30m": (50_257, 30_339_456),
}


def assert_declared(subject):
    made = jax.eval_shape(subject.init, jax.random.PRNGKey(0))
    found = {"/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(made)}
    assert {path: leaf.shape for path, leaf in found.items()} == subject.task.parameter_shapes(subject.model, subject.vocabulary_size)
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("size", "next_sentence"),
    [
        pytest.param(size, next_sentence, marks=[pytest.mark.slow] * ((size, next_sentence) not in {("micro", False), ("base", True)}))
        for size in SIZES
        for next_sentence in (True, False)
    ],
)
def test_module_parameters_are_the_declared_ones(size, next_sentence):
    assert_declared(objective_of(declared(size), MaskedLanguageModel(next_sentence=next_sentence), 30_522, SPECIAL))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_parameters_it_declares(family):
    assert_declared(family_subject(family))


@pytest.mark.parametrize("size", PUBLISHED)
def test_counts_are_exact(size):
    model = declared(size)
    assert isinstance(model, Bert)
    assert (model.parameters(30_522, next_sentence=True), model.parameters(32_000, next_sentence=True)) == PUBLISHED[size]


@pytest.mark.parametrize("name", OTHERS)
def test_counts_of_other_families_are_exact(name):
    vocabulary, parameters = OTHERS[name]
    assert declared(name).parameters(vocabulary) == parameters


def test_initial_values_are_bert():
    params = jax.jit(objective().init)(jax.random.PRNGKey(3))
    kernel = np.asarray(params["layers"]["up"]["kernel"])
    assert np.abs(kernel).max() <= 0.04 and 0.015 < kernel.std() < 0.02
    assert np.all(np.asarray(params["embeddings"]["norm"]["scale"]) == 1) and np.all(np.asarray(params["mlm"]["output_bias"]) == 0)
    # Each layer draws its own weights.
    assert not np.allclose(kernel[0], kernel[1])


def test_padding_tokens_do_not_reach_the_loss():
    subject = objective()
    params, rows = parameters(subject), batch()
    inside = np.arange(12) < np.asarray(rows["length"])[:, None]
    noisy = {**rows, "tokens": jnp.where(inside, rows["tokens"], 33)}
    losses = jax.jit(subject.losses)
    np.testing.assert_array_equal(losses(params, rows)[0], losses(params, noisy)[0])


def test_flops_of_tiny_and_the_published_rule():
    tiny = declared("tiny")
    forward = 2 * (2 * 128 * 196_608 + 4 * 128 * 128 * 128) + 2 * 20 * (128 * 128 + 128 * 30_522)
    assert forward_matmul_flops(tiny, 30_522, 128, 20, pooled_outputs=0) == forward
    assert training_matmul_flops(tiny, 30_522, 128, 20, pooled_outputs=2) == 3 * (forward + 2 * (128 * 128 + 256))
    # Anil et al. 2021: 1.08e22 for 20,000 steps of 2,097,152 examples of 128 tokens through BERT-Large.
    assert published_flops(336_226_108, 128) * 2_097_152 * 20_000 == pytest.approx(1.08e22, rel=0.02)
