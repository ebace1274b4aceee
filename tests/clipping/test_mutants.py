"""Mutations that would make the clip too weak with no other symptom; each must be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping.ops import Lookup
from dpx.clipping.weights import clip_weights
from dpx.mechanism.declarations import Flat
from tests.clipping.batches import batch, objective, parameters, squared_norm


def longest(rows, params) -> float:
    """The norm of the longest clipped gradient over single examples, at clipping norm 1: above 1, the sensitivity claim is false."""
    subject = objective(next_sentence=False)
    weights = clip_weights(Flat(clipping_norm=1.0))

    def one(row):
        total = dpx.clipped_sum(subject.losses, params, jax.tree.map(lambda leaf: leaf[None], row), weights=weights).total
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(total))

    return float(jnp.sqrt(jax.jit(lambda rows: jax.lax.map(one, rows))(rows).max()))


@pytest.fixture
def tied():
    """Every embedding and logit gradient falls on the same few words: both uses and their cross-term are large."""
    params, rows = parameters(objective(next_sentence=False)), batch()
    return jax.tree.map(lambda leaf: leaf[1:], rows), params


def test_unmutated_gradients_respect_the_clipping_norm(tied):
    assert longest(*tied) <= 1 + 1e-5


def test_mutant_that_drops_the_tied_cross_term_is_seen(tied, monkeypatch):
    monkeypatch.setattr(Lookup, "cross_term", lambda self, record: 0.0)
    assert longest(*tied) > 1 + 1e-3


def test_mutant_whose_second_use_overwrites_the_first_norm_is_seen(tied, monkeypatch):
    monkeypatch.setattr(Lookup, "squared_norm", lambda self, leaves, record: (jnp.zeros(record["g"].shape[0]),))
    assert longest(*tied) > 1 + 1e-2


def test_the_oracle_itself_sees_squares():
    assert squared_norm({"a": np.full(4, 2.0), "b": np.ones(3)}) == 19
