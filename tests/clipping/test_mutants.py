"""Mutations that would make the clip too weak with no other symptom; each must be seen.

A gradient clipped by a norm that is too small by a factor f is too long by 1/f: the sensitivity the accountant assumes is exceeded.
All are slow: the attacks judge the same sums on smaller losses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import forms, joint
from dpx.clipping.bounds import Bounded
from dpx.clipping.ops import Lookup
from tests.clipping.batches import batch, bert, float64_gradients, objective, parameters, squared_norm

SUBJECT = objective(bert(layers=1), next_sentence=False)


@pytest.fixture(scope="module")
def start():
    """A model as it is initialised, where the embedding's gradient is large, and rows that have slots."""
    params = parameters(SUBJECT, spread=0.02)
    for norm in (params["embeddings"]["norm"], params["mlm"]["norm"], params["layers"]["output_norm"], params["layers"]["attention_norm"]):
        norm["scale"] = norm["scale"] + 1
    rows = jax.tree.map(lambda leaf: leaf[1:], batch())
    gradients, _ = float64_gradients(SUBJECT.losses, params, rows)
    return params, rows, np.sqrt([squared_norm(gradient) for gradient in gradients])


def excess(start) -> float:
    """By how much the longest clipped gradient exceeds the clipping norm."""
    params, rows, norms = start
    clipped = jax.jit(lambda p, b: dpx.clipped_sum(SUBJECT.losses, p, b, weights=lambda norms_B: 1 / norms_B, checked=False))
    return float(np.max(norms / np.asarray(clipped(params, rows).norms_B))) - 1


@pytest.mark.slow
def test_unmutated_gradients_respect_the_clipping_norm(start):
    assert excess(start) <= 1e-5


@pytest.mark.slow
def test_mutant_that_drops_the_products_between_uses_is_seen(start, monkeypatch):
    monkeypatch.setattr(forms, "_product", lambda decoded, looked_up: 0.0)
    assert excess(start) > 5e-3


@pytest.mark.slow
def test_mutant_whose_second_use_overwrites_the_first_norm_is_seen(start, monkeypatch):
    nothing = lambda units: Bounded(*(jnp.zeros(units),) * 3)  # noqa: E731
    monkeypatch.setattr(Lookup, "squared_norm", lambda self, leaves, record: (nothing(record["g"].shape[0]),))
    assert excess(start) > 0.05


@pytest.mark.slow
def test_mutant_that_takes_shared_parameters_for_apart_is_seen(start, monkeypatch):
    monkeypatch.setattr(joint, "_is_alone", lambda *_: True)
    assert excess(start) > 5e-3
