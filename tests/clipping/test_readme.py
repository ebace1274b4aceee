"""The page about a layer of one's own: its code runs as printed, and its op clips exactly."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from tests.clipping.batches import assert_trees_close, float64_gradients, squared_norm

PAGE = Path(dpx.__file__).parent / "clipping" / "README.md"


@pytest.fixture(scope="module")
def page():
    """Every name the page's blocks define, run one after another."""
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_loop_ran_and_counted_every_real_row(page):
    assert np.array_equal(page["found"].is_counted_B, np.arange(10) < 9)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(page["params"]))


@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
def test_the_op_clips_exactly(page, method):
    losses, params, batch = page["losses"], page["params"], page["batch"]
    gradients, _ = float64_gradients(losses, params, batch)
    lengths = np.sqrt([squared_norm(gradient) for gradient in gradients])
    limit = float(np.median(lengths))
    weights = lambda norms_B: limit / jnp.maximum(norms_B, limit)  # noqa: E731
    found = jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=weights, method=method))(params, batch)
    np.testing.assert_allclose(np.square(found.norms_B), np.square(lengths), rtol=1e-5)
    factors = limit / np.maximum(lengths, limit)
    assert_trees_close(found.total, jax.tree.map(lambda *g: sum(c * leaf for c, leaf in zip(factors, g, strict=True)), *gradients))
    page["check"](losses, params, batch, found, 3)
