"""Gradients that are multiplied by a constant before their joint norm: every method against float64 gradients of each example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.clipping.groups import FactoredWeights, PerLayerWeights, flat
from dpx.declaration import ConfigError

LIMIT = 0.5
B = 5


def factor(path: str) -> float:
    return 0.1 if path.startswith("head/") else 1.0


def losses(params, batch):
    hidden = jnp.tanh(ops.dense(batch["x"], params["body"]["kernel"], params["body"]["bias"]))
    return jnp.square(ops.dense(hidden, params["head"]["kernel"], params["head"]["bias"])).sum(-1)


@pytest.fixture(scope="module")
def case():
    drawn = np.random.default_rng(3)
    shapes = {"body": {"kernel": (3, 4), "bias": (4,)}, "head": {"kernel": (4, 2), "bias": (2,)}}
    params = jax.tree.map(lambda shape: drawn.normal(size=shape), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return params, {"x": drawn.normal(size=(B, 3))}


def by_hand(params, batch, groups):
    """The sum over examples, in float64: each group of top-level names is clipped by itself to LIMIT / sqrt(groups)."""
    with jax.enable_x64():
        params, x = jax.tree.map(jnp.float64, (params, batch["x"]))
        total = jax.tree.map(np.zeros_like, params)
        one = jax.jit(jax.grad(lambda p, row: losses(p, {"x": row[None]})[0]))
        for row in np.asarray(x):
            own = one(params, row)
            own = {name: jax.tree.map(lambda leaf, name=name: np.asarray(leaf) * factor(f"{name}/"), part) for name, part in own.items()}
            for group in groups:
                part = {name: own[name] for name in group}
                norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(part)))
                weight = min(1.0, LIMIT / np.sqrt(len(groups)) / norm)
                total |= {name: jax.tree.map(lambda old, new, w=weight: old + w * new, total[name], part[name]) for name in group}
        return total


WHOLE, APART = (flat, [("body", "head")]), (PerLayerWeights, [("body",), ("head",)])


@pytest.mark.parametrize(
    ("kind", "groups", "method"),
    [
        *((*WHOLE, "book_keeping"), (*APART, "vmap"), (*APART, "ghost")),
        *(pytest.param(*WHOLE, method, marks=pytest.mark.slow) for method in ("vmap", "ghost", "traced")),
        *(pytest.param(*APART, method, marks=pytest.mark.slow) for method in ("book_keeping", "traced")),
    ],
)
def test_gradients_are_multiplied_before_their_norm_is_taken(case, method, kind, groups):
    params, batch = jax.tree.map(jnp.float32, case)
    run = jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=FactoredWeights(kind(LIMIT), factor), method=method))
    found = run(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found.total, by_hand(*case, groups))


# Sums that are those of clipped gradients hold no more.
@pytest.mark.slow
def test_no_example_contributes_more_than_the_limit(case):
    params, batch = jax.tree.map(jnp.float32, case)
    run = jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=FactoredWeights(flat(LIMIT), factor)).total)
    for row in range(B):
        total = run(params, {"x": np.asarray(batch["x"])[row : row + 1]})
        assert np.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(total))) <= LIMIT * (1 + 1e-6)


def test_parameters_of_one_op_have_one_factor(case):
    params, batch = jax.tree.map(jnp.float32, case)
    with pytest.raises(ConfigError, match="head/bias and head/kernel: are of one op, dense, and have different factors"):
        dpx.clipped_sum(losses, params, batch, weights=FactoredWeights(flat(LIMIT), lambda path: 0.1 if path == "head/bias" else 1.0))
