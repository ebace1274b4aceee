"""Where next to all of a gradient cancels, or leaves float32's range, what an example adds is still no longer than the clipping norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.clipping.rounding import SMALLEST_CLIPPING_NORM
from tests.clipping.cancelling import CASES, searched, worst

DEFAULT = ("dense_twice",)
WANTED = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in CASES]
WIDTH = 256


@jax.jit
def clipped(params, x_BTp, g_BTd, limit, is_padding_B):
    """By Gram products: none of the gradients fits."""

    def losses(params, b):
        return (ops.dense(b["x"], params["kernel"]) * b["g"]).sum((1, 2)), {}

    options = {"kept_bytes": 0, "checked": False, "is_padding_B": is_padding_B}
    weights = lambda norms: limit / jnp.maximum(norms, limit)  # noqa: E731
    return dpx.clipped_sum(losses, params, {"x": x_BTp, "g": g_BTd}, weights=weights, **options)


def contributed(x_Tp, g_Td, limit=1.0):
    """(|v|, the norm, whether the example counts) of one example; the other is padding."""
    pair = lambda x: jnp.asarray(np.stack([x, np.ones_like(x)]))  # noqa: E731
    params = {"kernel": jnp.zeros((WIDTH, WIDTH))}
    result = clipped(params, pair(x_Tp), pair(g_Td), limit, jnp.asarray([False, True]))
    return np.linalg.norm(np.float64(result.total["kernel"])), float(result.norms_B[0]), bool(result.is_counted_B[0])


def gradient_norm(x_Tp, g_Td):
    return np.linalg.norm(np.einsum("tp,td->pd", x_Tp.astype(np.float64), g_Td.astype(np.float64)))


def test_an_input_less_its_token_mean_is_clipped():
    for seed in range(6):
        drawn = np.random.default_rng(seed)
        x = drawn.normal(size=(3, WIDTH))
        x = np.float32(1e3 * (x - x.mean(0) + 1e-4 * drawn.normal(size=x.shape)))
        g = np.ones((3, WIDTH), np.float32)
        truth = gradient_norm(x, g)
        length, norm, is_counted = contributed(x, g)
        assert is_counted and norm >= truth * (1 - 2.0**-10) and length <= 1, seed


def test_flat_inputs_under_cotangents_that_sum_to_nothing_are_clipped():
    """Of many columns of cotangents that one whose computed sum is exactly zero, though the contraction with the inputs is not."""
    T = 64
    g = np.random.default_rng(T).normal(size=(T, 1024)).astype(np.float32)
    g[-1] = -np.float32(np.float64(g[:-1]).sum(0))
    is_lost = np.asarray(jnp.asarray(g)[None].sum(1))[0] == 0
    by_product = np.abs(np.asarray(jnp.einsum("tp,td->pd", jnp.ones((T, 1)), g, precision="highest"))[0])
    column = g[:, np.argmax(is_lost * by_product)]
    length, norm, _ = contributed(np.full((T, WIDTH), 1e7, np.float32), np.repeat(column[:, None], WIDTH, 1))
    assert length <= 1 <= norm


@pytest.mark.parametrize("name", WANTED)
def test_no_example_found_by_ascent_adds_more_than_the_clipping_norm(name, request):
    case, is_long = CASES[name], name not in DEFAULT
    searches = [(seed, scale) for seed in range(3 if is_long else 1) for scale in ((1.0, 1e4, 1e-4) if is_long else (1.0,))]
    found = [searched(case, seed, 48 if is_long else 16, scale) for seed, scale in searches]
    of_norm, of_limit = worst(case, jax.tree.map(lambda *each: jnp.concatenate(each), *found))
    print(f"{name}: true norm {of_norm:.6f} of the computed one, contribution {of_limit:.6f} of C")
    assert of_norm * (1 - case.margin) <= 1 and of_limit <= 1


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("power", [-22, -19, -17, 17])
def test_underflow_hides_nothing_and_overflow_excludes(tokens, power):
    """Inputs and cotangents of sizes far apart: their squares are lost or infinite, though their product is ordinary."""
    drawn = np.random.default_rng(tokens)
    x = np.float32(drawn.normal(size=(tokens, WIDTH)) * 10.0**power)
    g = np.float32(drawn.normal(size=(tokens, WIDTH)) * 10.0 ** (-power - 2))
    length, norm, is_counted = contributed(x, g, SMALLEST_CLIPPING_NORM)
    assert length <= SMALLEST_CLIPPING_NORM and is_counted == (power != -22)
    truth = gradient_norm(x, g)
    assert norm >= truth * (1 - 2.0**-10) if is_counted else length == norm == 0


def test_an_example_without_a_gradient_has_norm_zero():
    drawn = np.random.default_rng(0)
    for tokens in (1, 3, 64):
        x = np.float32(drawn.normal(size=(tokens, WIDTH)))
        assert contributed(x, 0 * x)[:2] == contributed(0 * x, x)[:2] == (0, 0)
