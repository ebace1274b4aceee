"""Families of models and heads clip exactly at any length, size and shape, and in bfloat16 never beyond the norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpx
from dpx.clipping import norms, separate
from dpx.clipping.program import traced
from dpx.task.declared_task import CausalLanguageModel
from dpx.task.objective import objective
from tests.clipping.batches import QUICKLY, SPECIAL, VOCABULARY, assert_trees_close, float64_gradients, parameters, squared_norm
from tests.clipping.exactness import Case, assert_exact
from tests.clipping.families import FAMILIES, MLM, ROTARY, rows, subject
from tests.models.declared import declared


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def test_layers_without_a_loop():
    looped, unrolled = (
        jax.jit(jax.grad(lambda p, b, of=of: of.losses(p, b)[0].sum())).lower(parameters(of), rows(of)).as_text().count("stablehlo.while")
        for of in (subject("decoder"), subject("decoder", scan=False))
    )
    assert looped >= 2 and unrolled == 0


# Each way to take examples apart: rows of a text, of choices, of pooled positions, with rotary positions and within a window.
APART = ("bert", "decoder", "decoder_choices", "mean_classifier", "gemma3")


@pytest.mark.parametrize("fused", [True, *slow(False)])
@pytest.mark.parametrize("family", [*APART, *slow(*(name for name in (*FAMILIES, *ROTARY) if name not in APART))])
def test_examples_are_apart_by_the_program(family, fused):
    """What a run does not look at again: it builds its step with `checked=False`."""
    # Layers are alike, but that windows alternate.
    of = subject(family, layers=2 if "gemma" in family else 1, **({} if family in ROTARY else {"dropout": 0.1}))
    key, options = jax.random.key(0), {"kept_bytes": 0, "fused": fused, "rows_per_unit": 1}
    params, batch = jax.eval_shape(of.init, jax.random.PRNGKey(0)), rows(of)
    separate.check(traced(lambda p, b: of.losses(p, b, jax.random.key_data(key)), params, batch, options, 4))


SEQUENCES = [(8, 1, 2**30), (64, 2, 0), (130, 2, 2**30), (512, 1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, tokens, examples, kept_bytes",
    [
        *((family, *sequence) for family in ("bert_untied", "roberta", "decoder") for sequence in SEQUENCES),
        *(("bert_choices", *sequence) for sequence in SEQUENCES[:-1]),
    ],
)
def test_sequences_from_8_to_512(family, tokens, examples, kept_bytes):
    of = subject(family, positions=512, layers=1)
    assert_exact(Case.build(of, rows(of, examples, tokens)), kept_bytes=kept_bytes)


@pytest.mark.slow
def test_long_choices_are_clipped_by_the_norm_that_rounding_proves(monkeypatch):
    """Three choices of 512 tokens are 1,536 positions of one sum, of which what they share cancels.

    Where such a sum is formed twice, the norm is the upper bound of `recomputed` in rounding.py, which may be above the exact one by
    (3 T + 1) u M: T u M of the sum for the norm and (2 T + 1) u M of the one that is clipped.
    """
    of = subject("bert_choices", positions=512, layers=1)
    case, bounds, plain = Case.build(of, rows(of, 1, 512)), [], norms.formed
    exact = np.sqrt(squared_norm(case.truth()[0][0]))

    def formed(a_BTp, g_BTd, gradient_Bpd):
        magnitude_B = (jnp.linalg.norm(a_BTp, axis=2) * jnp.linalg.norm(g_BTd, axis=2)).sum(1)
        jax.debug.callback(lambda magnitude_B: bounds.append((3 * a_BTp.shape[1] + 1) * 2.0**-24 * float(magnitude_B[0])), magnitude_B)
        return plain(a_BTp, g_BTd, gradient_Bpd)

    def clipped(params):
        options = {"weights": lambda norms_B: exact / jnp.maximum(norms_B, exact), "kept_bytes": 0, "checked": False}
        return jax.jit(lambda params: dpx.clipped_sum(case.losses, params, case.batch, **options), compiler_options=QUICKLY)(params)

    with monkeypatch.context() as patched:
        patched.setattr(norms, "formed", formed)
        found = jax.block_until_ready(clipped(case.params))
        jax.effects_barrier()
    assert len(bounds) == 5 and exact * (1 - 1e-5) <= found.norms_B[0] <= exact + np.linalg.norm(bounds)
    share = exact / float(found.norms_B[0])
    assert_trees_close(found.total, jax.tree.map(lambda leaf: share * leaf, case.truth()[0][0]), 1e-5, 1e-5 * exact)
    with jax.enable_x64(True):
        wide = clipped(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), case.params))
    np.testing.assert_allclose(wide.norms_B, exact, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "mini", "decoder_tiny", "decoder_mini"])
def test_declared_sizes(name):
    model = declared(name)
    of = objective(model, CausalLanguageModel() if model.causal else MLM, VOCABULARY, SPECIAL)
    assert_exact(Case.build(of, rows(of, 2, 32), spread=0.05))


# Products of as many positions are compared in test_norms.py.
@pytest.mark.slow
def test_a_decoder_of_512_tokens():
    of = subject("decoder", positions=512, layers=1, width=8, heads=1, feed_forward=8)
    assert_exact(Case.build(of, rows(of, 1, 512)), kept_bytes=0)


SHAPES = {
    "family": st.sampled_from(sorted(FAMILIES)),
    "heads": st.integers(1, 3),
    "layers": st.integers(1, 3),
    "feed_forward": st.integers(1, 20),
    "examples": st.integers(1, 4),
    "tokens": st.integers(3, 20),
    "dropout": st.sampled_from([0.0, 0.1]),
    "scan": st.booleans(),
    "rematerialize": st.sampled_from(["none", "layers"]),
    "kept_bytes": st.sampled_from([0, 20_000, 2**30]),
}


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(**SHAPES)
def test_any_shape(family, heads, examples, tokens, kept_bytes, **changes):
    of = subject(family, width=4 * heads, heads=heads, **changes)
    assert_exact(Case.build(of, rows(of, examples, tokens, seed=tokens)), kept_bytes=kept_bytes)


@pytest.mark.parametrize("rematerialize", ["none", "layers"])
@pytest.mark.parametrize("family", slow("decoder", "roberta_classifier", "gemma2", "qwen3"))
def test_bfloat16_is_close_and_never_beyond_the_clipping_norm(family, rematerialize):
    """One real row at a time: what is added to the sum is that row's clipped gradient, whose norm is the sensitivity."""
    of, narrow = subject(family), subject(family, dtype="bfloat16", rematerialize=rematerialize)
    params, batch = parameters(of), rows(of)
    norms = np.sqrt([squared_norm(gradient) for gradient in float64_gradients(of.losses, params, batch)[0]])
    weights = lambda n: 0.01 / jnp.maximum(n, 0.01)  # noqa: E731
    clipped = jax.jit(lambda p, b, pad: dpx.clipped_sum(narrow.losses, p, b, weights=weights, is_padding_B=pad, checked=False))
    for b in range(4):
        found = clipped(params, batch, jnp.arange(4) != b)
        assert np.sqrt(squared_norm(jax.tree.map(np.float64, found.total))) <= 0.01 * (1 + 1e-5)
        np.testing.assert_allclose(found.norms_B[b], norms[b], rtol=0.05)


# In the matrix one example has nothing to tell either.
@pytest.mark.slow
def test_an_example_without_a_next_token_has_no_loss_and_no_gradient():
    of = subject("decoder")
    batch = jax.tree.map(lambda leaf: leaf[:1], rows(of))
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: of.losses(p, batch)[0].sum()), compiler_options=QUICKLY)(parameters(of))
    assert float(loss) == 0 and all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))
