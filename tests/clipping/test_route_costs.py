"""What `explain` says each way to a norm would cost, from shapes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.clipping import norms
from dpx.clipping.route_costs import RouteCost, of_lookup, of_matrix

ROWS, T, D, V = 4, 64, 96, 1000


def costs(loss, shapes, example, **options):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = {name: jax.ShapeDtypeStruct((ROWS, *shape), dtype) for name, (shape, dtype) in example.items()}
    taken = dpx.clipped_grad(loss, clipping_norm=1.0, **options).explain(params, batch)
    return {one.path: {cost.way: cost for cost in one.costs} for one in taken}


X = {"x": ((T, D), jnp.float32)}


def test_ways_of_a_matrix_and_of_a_gain():
    found = costs(lambda p, e: jnp.square(jnp.tanh(e["x"] @ p["kernel"]) * p["gain"]).sum(), {"kernel": (D, D), "gain": (D,)}, X)
    product = 2 * T * D * D
    assert found["kernel"] == {
        "kept": RouteCost("kept", product, 4 * D * D, True),
        "gram": RouteCost("gram", product + int(norms.gram_flops(T, D, D)), 8 * T * D, False),
        "recomputed": RouteCost("recomputed", 2 * product, 8 * T * D, False),
        "vmap": RouteCost("vmap", product, 4 * D * D, False),
    }
    assert found["gain"] == {"formed": RouteCost("formed", 0, 4 * D, True), "vmap": RouteCost("vmap", 0, 4 * D, False)}


def test_memory_decides_which_way_is_taken():
    loss = lambda p, e: jnp.square(jnp.tanh(e["x"] @ p["kernel"])).sum()  # noqa: E731
    ways = {bytes_: costs(loss, {"kernel": (D, D)}, X, kept_bytes=bytes_)["kernel"] for bytes_ in (0, ROWS * 4 * D * D)}
    assert [[name for name, cost in found.items() if cost.is_taken] for found in ways.values()] == [["gram"], ["kept"]]


def test_uses_of_a_loop_and_of_two_places_are_one_matrix():
    def loss(p, e):
        across = lambda h, x: (jnp.tanh(x + h @ p["across"]), None)  # noqa: E731
        h, _ = jax.lax.scan(across, jnp.zeros(D), jnp.tanh(e["x"] @ p["twice"]) @ p["twice"])
        return jnp.square(h).sum()

    found = costs(loss, {"across": (D, D), "twice": (D, D)}, X)
    assert found["across"]["kept"] == RouteCost("kept", 2 * T * D * D, 4 * D * D, True)
    assert found["twice"]["kept"] == RouteCost("kept", 2 * 2 * T * D * D, 4 * D * D, True)
    assert not any(cost.is_taken for path in found for way, cost in found[path].items() if way != "kept")


def test_layers_of_a_loop_and_lookups():
    def loss(p, e):
        h = p["table"][e["id"]]
        h, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(h @ kernel), None), h, p["layers"])
        return jnp.square(h).sum()

    found = costs(loss, {"table": (V, D), "layers": (3, D, D)}, {"id": ((T,), jnp.int32)})
    product = 2 * T * D * D
    assert list(found["layers"].values()) == [*of_matrix(T, D, D, "kept", 3), RouteCost("vmap", 3 * product, 3 * 4 * D * D, False)]
    assert (
        list(found["table"].values()) == [*of_lookup(T, D, V), RouteCost("vmap", 0, 4 * V * D, False)] and found["table"]["pairs"].is_taken
    )
    assert [cost.is_taken for cost in of_lookup(T, D, T)] == [False, True] == [cost.is_taken for cost in of_lookup(256, D, V)]


def test_a_tied_table_has_ways_of_both_uses():
    def loss(p, e):
        return jax.nn.logsumexp(p["table"][e["id"]] @ p["table"].T, -1).sum()

    found = costs(loss, {"table": (V, D)}, {"id": ((T,), jnp.int32)})["table"]
    assert {way for way, cost in found.items() if cost.is_taken} == {"gram", "pairs"}
    gradient = np.prod((V, D)) * 4
    assert found["kept"].bytes == found["vmap"].bytes == gradient and found["gram"].flops < found["recomputed"].flops


def test_with_enough_memory_no_matrix_costs_more_than_by_vmap():
    """The Gram form is then taken only where it holds less, and adds at most 6 % of the product that forms the gradient."""
    for T, p, d in itertools.product((1, 4, 16, 64, 256, 1024), (8, 64, 512, 4096), (8, 64, 512, 4096)):
        (taken,) = [cost for cost in of_matrix(T, p, d, norms.choose(T, p, d, True)) if cost.is_taken]
        by_vmap = RouteCost("vmap", 2 * T * p * d, 4 * p * d, False)
        assert taken.bytes <= by_vmap.bytes and taken.flops <= 1.06 * by_vmap.flops
