"""The page about a user's own layer: its code runs as printed, and its op clips exactly."""

import contextlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.declaration import ConfigError
from tests.clipping.batches import assert_trees_close, float64_gradients, squared_norm

PAGE = Path(dpx.__file__).parent / "clipping" / "README.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Every name the page's blocks define, run one after another, in a folder of their own."""
    names: dict = {}
    with contextlib.chdir(tmp_path_factory.mktemp("own")):
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), names)
            names.setdefault("after the first block", dict(names))
    return names


def test_the_loop_ran_and_counted_every_real_row(page):
    assert np.array_equal(page["clipped"].is_counted_B, np.arange(10) < 9)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(page["params"]))


def test_the_training_loop_is_short_and_ran(page):
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert sum(map(bool, block.splitlines())) <= 25
    assert "dpx.add_noise" in block and "dpx.privacy.epsilon" in block
    names = page["after the first block"]
    start = {"kernel": jnp.full((3, 4), 0.1), "bias": jnp.zeros(4), "out": jnp.ones(4)}
    moved = jnp.concatenate([(names["params"][name] - start[name]).reshape(-1) for name in start])
    # Twenty steps of noise alone move each number by 0.2 sqrt(20) 1.1 / 64.
    assert 0.005 < float(jnp.std(moved)) < 1 and 0 < names["epsilon"] < 10
    assert names["gradient"].sensitivity("zero_out") == names["CLIPPING_NORM"]


@pytest.mark.parametrize("method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.slow)])
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


def lines(title):
    """(loss, the page's comment on it) of each line of a table of the page."""
    table = PAGE.read_text().split(f"\n| {title} |")[1].split("\n\n")[0]
    found = re.findall(r"^\| `(.+?)` \|(.*)\|$", table, re.MULTILINE)
    return [pytest.param(code, said.strip(), id=code[:60]) for code, said in found]


B, T, D, V = 3, 4, 4, 5
SHAPES = {"kernel": (D, D), "heads": (D, 2, 3), "bias": (D,), "scale": (D,), "one": (1,), "rows": (6, D), "table": (V, D)}
SHAPES |= {"layers": (3, D, D), "a": (D, 2), "b": (2, D)}


def told(code):
    """The loss of a line, with the parameters it names, and a batch."""
    drawn = np.random.default_rng(0)
    named = [name for name in SHAPES if f'"{name}"' in code] or ["kernel"]
    params = {name: jnp.asarray(drawn.normal(0, 0.5, SHAPES[name]), jnp.float32) for name in named}
    rows = {"x": jnp.asarray(drawn.normal(0, 1, (B, T, D)), jnp.float32), "ids": jnp.asarray(drawn.integers(0, V, (B, T)))}
    compiled = compile(code, "a line of the page", "eval")

    def losses(p, b):
        y = eval(compiled, {"jax": jax, "jnp": jnp, "lax": jax.lax, "ops": ops, "x": b["x"], "ids": b["ids"], "p": p, "b": b})
        return jnp.sin(y).sum(tuple(range(1, y.ndim)))

    return losses, params, rows


def clip(norms_B):
    return 0.5 / jnp.maximum(norms_B, 0.5)


def test_what_the_page_calls_right_is_taken():
    """The ops and their places are compared with float64 among the attacks, and beside `vmap` in test_ops.py."""
    run = lambda losses: lambda p, b: dpx.clipped_sum(losses, p, b, weights=clip, checked=False)  # noqa: E731
    for losses, params, rows in (told(line.values[0]) for line in lines("Right")):
        assert jax.tree.structure(jax.eval_shape(run(losses), params, rows).total) == jax.tree.structure(params)


@pytest.mark.slow
@pytest.mark.parametrize("code, said", lines("Right"))
def test_what_the_page_calls_right_equals_vmap(code, said):
    losses, params, rows = told(code)
    # That examples are apart is tried out in the same way for every method.
    ways = ({"method": "book_keeping"}, {"method": "vmap", "checked": False})
    found, truth = jax.jit(lambda p, b: [dpx.clipped_sum(losses, p, b, weights=clip, **way) for way in ways])(params, rows)
    np.testing.assert_allclose(found.norms_B, truth.norms_B, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found.total, truth.total)


@pytest.mark.parametrize("code, said", lines("ConfigError"))
def test_what_the_page_calls_refused_is_refused_for_that_reason(code, said):
    losses, params, rows = told(code)
    rows = jax.tree.map(lambda leaf: leaf[:, :3], rows) if "[:, :3]" in code else rows
    with pytest.raises(ConfigError, match=re.escape(said)):
        dpx.clipped_sum(losses, params, rows, weights=clip)
