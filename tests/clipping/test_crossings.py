"""What carries something from one example to another where no shape shows it: refused, by name, by every method that could run it.

B: examples, D: width.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, batching
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dpx
from dpx.clipping import ops
from dpx.clipping import program as programs
from dpx.clipping.op import Formed, apply
from dpx.declaration import ConfigError

B, D = 4, 3
PARAMS = {"k": jnp.asarray(np.random.default_rng(0).normal(0, 1, (D, D)), jnp.float32)}
ROWS = {"x": jnp.asarray(np.random.default_rng(1).normal(0, 1, (2, B, D)), jnp.float32)}


def clip(norms_B):
    return 1 / jnp.maximum(norms_B, 1)


@jax.custom_vjp
def averaged_backwards(x):
    return x


averaged_backwards.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.pmean(g, "outside"),))

ACROSS = {
    "pmean": (lambda x: x - jax.lax.pmean(x, "outside"), "^psum over outside in the loss"),
    "pmax": (lambda x: x / jax.lax.pmax(jax.lax.stop_gradient(x), "outside"), "^pmax over outside in the loss"),
    "all_gather": (lambda x: x - jax.lax.all_gather(x, "outside").mean(0), "^all_gather over outside in the loss"),
    "ppermute": (lambda x: x + jax.lax.ppermute(x, "outside", [(0, 1), (1, 0)]), "^ppermute over outside in the loss"),
    "in_a_loop": (lambda x: jax.lax.scan(lambda c, _: (jax.lax.psum(c, "outside"), None), x, None, 2)[0], "^psum over outside"),
    "backwards": (averaged_backwards, "^psum over outside in the loss"),
}


def summed(mix, method):
    """The norms of a sum over what comes after a product, mixed, by `method`; `clipped_grad` is of one example."""
    if method == "clipped_grad":
        gradient = dpx.clipped_grad(lambda p, e: jnp.sin(mix(e["x"] @ p["k"])).sum(), clipping_norm=1.0)
        return lambda rows: gradient(PARAMS, rows).norms
    losses = lambda p, b: jnp.sin(mix(ops.dense(b["x"], p["k"]))).sum(1)  # noqa: E731
    return lambda rows: dpx.clipped_sum(losses, PARAMS, rows, weights=clip, method=method).norms_B


@pytest.mark.parametrize("method", ["clipped_grad", "vmap", "book_keeping", "ghost", "traced"])
@pytest.mark.parametrize("name", ACROSS)
def test_a_collective_over_an_axis_bound_outside_is_refused_by_name(name, method):
    mix, message = ACROSS[name]
    with pytest.raises(ConfigError, match=message):
        jax.vmap(summed(mix, method), axis_name="outside")(ROWS)


@pytest.mark.parametrize("method", ["clipped_grad", "book_keeping"])
def test_a_collective_over_devices_is_refused_by_name(method):
    run = summed(ACROSS["pmean"][0], method)
    mesh = Mesh(np.array(jax.devices()[:1]), ("outside",))
    with pytest.raises(ConfigError, match="^psum over outside in the loss: mixes examples of several devices"):
        jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("outside"), check_vma=False)(jax.tree.map(lambda leaf: leaf[0], ROWS))


def test_an_axis_of_the_losss_own_is_no_collective():
    inside = lambda x: jax.vmap(lambda one: one - jax.lax.pmean(one, "own"), axis_name="own")(x)  # noqa: E731
    assert summed(inside, "clipped_grad")({"x": ROWS["x"][0]}).shape == (B,)


@jax.custom_batching.custom_vmap
def ruled(x):
    return 2 * x


@ruled.def_vmap
def _all_at_once(size, is_batched, x):
    return x - x.mean(0), True


foreign = Primitive("foreign")
foreign.def_impl(lambda x: x)
foreign.def_abstract_eval(lambda x: x)
ad.deflinear2(foreign, lambda cotangent, _: [cotangent])
batching.primitive_batchers[foreign] = lambda given, axes: (foreign.bind(given[0] - given[0].mean(0)), axes[0])


def host(vmap_method):
    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x * jax.pure_callback(np.tanh, shape, jax.lax.stop_gradient(x), vmap_method=vmap_method)

    return call


def remembered(x):
    return x * io_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))


RULES = {
    "custom_vmap": (lambda x: ruled(jax.lax.stop_gradient(x)) * x, "^custom_vmap in the loss: has its own rule"),
    "custom_vmap_in_a_loop": (
        lambda x: x * jax.lax.fori_loop(0, 2, lambda _, c: ruled(c), jax.lax.stop_gradient(x)),
        "^custom_vmap in the loss: has its own rule",
    ),
    "primitive": (foreign.bind, "^foreign in the loss: has a batching rule from outside jax"),
    "host_at_once": (host("expand_dims"), "^pure_callback in the loss: sends all examples to the host at once"),
    "host_broadcast": (host("broadcast_all"), "^pure_callback in the loss: sends all examples to the host at once"),
    "side_effect": (remembered, "^the loss: has a side effect"),
}


@pytest.mark.parametrize("method", ["clipped_grad", "vmap"])
@pytest.mark.parametrize("name", RULES)
def test_what_reads_all_examples_under_vmap_is_refused_by_name(name, method):
    mix, message = RULES[name]
    with pytest.raises(ConfigError, match=message):
        summed(mix, method)({"x": ROWS["x"][0]})


def test_a_host_function_of_one_row_after_another_is_taken():
    found = summed(host("sequential"), "clipped_grad")({"x": ROWS["x"][0]})
    truth = summed(lambda x: x * jnp.tanh(jax.lax.stop_gradient(x)), "clipped_grad")({"x": ROWS["x"][0]})
    np.testing.assert_allclose(found, truth, rtol=1e-5)


def test_jaxs_own_batching_rules_are_told_from_others():
    rules = batching.fancy_primitive_batchers.items()
    outside = {primitive.name for primitive, rule in rules if not programs._is_jaxs(rule)}
    own = {primitive.name for primitive in vars(primitives).values() if isinstance(primitive, Primitive)}
    assert "foreign" in outside and len(own) > 100 and not own & outside


def test_an_index_that_changed_since_the_loss_was_accepted_is_looked_at_again():
    """The program prints as it did: the index is a value that the loss closes over."""
    held = {"index": np.arange(B)}
    losses = lambda p, b: jnp.sin(ops.dense(b["x"][held["index"][: len(b["x"])]], p["k"])).sum(1)  # noqa: E731
    rows = {"x": ROWS["x"][0]}
    dpx.clipped_sum(losses, PARAMS, rows, weights=clip)
    held["index"] = np.array([0, 1, 3, 2])
    with pytest.raises(ConfigError, match="by an index that may belong to another example"):
        dpx.clipped_sum(losses, PARAMS, rows, weights=clip)


@dataclasses.dataclass(frozen=True)
class Forgetful(Formed):
    """A scale whose sum forgets large rows: nothing that the program of both passes shows."""

    name: str = "forgetful"

    def forward(self, leaves, inputs):
        return inputs[0] * leaves["scale"], inputs[0]

    def input_cotangent(self, leaves, residuals, cotangent):
        return (cotangent * leaves["scale"],), {"scale": residuals * cotangent}

    def weighted_sum(self, leaves, record, weights):
        return {"scale": weights[0] @ jnp.where(jnp.abs(record["scale"]) > 1000, 0, record["scale"])}


def test_an_op_is_tried_on_the_rows_that_the_user_gave():
    losses = lambda p, b: apply(Forgetful(), p, (b["x"],)).sum(1)  # noqa: E731
    params, rows = {"scale": jnp.ones(D)}, {"x": ROWS["x"][0]}
    dpx.clipped_sum(losses, params, rows, weights=clip)
    others = lambda p, b: losses(p, b)  # noqa: E731
    with pytest.raises(ConfigError, match="gives an example other losses, gradients or norms"):
        dpx.clipped_sum(others, params, {"x": 5000 * rows["x"]}, weights=clip)
