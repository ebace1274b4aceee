"""Clipped sums of carriers under every clip, in bfloat16 and for units of several rows, against float64 code that forms every gradient."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import dpx
from dpx.clipping.groups import FactoredWeights, flat
from dpx.clipping.readers import merged
from dpx.clipping.rounding import MARGINS
from dpx.mechanism.clip import AdaptiveClip, Normalised, PerLayer
from dpx.mechanism.rgp import Rgp
from dpx.models.trained import Everything
from tests.clipping.batches import QUICKLY, assert_trees_close, float64_gradients, squared_norm

from .test_rgp import BODY_AND_HEAD, RANK, case, in_the_papers_form

MECHANISM = Rgp(rank=RANK)


def factored(gradient):
    """float64 leaves by path, multiplied by what the mechanism multiplies them by."""
    return {path: leaf * MECHANISM.gradient_factor(path) for path, leaf in flatten_dict(gradient, sep="/").items()}


@cache
def gradients(train=BODY_AND_HEAD):
    """(the case, each example's multiplied gradient by path)."""
    of, trained, frozen, given, batch = made = case(train=train)
    found, _ = float64_gradients(in_the_papers_form(of, trained, frozen, given), given.trained, batch)
    return made, [factored(one) for one in found]


def groups_of(path, leaf):
    """(group, part) of a leaf: each layer of a stack is a group, and so is every other top-level name."""
    top = path.split("/")[0]
    return [(f"layers/{layer}", leaf[layer]) for layer in range(len(leaf))] if top == "layers" else [(top, leaf)]


def by_group(gradient):
    squares: dict[str, float] = {}
    for path, leaf in gradient.items():
        for name, part in groups_of(path, leaf):
            squares[name] = squares.get(name, 0.0) + float(np.sum(np.square(part)))
    return {name: np.sqrt(square) for name, square in squares.items()}


def summing(of, weights, **options):
    """The clipped sum as a compiled function of (what the loss is differentiated by, what is frozen, a batch, its padding)."""

    @partial(jax.jit, compiler_options=QUICKLY)
    def run(variables, beside, batch, is_padding_B):
        known: dict[str, Any] = {"weights": weights, "method": "book_keeping", "checked": False, "frozen": beside}
        return dpx.clipped_sum(of.losses, variables, batch, is_padding_B=is_padding_B, **(known | options))

    return run


def summed(of, frozen, given, batch, weights, **options):
    return summing(of, weights, **options)(given.trained, merged(given.constants, frozen), batch, np.zeros(len(batch["length"]), bool))


def add(gradients, weights):
    """The weighted sum; `weights` of an example are one number, or one for each group."""

    def weighted(path, leaf, weight):
        if not isinstance(weight, dict):
            return leaf * weight
        parts = groups_of(path, leaf)
        return np.stack([part * weight[name] for name, part in parts]) if path.startswith("layers/") else leaf * weight[parts[0][0]]

    total = {}
    for one, weight in zip(gradients, weights, strict=True):
        for path, leaf in one.items():
            total[path] = total.get(path, 0.0) + weighted(path, leaf, weight)
    return unflatten_dict(total, sep="/")


@pytest.mark.parametrize("train", [BODY_AND_HEAD, pytest.param(Everything(), marks=pytest.mark.slow)], ids=["body_and_head", "all"])
def test_each_layers_carriers_and_the_head_are_clipped_to_their_own_share(train):
    (of, _, frozen, given, batch), expected = gradients(train)
    norms = [by_group(one) for one in expected]
    limit = float(np.median([value for one in norms for value in one.values()])) * np.sqrt(len(norms[0]))
    share = limit / np.sqrt(len(norms[0]))
    weights = [{name: min(1.0, share / value) if value else 0.0 for name, value in one.items()} for one in norms]
    assert 0 < sum(weight < 1 for one in weights for weight in one.values()) < sum(map(len, weights))
    run = summing(of, FactoredWeights(PerLayer(clipping_norm=1.0).weights(limit), MECHANISM.gradient_factor))
    given_all = given.trained, merged(given.constants, frozen), batch
    found = run(*given_all, np.zeros(len(expected), bool))
    assert_trees_close(
        found.total, add(expected, weights), relative=5e-5, floor=1e-6 * limit, terms=[unflatten_dict(one, sep="/") for one in expected]
    )
    for number in range(len(expected)):
        one = run(*given_all, np.arange(len(expected)) != number)
        assert np.sqrt(squared_norm(one.total)) <= limit * (1 + 1e-5)


# Weights are of the norm that the tests above and below compare.
@pytest.mark.slow
@pytest.mark.parametrize(
    "clip",
    [AdaptiveClip(clipping_norm=1.0), Normalised(clipping_norm=1.0)],
    ids=["quantile", "normalised"],
)
def test_other_clips_weigh_by_the_joint_norm_and_count_by_it(clip):
    (of, _, frozen, given, batch), expected = gradients()
    norms = np.sqrt([squared_norm(one) for one in expected])
    limit = float(np.median(norms))
    weights = np.minimum(1.0, limit / norms) if clip.is_adaptive else limit / (norms + clip.stability)
    found = summed(of, frozen, given, batch, FactoredWeights(clip.weights(limit), MECHANISM.gradient_factor))
    assert_trees_close(
        found.total, add(expected, weights), relative=5e-5, floor=1e-6 * limit, terms=[unflatten_dict(one, sep="/") for one in expected]
    )
    # What a quantile counts: examples beyond the norm, the head's gradients at their factor.
    np.testing.assert_array_equal(found.norms_B > limit * 1.001, norms > limit * 1.001)


def test_units_of_several_rows_are_clipped_as_one():
    (of, _, frozen, given, batch), expected = gradients()
    assert len(expected) % 2 == 0
    units = [{path: leaf + two[path] for path, leaf in one.items()} for one, two in zip(expected[::2], expected[1::2], strict=True)]
    norms = np.sqrt([squared_norm(one) for one in units])
    limit = float(np.mean(norms))
    found = summed(of, frozen, given, batch, FactoredWeights(flat(limit), MECHANISM.gradient_factor), rows_per_unit=2)
    np.testing.assert_allclose(found.norms_B, norms, rtol=1e-3)
    terms = [unflatten_dict(one, sep="/") for one in units]
    assert_trees_close(found.total, add(units, np.minimum(1.0, limit / norms)), relative=5e-5, floor=1e-6 * limit, terms=terms)
    assert 0 < np.sum(norms > limit) < len(norms)


@pytest.mark.parametrize("method", ["book_keeping", *(pytest.param(method, marks=pytest.mark.slow) for method in ("ghost", "vmap"))])
# Sums in bfloat16 are held to their norm in tests/clipping/test_clipped_sum.py.
@pytest.mark.slow
def test_in_bfloat16_no_example_exceeds_its_norm_and_all_point_where_float64_does(method):
    """What the loss is differentiated by is rounded to bfloat16 as in a step; W - A B is a constant of the step too."""
    of, trained, frozen, given, batch = case(dtype="bfloat16")
    wide = case()
    exact, _ = float64_gradients(in_the_papers_form(wide[0], trained, frozen, given), given.trained, batch)
    limit = 0.5 * float(np.min(np.sqrt([squared_norm(factored(one)) for one in exact])))
    narrow = given._replace(trained=_rounded(given.trained), constants=_rounded(given.constants))
    weights = FactoredWeights(flat(limit * (1 - MARGINS["bfloat16"])), MECHANISM.gradient_factor)
    run, beside = summing(of, weights, method=method), merged(narrow.constants, _rounded(frozen))
    for number, one in enumerate(exact):
        total = run(narrow.trained, beside, batch, np.arange(len(exact)) != number).total
        found = {path: np.asarray(leaf, np.float64) for path, leaf in flatten_dict(total, sep="/").items()}
        own = factored(one)
        norm, of_exact = (np.sqrt(squared_norm(tree)) for tree in (found, own))
        assert 0.9 * limit < norm <= limit
        assert sum(np.sum(found[path] * own[path]) for path in own) >= 0.99 * norm * of_exact


def _rounded(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, tree)
