"""What `explain` says each way to a norm would cost, from shapes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import norms
from dpx.clipping.groups import FactoredWeights, flat, no_factor
from dpx.clipping.joint import RouteCost, of_lookup, of_matrix
from dpx.cost.traced import matmul_flops

ROWS, T, D, V = 4, 64, 96, 1000


def costs(loss, shapes, example, **options):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = {name: jax.ShapeDtypeStruct((ROWS, *shape), dtype) for name, (shape, dtype) in example.items()}
    taken = dpx.clipped_grad(loss, clipping_norm=1.0, **options).explain(params, batch)
    return {one.path: {cost.way: cost for cost in one.costs} for one in taken}


X = {"x": ((T, D), jnp.float32)}


def test_ways_of_a_matrix_and_of_a_gain():
    found = costs(lambda p, e: jnp.square(jnp.tanh(e["x"] @ p["kernel"]) * p["gain"]).sum(), {"kernel": (D, D), "gain": (D,)}, X)
    product, gram, factors, gradient = 2 * T * D * D, int(norms.gram_flops(T, D, D)), 8 * T * D, 4 * D * D
    # A product reads its factors; a gradient is written, and read for the norm and for the sum; ten FLOPs for a byte.
    formed = product + 10 * (factors + 3 * gradient)
    assert found["kernel"] == {
        "kept": RouteCost("kept", product, gradient, formed, True),
        "gram": RouteCost("gram", product + gram, factors, product + gram + 20 * factors, False),
        "recomputed": RouteCost("recomputed", 2 * product, factors, 2 * product + 20 * (factors + gradient), False),
        "vmap": RouteCost("vmap", product, gradient, formed, False),
    }
    assert found["gain"] == {way: RouteCost(way, 0, 4 * D, 120 * D, way == "formed") for way in ("formed", "vmap")}


def plan(loss, shapes, example, rows=ROWS, transform=dpx.clipped_grad, **options):
    """The ways that are taken, and the units that are computed at once."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = {name: jax.ShapeDtypeStruct((rows, *shape), dtype) for name, (shape, dtype) in example.items()}
    found = transform(loss, **({"clipping_norm": 1.0} if transform is dpx.clipped_grad else {}), **options).explain(params, batch)
    return [cost.way for taken in found for cost in taken.costs if cost.is_taken], found[0].units_at_once


def test_memory_decides_how_many_units_are_computed_at_once():
    loss, gradient = lambda p, e: jnp.square(jnp.tanh(e["x"] @ p["kernel"])).sum(), 4 * D * D
    found = [plan(loss, {"kernel": (D, D)}, X, kept_bytes=size * gradient) for size in (0, 1, 2, 3, ROWS)]
    assert found == [(["kept"], at_once) for at_once in (1, 1, 2, 2, ROWS)]


def test_where_products_between_positions_cost_less_than_by_vmap_all_units_are_computed_at_once():
    loss = lambda p, e: jnp.square(jnp.tanh(e["x"][:16] @ p["kernel"])).sum()  # noqa: E731
    assert plan(loss, {"kernel": (D, D)}, X, kept_bytes=0) == (["gram"], ROWS)


def squared(p, e):
    return jnp.square(jnp.tanh(e["x"] @ p["kernel"])).sum()


JOINT = {"transform": dpx.weighted_grad, "weights": lambda norms: 1 / norms.max() + 0 * norms}
# Gradients of all rows are larger than what is kept if the user does not say how much.
WIDE, WIDE_X = (2048, 2048), {"x": ((1024, 2048), jnp.float32)}


def test_weights_of_ones_own_may_depend_on_all_norms_so_that_all_units_are_computed_at_once():
    assert plan(squared, {"kernel": (D, D)}, X, kept_bytes=0, **JOINT) == (["gram"], ROWS)
    assert plan(squared, {"kernel": WIDE}, WIDE_X, rows=8, **JOINT) == (["kept"], 8)
    assert plan(squared, {"kernel": WIDE}, WIDE_X, rows=8) == (["kept"], 4)


def test_a_traced_sum_never_forms_a_gradient_twice_unless_the_user_limits_memory():
    """By turns where a weight depends on one norm alone, as the weights of a run do, and else by keeping what vmap keeps."""
    params, batch = {"kernel": jax.ShapeDtypeStruct(WIDE, jnp.float32)}, {"x": jax.ShapeDtypeStruct((8, 1024, 2048), jnp.float32)}
    losses = lambda p, b: jnp.square(jnp.tanh(b["x"] @ p["kernel"])).sum((1, 2))  # noqa: E731
    weights = flat(1.0)

    def traced(weights, **options):
        return lambda p, b: dpx.clipped_sum(losses, p, b, weights=weights, **{"method": "traced"} | options).total

    def sizes(run):
        """FLOPs, and whether gradients of all rows are formed at once."""
        jaxpr = str(jax.make_jaxpr(run)(params, batch))
        return matmul_flops(run, params, batch), "f32[8,2048,2048]" in jaxpr

    by_vmap, _ = sizes(traced(weights, method="vmap"))
    assert sizes(traced(FactoredWeights(weights, no_factor))) == (by_vmap, False)
    assert sizes(traced(weights)) == (by_vmap, True)
    assert sizes(traced(weights, kept_bytes=0))[0] > 1.2 * by_vmap


def test_a_method_that_the_user_names_says_what_it_costs_beside_vmap():
    given = {"kernel": jax.ShapeDtypeStruct((D, D), jnp.float32)}, {"x": jax.ShapeDtypeStruct((ROWS, T, D), jnp.float32)}
    (kept,), (by_vmap,), (ghost,) = (
        dpx.clipped_grad(squared, clipping_norm=1.0, method=method).explain(*given) for method in ("book_keeping", "vmap", "ghost")
    )
    taken = {one.beside_vmap: [cost.way for cost in one.costs if cost.is_taken] for one in (kept, by_vmap)}
    assert taken == {1.0: ["vmap"]} and [cost.way for cost in kept.costs if cost.is_taken] == ["kept"]
    assert by_vmap.bytes_per_example == 4 * D * D and by_vmap.units_at_once == ROWS
    ways = {cost.way: cost for cost in ghost.costs}
    assert [way for way, cost in ways.items() if cost.is_taken] == ["gram", "second_pass"]
    # Forward and backward once more.
    assert ways["second_pass"].flops == 4 * T * D * D and ways["second_pass"].bytes == 0
    assert ghost.beside_vmap == (ways["gram"].cost + ways["second_pass"].cost) / ways["vmap"].cost > 1


def test_what_ghost_clipping_forms_and_does_not_hold_it_forms_again():
    loss = lambda p, e: jnp.square(e["x"] * p["gain"]).sum()  # noqa: E731
    (gain,) = dpx.clipped_grad(loss, clipping_norm=1.0, method="ghost").explain(
        {"gain": jax.ShapeDtypeStruct((D,), jnp.float32)}, {"x": jax.ShapeDtypeStruct((ROWS, T, D), jnp.float32)}
    )
    assert gain.beside_vmap == 2 and [cost.way for cost in gain.costs if cost.is_taken] == ["formed", "second_pass"]


@pytest.mark.parametrize("kept_bytes", [1 << 18, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 1 << 16, 1 << 30))])
def test_no_parameter_costs_more_than_by_vmap(kept_bytes):
    def loss(p, e):
        h = jnp.tanh(p["table"][e["id"]] + p["small"][e["id"] % 7])
        h, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(jnp.tanh(h @ kernel) @ kernel), None), h, p["layers"])
        across = lambda h, x: (jnp.tanh(x @ p["into"] + h @ p["across"]) * p["gain"], None)  # noqa: E731
        h, _ = jax.lax.scan(across, jnp.zeros(D), h)
        return jax.nn.logsumexp(p["table"] @ h)

    shapes = {"table": (200, D), "small": (7, D), "layers": (3, D, D), "into": (D, D), "across": (D, D), "gain": (D,)}
    for tokens in (8, 64, 512):
        for path, found in costs(loss, shapes, {"id": ((tokens,), jnp.int32)}, kept_bytes=kept_bytes).items():
            taken = [cost for cost in found.values() if cost.is_taken]
            assert taken and sum(cost.cost for cost in taken) <= found["vmap"].cost, path


def test_uses_of_a_loop_and_of_two_places_are_one_matrix():
    def loss(p, e):
        across = lambda h, x: (jnp.tanh(x + h @ p["across"]), None)  # noqa: E731
        h, _ = jax.lax.scan(across, jnp.zeros(D), jnp.tanh(e["x"] @ p["twice"]) @ p["twice"])
        return jnp.square(h).sum()

    found = costs(loss, {"across": (D, D), "twice": (D, D)}, X)
    kept = lambda tokens: next(cost for cost in of_matrix(tokens, D, D, "kept") if cost.way == "kept")  # noqa: E731
    assert found["across"]["kept"] == kept(T) and found["twice"]["kept"] == kept(2 * T)
    assert not any(cost.is_taken for path in found for way, cost in found[path].items() if way != "kept")


def test_layers_of_a_loop_and_lookups():
    def loss(p, e):
        h = p["table"][e["id"]]
        h, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(h @ kernel), None), h, p["layers"])
        return jnp.square(h).sum()

    found = costs(loss, {"table": (V, D), "layers": (3, D, D)}, {"id": ((T,), jnp.int32)})
    *of_layers, _ = of_matrix(T, D, D, "kept", 3)
    *of_table, _ = of_lookup(T, D, V)
    assert list(found["layers"].values())[:3] == of_layers and found["layers"]["vmap"].bytes == 3 * 4 * D * D
    assert list(found["table"].values())[:3] == of_table and found["table"]["pairs"].is_taken
    assert [[cost.way for cost in of_lookup(*sizes) if cost.is_taken] for sizes in ((T, D, T), (256, D, V))] == [["by_id"]] * 2


def test_a_table_that_is_smaller_than_the_cotangents_of_its_rows_is_kept():
    loss = lambda p, e: jnp.square(p["table"][e["id"]]).sum()  # noqa: E731
    ways = [plan(loss, {"table": (rows, D)}, {"id": ((T,), jnp.int32)}, kept_bytes=0)[0] for rows in (T - 1, T + 1, V)]
    assert ways == [["kept"], ["pairs"], ["pairs"]]


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
        found = of_matrix(T, p, d, norms.choose(T, p, d, True))
        (taken,) = [cost for cost in found if cost.is_taken]
        assert taken.bytes <= 4 * p * d and taken.flops <= 1.06 * 2 * T * p * d
        assert taken.cost <= next(cost.cost for cost in found if cost.way == "kept")
