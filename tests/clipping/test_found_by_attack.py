"""Faults found by attack: unusual combinations of readers of one parameter, programs that track devices, empty loops.

B: examples, T: tokens, D: width, V: rows of a table.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dpx
from dpx.clipping import ops
from dpx.declaration import ConfigError

B, T, D, V = 3, 4, 4, 6


def arr(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).normal(0, 0.7, shape), jnp.float32)


ROWS = {"x": arr(B, T, D), "id": jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)), jnp.int32), "w": arr(B, V, D), "s": arr(B)}
CLIP = lambda n: 1 / jnp.maximum(n, 1)  # noqa: E731


def true_norms(loss, params, rows):
    rows, gradient = jax.tree.map(np.asarray, rows), jax.jit(jax.grad(loss))
    grads = [gradient(params, jax.tree.map(lambda a, b=b: a[b], rows)) for b in range(jax.tree.leaves(rows)[0].shape[0])]
    return np.array([np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(g))) for g in grads])


def same(loss, params, rows=ROWS, **options):
    found = jax.jit(dpx.weighted_grad(loss, weights=CLIP, **options))(params, rows)
    np.testing.assert_allclose(found.norms, true_norms(loss, params, rows), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.slow)])
def test_lookup_beside_a_product_over_the_whole_table(method):
    same(lambda p, e: jnp.sin(p["t"][e["id"]]).sum() + jnp.sin(jnp.tensordot(p["t"], e["w"], 2)), {"t": arr(V, D)}, method=method)


@pytest.mark.slow
def test_lookup_beside_an_outer_product():
    same(lambda p, e: jnp.sin(p["t"][e["id"]]).sum() + jnp.sin(jnp.tensordot(e["s"][None], p["t"], 0)).sum(), {"t": arr(V, 1)})


def test_lookup_beside_an_outer_product_of_wide_rows():
    same(lambda p, e: jnp.sin(p["t"][e["id"]]).sum() + jnp.sin(jnp.tensordot(e["s"][None], p["t"], 0)).sum(), {"t": arr(V, D)})


@pytest.mark.parametrize("method", ["vmap", "book_keeping", "ghost"])
def test_shard_map_that_tracks_what_varies_is_right_or_refused(method):
    mesh, params, rows = Mesh(np.array(jax.devices()[:2]), ("d",)), {"k": arr(D, D)}, {"x": arr(4, T, D)}
    losses = lambda p, b: jnp.sin(ops.dense(b["x"], p["k"])).sum((1, 2))  # noqa: E731
    run = lambda p, b: dpx.clipped_sum(losses, p, b, weights=CLIP, method=method).norms_B  # noqa: E731
    try:
        found = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))(params, rows)
    except ConfigError:
        return
    np.testing.assert_allclose(found, run(params, rows), rtol=1e-4)


def test_a_branch_that_no_data_choose_guards_a_pole():
    def step(p):
        return lambda c, i: (lax.cond(i > 0, lambda c: c @ p["k"] / i, lambda c: c @ p["k"], c), None)

    same(lambda p, e: jnp.sin(lax.scan(step(p), e["x"], jnp.arange(3.0))[0]).sum(), {"k": arr(D, D)})


@pytest.mark.parametrize("v", [7.0, *(pytest.param(v, marks=pytest.mark.slow) for v in (5.3, 9.1))])
def test_ghost_with_bfloat16_between_ops_stays_within_the_clipping_norm(v):
    half = lambda y: y.astype(jnp.bfloat16)  # noqa: E731
    loss = lambda p, e: (half(p["s"] * 1.0) * half(e["s"]) * jnp.bfloat16(1.01) * half(e["s"])).astype(jnp.float32)  # noqa: E731
    for C in (0.3, 0.7, 1.3):
        clip = lambda n, C=C: C / jnp.maximum(n, C)  # noqa: E731
        found = dpx.weighted_grad(loss, weights=clip, method="ghost")({"s": jnp.float32(0.2)}, {"s": jnp.asarray([v])})
        assert abs(float(found.total["s"])) <= C * (1 + 1e-5)


@pytest.mark.slow
def test_method_vmap():
    same(lambda p, e: jnp.sin(e["x"] @ p["k"]).sum(), {"k": arr(D, D)}, method="vmap")


def test_a_loop_without_rounds():
    same(lambda p, e: jnp.sin(lax.fori_loop(0, 0, lambda _, c: c @ p["k"], e["x"]) @ p["k"]).sum(), {"k": arr(D, D)})


def test_a_stack_without_layers():
    same(lambda p, e: jnp.sin(lax.scan(lambda c, k: (c @ k, None), e["x"], p["s"])[0] @ p["k"]).sum(), {"s": arr(0, D, D), "k": arr(D, D)})


@pytest.mark.parametrize("shape", [(D, 0), (0, D)])
def test_a_kernel_without_numbers(shape):
    same(lambda p, e: jnp.sin(e["x"] @ p["k"]).sum() + jnp.sin(e["x"][:, : shape[0]] @ p["z"]).sum(), {"z": arr(*shape), "k": arr(D, D)})


def test_a_product_of_whole_numbers():
    dims = (((0,), (0,)), ((), ()))
    same(lambda p, e: jnp.sin(lax.dot_general(e["id"], p["k"], dims, preferred_element_type=jnp.float32)).sum(), {"k": arr(T, D)})


def test_a_reader_that_cannot_be_mapped_is_refused_in_words():
    loss = lambda p, e: jnp.sin(lax.ragged_dot(e["x"], p["k"], jnp.array([1, 3], jnp.int32))).sum()  # noqa: E731
    with pytest.raises(ConfigError, match="^the loss: cannot be mapped over examples"):
        same(loss, {"k": arr(2, D, D)})


@pytest.mark.parametrize(("params", "message"), [({}, "^params: contain no parameter"), ({"k": 1.0}, "^k: is a float and not an array")])
def test_odd_parameters_are_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        dpx.weighted_grad(lambda p, e: jnp.sin(e["x"]).sum() * sum(jax.tree.leaves(p)), weights=CLIP)(params, ROWS)
