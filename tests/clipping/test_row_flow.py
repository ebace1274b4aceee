"""Where the examples lie after an operation, by the rules, beside what really changes when the data of one example do.

B: examples, T: tokens, D: width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping.row_rules import SHARED, Mixed, Rows, bounds_after, bounds_of
from dpx.clipping.separate import Flow

B, T, D = 3, 4, 2
DRAWN = np.random.default_rng(0)
X = DRAWN.normal(0, 1, (B, T, D)).astype(np.float32)
ID = DRAWN.integers(0, 50, (B, T)).astype(np.int32)
W = jnp.asarray(DRAWN.normal(0, 1, (D, D)), jnp.float32)
AT = jnp.arange(B)


@jax.custom_batching.custom_vmap
def ruled(x):
    return 2 * x


@ruled.def_vmap
def _all_at_once(size, is_batched, x):
    return x - x.mean(0), True


def apart(x, id):
    return {
        "elementwise": jnp.tanh(x) * jnp.where(x > 0, x, 2.0),
        "moved": jnp.swapaxes(x, 0, 1),
        "folded": x.reshape(-1, D) @ W,
        "unfolded": (x.reshape(-1, D) @ W).reshape(B, T, D),
        "folded_behind": jnp.swapaxes(x, 0, 1).reshape(-1, D),
        "reduced": x.sum((1, 2)) + x.max(-1)[:, 0],
        "sorted": jnp.sort(x, axis=1),
        "accumulated": jnp.cumsum(x, axis=1),
        "shifted": jnp.roll(x, 1, axis=1) + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, 1:],
        "joined": jnp.concatenate([x, jnp.ones((B, 1, D))], 1),
        "stacked": jnp.stack([x, 2 * x], 0),
        "attention": jnp.einsum("btd,bsd->bts", x, x),
        "taken_along": jnp.take_along_axis(x, (id % T)[..., None], 1),
        "taken_by_place": x[AT[:, None], id % T],
        "taken_flat": x.reshape(-1, D)[AT[:, None] * T + jnp.clip(id, 0, T - 1)],
        "looked_up": W[id % D],
        "written_by_place": jnp.zeros((B, T)).at[AT, id[:, 0] % T].add(x[:, 0, 0]),
        "sliced_by_row": jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, 2))(x, id[:, 0] % 2),
        "over_tokens": jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros((B, D)), jnp.swapaxes(x, 0, 1))[1],
        "over_examples": jax.lax.map(lambda row: jax.lax.scan(lambda c, one: (c + one, c), jnp.zeros(D), row)[0], x),
        "chosen_by_row": jax.vmap(lambda row: jax.lax.cond(row[0, 0] > 0, jnp.sin, jnp.cos, row))(x),
        "with_a_rule_for_vmap": ruled(x),
        "in_a_call": jax.jit(lambda x: jax.checkpoint(jnp.sin)(x))(x),
        "keys": jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (2,)))(id[:, 0]),
        "triangular": jnp.linalg.cholesky(jnp.einsum("btd,bte->bde", x, x) + jnp.eye(D)),
        "convolved": jax.lax.conv_general_dilated(x, jnp.ones((2, D, D)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        "fourier": jnp.fft.rfft(x, axis=1).real,
        "empty": (x[:, :, :0] + 1).reshape(-1, T).sum(1),
        "of_nobody": jnp.broadcast_to(W, (B, D, D)),
    }


def mixed(x, id):
    return {
        "sum": x - x.sum(0),
        "maximum": x / jnp.abs(x).max(),
        "sort": jnp.sort(x, axis=0),
        "cumsum": jnp.cumsum(x.reshape(-1, D), axis=0),
        "roll": jnp.roll(x, 1, axis=0),
        "flip": x[::-1],
        "first": x + x[:1],
        "cut": jnp.concatenate([x[:1], x[1:]], 0),
        "reshape": x.reshape(T, B, D),
        "two_axes": x.sum((1, 2))[:, None] * x.sum((1, 2))[None],
        "product": jnp.einsum("btd,bte->de", x, x),
        "gathered": x[id[:, 0] % B],
        "gathered_flat": x.reshape(-1, D)[AT[:, None] * T + id % (T + 1)],
        "gathered_large": x[jnp.where(id[:, 0] > 30, 0, AT)],
        "written": jnp.zeros((B, T)).at[id[:, 0] % B, 0].add(x[:, 0, 0]),
        "chosen": jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        "rounds": jax.lax.while_loop(lambda c: jnp.any(c > 1), lambda c: c / 2, jnp.abs(x)),
        "carried": jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros((T, D)), x)[1],
        "fourier": jnp.fft.fft(x, axis=0).real,
        "windowed": jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1, 1), (1, 1, 1), "SAME"),
        "by_a_rule_for_vmap": jax.vmap(ruled)(x),
        "of_the_host": jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(X.shape, X.dtype), x),
    }


def layouts(function):
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(X, ID)
    found = Flow(B).through(closed.jaxpr, closed.consts, [Rows(0), Rows(0)])[0]
    return dict(zip(shapes, jax.tree.unflatten(jax.tree.structure(shapes), found).values(), strict=True))


FOUND = layouts(apart)


@pytest.fixture(scope="module")
def changed():
    """What each operation gives with and without a change of the second example."""
    other_x, other_id = X.copy(), ID.copy()
    other_x[1], other_id[1] = 2 * X[1] + 1, ID[1] + 7
    run = jax.jit(apart)
    return jax.device_get((run(X, ID), run(other_x, other_id)))


@pytest.mark.parametrize("name", FOUND)
def test_what_is_said_to_be_an_examples_own_changes_with_no_other(name, changed):
    layout, before, after = FOUND[name], *(each[name] for each in changed)
    is_other = np.not_equal(before, after)
    if layout == SHARED:
        assert not is_other.any()
        return
    assert isinstance(layout, Rows), layout
    example = np.arange(before.shape[layout.axis]) // layout.after % B
    assert before.shape[layout.axis] == layout.before * B * layout.after
    along = np.moveaxis(is_other, layout.axis, 0)
    assert not along[example != 1].any() and along[example == 1].any()


@pytest.mark.parametrize("name", layouts(mixed))
def test_what_reads_several_examples_is_mixed(name):
    assert isinstance(layouts(mixed)[name], Mixed)


@pytest.mark.parametrize("divisor", [4, -4, 0])
def test_a_remainder_is_bounded_by_a_known_divisor_above_zero_alone(divisor):
    closed = jax.make_jaxpr(lambda id: id % divisor)(ID)
    found = bounds_after(closed.eqns[-1], [None, bounds_of(np.int32(divisor))])
    assert (found is not None) == (divisor > 0)
    assert found is None or (np.all(found.low == 0) and np.all(found.high == divisor - 1))


def test_a_function_that_is_only_called_remainder_is_not_taken_for_one():
    @jax.jit
    def remainder(x, d):
        return jnp.where(x > 30, 0, x + d)

    closed = jax.make_jaxpr(lambda id: remainder(id, 4))(ID)
    assert bounds_after(closed.eqns[-1], [None, bounds_of(np.int32(4))]) is None


def test_what_may_wrap_around_is_unknown():
    closed = jax.make_jaxpr(lambda: jnp.arange(100, dtype=jnp.int8) + jnp.int8(100))()
    iota, added = closed.eqns[0], closed.eqns[-1]
    found = bounds_after(added, [bounds_after(iota, []), bounds_of(np.int8(100))])
    assert found is not None and np.isfinite(found.high[:28]).all() and np.isinf(found.high[28:]).all()
