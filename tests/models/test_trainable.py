"""Selections of parameters by path, the trees they make, and adapters that are added and merged away again."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping.op import leaf_names
from dpx.clipping.readers import merged
from dpx.declaration import ConfigError
from dpx.models import trainable
from dpx.models.lora import TARGETS, add_adapters, merge_adapters
from dpx.models.trained import ALL, BIAS, LAST_LAYER, LORA, LORA_FFA, either, matching, top
from tests.clipping.batches import QUICKLY, parameters
from tests.clipping.families import DROPOUT_KEY, rows, subject


@cache
def model(family="bert", **changes):
    of = subject(family, **changes)
    return of, parameters(of)


def paths(tree):
    return set(leaf_names(tree))


@pytest.mark.parametrize(
    ("family", "selection"),
    [*(("bert", one) for one in (BIAS, top(2))), *(("decoder_classifier", one) for one in (ALL, LAST_LAYER, top(1)))],
)
def test_both_trees_make_the_parameters_again(family, selection):
    _, params = model(family)
    trained, frozen = trainable.split(params, selection)
    assert not paths(trained) & paths(frozen)
    again = trainable.whole(merged(trained, frozen))
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_what_each_selection_picks():
    _, params = model()
    trained, frozen = (paths(tree) for tree in trainable.split(params, BIAS))
    assert trained == {path for path in paths(params) if path.endswith("bias")} and "mlm/output_bias" in trained
    assert paths(trainable.split(params, ALL)[1]) == set()
    head = {path for path in paths(params) if path.split("/")[0] in ("mlm", "pooler", "next_sentence")}
    assert paths(trainable.split(params, LAST_LAYER)[0]) == head
    assert paths(trainable.split(params, top(1))[0]) == head | {path for path in paths(params) if path.startswith("layers/")}
    both = either(matching("embeddings/**", "layers/*/scale"), LAST_LAYER)
    picked = paths(trainable.split(params, both)[0])
    assert {"embeddings/word", "embeddings/norm/bias", "layers/output_norm/scale"} | head <= picked and "layers/up/bias" not in picked


def test_top_layers_are_stacks_of_their_own():
    params = {"layers": {"up": {"kernel": np.zeros((3, 2, 4)), "bias": np.arange(12.0).reshape(3, 4)}}}
    trained, frozen = trainable.split(params, top(2))
    assert trained["layers"]["up"]["kernel"].shape[0] == 2 and frozen["layers_below"]["up"]["kernel"].shape[0] == 1
    np.testing.assert_array_equal(trained["layers"]["up"]["bias"], params["layers"]["up"]["bias"][1:])


def test_the_model_is_the_same_in_two_stacks():
    """Dropout included, whose masks follow from the number of a layer."""
    of, params = model(dropout=0.1)
    cut = merged(*trainable.split(params, top(1)))
    losses = jax.jit(lambda params: of.losses(params, rows(of), DROPOUT_KEY)[0], compiler_options=QUICKLY)
    np.testing.assert_allclose(losses(cut), losses(params), rtol=1e-6)


@pytest.mark.parametrize(
    "build, match",
    [
        (lambda: matching("layers/qvk/kernel"), "layers/qvk/kernel: matches no parameter. The nearest are layers/qkv/kernel, "),
        (lambda: LORA, "layers/lora/\\*/a: matches no parameter"),
        (lambda: top(3), "top 3 layers: is too many: the model has 2 layers"),
        (lambda: top(0), "top 0 layers: is not a number of layers"),
        (lambda: either(top(1), top(2)), "top \\[1, 2\\] layers: are two numbers"),
    ],
)
def test_what_picks_nothing_is_refused(build, match):
    _, params = model()
    with pytest.raises(ConfigError, match=match) as error:
        trainable.split(params, build())
    assert "\n" not in str(error.value)


def adapters(params, **options):
    return add_adapters(params, jax.random.key(0), **({"rank": 2, "alpha": 4.0, "targets": ("*",)} | options))


def test_adapters_change_nothing_at_first_and_merge_away():
    of, params = model("decoder")
    batch = rows(of)
    losses = jax.jit(lambda params: of.losses(params, batch, DROPOUT_KEY)[0], compiler_options=QUICKLY)
    adapted = adapters(params)
    np.testing.assert_array_equal(losses(adapted), losses(params))
    for name, adapter in adapted["layers"]["lora"].items():
        adapter["b"] = jnp.full(adapter["b"].shape, 0.01 * (1 + len(name)))
    merged_away = merge_adapters(adapted)
    assert paths(merged_away) == paths(params)
    assert np.abs(losses(adapted) - losses(params)).max() > 1e-3
    np.testing.assert_allclose(losses(adapted), losses(merged_away), rtol=2e-5)


def test_adapters_drop_parts_of_their_own_inputs_alone_and_only_with_a_key():
    of, params = model("decoder")
    batch, dropping = rows(of), adapters(params, dropout=0.5)
    losses = jax.jit(lambda params, key: of.losses(params, batch, key)[0], compiler_options=QUICKLY)
    # With zeros for B an adapter's input reaches nothing; the model's own maps drop nothing.
    np.testing.assert_array_equal(losses(dropping, DROPOUT_KEY), losses(params, None))
    for adapter in dropping["layers"]["lora"].values():
        adapter["b"] = jnp.full(adapter["b"].shape, 0.05)
    lora = {name: {leaf: x for leaf, x in one.items() if leaf != "dropout"} for name, one in dropping["layers"]["lora"].items()}
    plain = params | {"layers": params["layers"] | {"lora": lora}}
    np.testing.assert_array_equal(losses(dropping, None), losses(plain, DROPOUT_KEY))
    assert np.abs(losses(dropping, DROPOUT_KEY) - losses(plain, DROPOUT_KEY)).max() > 1e-3
    assert not any("dropout" in path for path in paths(trainable.split(dropping, LORA)[0]))


def test_adapters_have_the_shapes_of_their_targets_and_scales_rest():
    of, params = model("bert")
    lora = adapters(params)["layers"]["lora"]
    H, F, L = of.model.width, of.model.feed_forward, of.model.layers
    assert set(lora) == set(TARGETS) and set(adapters(params, targets=("query", "up"))["layers"]["lora"]) == {"query", "up"}
    shapes = {name: (one["a"].shape, one["b"].shape) for name, one in lora.items()}
    assert shapes["value"] == ((L, H, 2), (L, 2, H)) and shapes["down"] == ((L, F, 2), (L, 2, H)) and shapes["up"] == ((L, H, 2), (L, 2, F))
    np.testing.assert_array_equal(lora["key"]["scale"], np.full(L, 2.0))
    for selection in (LORA, LORA_FFA, ALL):
        trained = paths(trainable.split(adapters(params), selection)[0])
        assert not any(path.endswith("scale") and "lora" in path for path in trained)
    assert {path.split("/")[-1] for path in paths(trainable.split(adapters(params), LORA_FFA)[0])} == {"b"}


@pytest.mark.parametrize(
    "options, match",
    [
        ({"targets": ("kvery",)}, "^kvery: does not match any target of adapters. The nearest are key, query"),
        ({"rank": 0}, "^rank=0: is not possible for a matrix of shape"),
        ({"rank": 17}, "^rank=17: is not possible for a matrix of shape"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        adapters(model()[1], **options)
    with pytest.raises(ConfigError, match="^parameters: already have adapters"):
        adapters(adapters(model()[1]))
