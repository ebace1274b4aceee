"""The block of the head against the cross-entropy of written-out logits, at the edges of labels and slots."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.models import fused_head
from dpx.models.fused_head import TokenLoss, token_loss
from dpx.task.losses import token_losses

B, M, H, V = 4, 3, 5, 7
DRAWN = np.random.default_rng(0)
H_BMH, TABLE, BIAS = (jnp.asarray(DRAWN.normal(0, 1, shape), jnp.float32) for shape in ((B, M, H), (V, H), (V,)))
# The first and the last word, ids outside the vocabulary, and an example without a slot.
LABEL_BM = jnp.asarray([[0, V - 1, 3], [0, 0, 0], [-1, V, 2], [1, 2, 3]])
IS_SLOT_BM = jnp.asarray([[True, True, True], [True, False, True], [True, True, True], [False, False, False]])


def written_out(h_BMH, table, bias):
    return token_losses(h_BMH @ table.T + bias, LABEL_BM, IS_SLOT_BM)


def block(h_BMH, table, bias):
    return token_loss(LABEL_BM, IS_SLOT_BM, h_BMH, table, bias)


def test_losses_and_what_is_right_are_those_of_the_logits():
    (losses_B, correct_B), (expected_B, right_B) = (jax.jit(of)(H_BMH, TABLE, BIAS) for of in (block, written_out))
    np.testing.assert_allclose(losses_B, expected_B, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(correct_B, right_B)
    # Alone on a slot, the word that has no logit leaves the mean to the others.
    assert losses_B[3] == 0 and bool(jnp.isfinite(losses_B).all()) and losses_B[2] > 0


def test_gradients_are_those_of_the_logits():
    found, expected = (
        jax.jit(jax.grad(lambda *given, of=of: of(*given)[0].sum(), argnums=(0, 1, 2)))(H_BMH, TABLE, BIAS) for of in (block, written_out)
    )
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-6)


def test_a_word_is_right_where_no_other_has_a_larger_logit():
    """The first word of the vocabulary as well."""
    table = jnp.zeros((V, H)).at[0].set(1.0)
    _, correct_B = jax.jit(token_loss)(np.zeros((1, 1), np.int32), np.ones((1, 1), bool), np.ones((1, 1, H), np.float32), table)
    assert correct_B.tolist() == [1.0]


def sizes(jaxpr, width):
    """Yields the size of every array of a program that has rows of this width."""
    for eqn in jaxpr.eqns:
        yield from (var.aval.size for var in eqn.outvars if var.aval.shape[-1:] == (width,))
        for body in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from sizes(body, width)


@pytest.mark.parametrize(
    ("positions", "cap"),
    [(1, None), (2, 2.0), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, 2.0), (2, None), (3, None), (3, 2.0)))],
)
def test_a_frozen_head_holds_the_logits_of_a_block_and_gives_the_same(monkeypatch, positions, cap):
    """Of three positions two are a block that does not divide them."""
    monkeypatch.setattr(fused_head, "BLOCK_BYTES", positions * 4 * B * V)
    monkeypatch.setattr(fused_head, "BLOCK_ROWS", 1)
    leaves, inputs, g_B = {"table": TABLE, "bias": BIAS}, (H_BMH, LABEL_BM, IS_SLOT_BM), jnp.asarray([1.0, -0.5, 2.0, 3.0])

    def run(frozen, leaves, inputs):
        op = TokenLoss(2, cap, frozen=frozen)
        outputs, residuals = op.forward(leaves, inputs)
        (g_BMH, *_), record = op.input_cotangent(leaves, residuals, (g_B, jnp.zeros(B)))
        return outputs, g_BMH, record

    (*found, record), (*expected, _) = (jax.jit(run, static_argnums=0)(frozen, leaves, inputs) for frozen in (("table", "bias"), ()))
    assert record == {}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    assert max(sizes(jax.make_jaxpr(run, static_argnums=0)(("table", "bias"), leaves, inputs).jaxpr, V)) <= B * V * positions
