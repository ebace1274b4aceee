"""Where only some parameters are trained, their norms and sums are exact, nothing is kept for the others, and nothing hides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.clipping.groups import PerLayerWeights
from dpx.clipping.program import traced
from dpx.clipping.readers import merged
from dpx.declaration import ConfigError
from dpx.models import trainable
from dpx.models.trained import matching
from tests.clipping.batches import QUICKLY, assert_trees_close
from tests.clipping.exactness import SELECTIONS, case
from tests.clipping.test_ops import WEIGHTS, batch, losses, parameters


@pytest.mark.slow
@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
@pytest.mark.parametrize("selection", ["bias", "top", "lora"])
@pytest.mark.parametrize("options", [{"weights": PerLayerWeights(3.0)}, {"rows_per_unit": 2}], ids=["per_layer", "units"])
def test_groups_and_units_equal_vmap(selection, method, options):
    losses, params, batch = case("bert", with_adapters=True).parts
    trained, frozen = trainable.split(params, SELECTIONS[selection])

    def run(method):
        given = {"weights": WEIGHTS, "frozen": frozen, "method": method, "checked": False} | options
        return jax.jit(lambda trained, batch: dpx.clipped_sum(losses, trained, batch, **given))(
            trained, jax.tree.map(lambda x: x[:4], batch)
        )

    found, reference = run(method), run("vmap")
    np.testing.assert_allclose(np.square(found.norms_B), np.square(reference.norms_B), rtol=2e-5)
    # A floor for the keys' adapters, of which nothing but rounding is left.
    assert_trees_close(found.total, jax.tree.map(np.asarray, reference.total), 2e-5, 1e-7)


def rest(*trained):
    """(trained, frozen) of the small model made of ops."""
    return trainable.split(parameters(), matching(*trained))


def quickly(function, *arguments):
    return jax.jit(function, compiler_options=QUICKLY)(*arguments)


def anyhow(params, batch):
    """What rests may be read by anything."""
    return losses(params, batch)[0] * jnp.sum(jnp.square(params["shift"])) + (params["table"].T @ params["table"]).sum(), {}


@pytest.mark.parametrize(
    "changed, trained",
    [
        (anyhow, ("head/bias", "layers/scale")),
        pytest.param(losses, ("table", "layers/kernel", "head/kernel"), marks=pytest.mark.slow),
    ],
)
def test_ops_of_a_model_of_ones_own(changed, trained):
    """What may read anything is tried out on random rows as well, with random frozen parameters."""
    params, frozen = rest(*trained)

    def run(method):
        options = {"weights": WEIGHTS, "method": method, "checked": changed is anyhow}
        return quickly(lambda p, f, b: dpx.clipped_sum(changed, p, b, frozen=f, **options), params, frozen, batch())

    found, reference = run("book_keeping"), run("vmap")
    np.testing.assert_allclose(found.norms_B, reference.norms_B, rtol=1e-5)
    assert_trees_close(found.total, jax.tree.map(np.asarray, reference.total))


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_plain_sum_is_of_what_is_trained(fused):
    params, frozen = rest("head/*", "layers/bias")
    expected = quickly(jax.grad(lambda p, b: losses(merged(p, frozen), b)[0].sum()), params, batch())
    found = quickly(lambda p, b: dpx.plain_sum(losses, p, b, frozen=frozen, fused=fused).total, params, batch())
    assert_trees_close(found, jax.tree.map(np.asarray, expected))


def test_a_loss_of_one_example_has_frozen_parameters_too():
    def loss(params, frozen, example):
        params = params | frozen
        hidden_d = jnp.tanh(example["x"] @ params["kernel"] + params["bias"])
        return jnp.square(hidden_d @ params["out"])

    rows = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)}
    params, frozen = {"bias": jnp.zeros(4)}, {"kernel": jnp.full((3, 4), 0.1), "out": jnp.ones(4)}
    found = quickly(dpx.weighted_grad(loss, weights=jnp.ones_like, shared_argnums=1), params, frozen, rows)
    expected = quickly(jax.grad(lambda p: jax.vmap(lambda row: loss(p, frozen, row))(rows).sum()), params)
    assert_trees_close(found.total, jax.tree.map(np.asarray, expected))
    losses = lambda p, b: jax.vmap(lambda row: loss(jax.lax.stop_gradient(p), {}, row))(b)  # noqa: E731
    with pytest.raises(ConfigError, match="^bias: is trained, but the loss does not depend on it through differentiable operations"):
        dpx.clipped_sum(losses, params, rows, weights=jnp.ones_like, frozen=frozen, method="traced")


def recorded(selection):
    """(numbers that a step records, numbers trained, the ops that record something)."""
    losses, params, batch = case("bert", with_adapters=True).parts
    trained, frozen = trainable.split(params, SELECTIONS[selection])
    sites = traced(losses, trained, batch, {"kept_bytes": 0}, 4, frozen).sites
    sizes = [leaf.size for site in sites for leaf in jax.tree.leaves(site.record)]
    return sum(sizes), sum(leaf.size for leaf in jax.tree.leaves(trained)), {site.op.name for site in sites}


@pytest.mark.parametrize("selection", ["bias", "lora_ffa"])
def test_nothing_is_recorded_for_frozen_parameters(selection):
    """The gradients of what is trained, and of each layer its norm."""
    found, trained, _ = recorded(selection)
    assert found == 4 * (trained + 2)


def test_below_the_last_layer_nothing_is_recorded():
    assert recorded("last_layer")[2] == {"dense", "layer_norm", "token_loss"}


def refused(match, changed, params, frozen, **options):
    with pytest.raises(ConfigError, match=match) as error:
        jax.eval_shape(lambda p, f, b: dpx.clipped_sum(changed, p, b, frozen=f, weights=WEIGHTS, **options), params, frozen, batch())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["book_keeping", "vmap"])
def test_trees_that_do_not_make_one_are_refused(method):
    params, frozen = rest("head/*")
    refused("^head/bias: is in both trees", losses, params, frozen | {"head": {"bias": jnp.ones(4)}}, method=method)
    refused("^head/bias: is the path of two parameters", losses, params, frozen | {"head/bias": jnp.ones(4)}, method="book_keeping")
    del frozen["shift"]
    refused("^params and frozen: together do not have the structure that the loss takes .*shift", losses, params, frozen, method=method)


@pytest.mark.parametrize("method", ["book_keeping", "vmap"])
def test_a_parameter_that_no_path_reaches_is_refused(method):
    """However it is cut off; that its gradient is zero says nothing."""
    params, frozen = rest("head/*", "shift")

    def stopped(params, batch):
        head = jax.lax.stop_gradient(ops.add_bias(jnp.ones((4, 6)), params["shift"]))
        return losses(params | {"shift": jnp.zeros(6)}, batch)[0] + head.sum(1), {}

    def counted(params, batch):
        return losses(params | {"shift": jnp.zeros(6)}, batch)[0], {"of": ops.add_bias(jnp.ones((4, 6)), params["shift"]).sum(1)}

    def looped(params, batch):
        def round_of(carry, _):
            kept, thrown = carry
            return (kept * 0.5, ops.add_bias(thrown, params["shift"])), jnp.sign(thrown).sum(1)

        (kept, _), signs = jax.lax.scan(round_of, (losses(params | {"shift": jnp.zeros(6)}, batch)[0], jnp.ones((4, 6))), None, 3)
        return kept + signs.sum(0)

    for changed in (stopped, counted, looped):
        refused(
            "^shift: is trained, but the loss does not depend on it through differentiable operations",
            changed,
            params,
            frozen,
            method=method,
        )


@pytest.mark.parametrize("method", ["book_keeping", "vmap"])
def test_a_gradient_that_is_zero_is_no_missing_path(method):
    """An adapter's first factor, while the second is zero."""
    params = {"a": jnp.ones((6, 2)), "b": jnp.zeros((2, 4))}

    def adapted(params, batch):
        x_Bd = ops.lookup(params["table"], batch["id"]).mean(1)
        return jnp.square(ops.dense(x_Bd, params["head"]["kernel"]) + ops.low_rank(x_Bd, params["a"], params["b"])).sum(1)

    options = {"frozen": parameters(), "weights": WEIGHTS, "method": method, "checked": False}
    found = quickly(lambda p, b: dpx.clipped_sum(adapted, p, b, **options).total, params, batch())
    assert not np.any(found["a"]) and np.any(found["b"])


def test_gains_from_elsewhere_whose_value_a_sum_needs_are_refused():
    """A stack that has a kernel's input again from a gain that is nobody's parameter would read zeros for it."""
    of, params, rows = case("bert", with_adapters=True).parts
    trained, frozen = trainable.split(params, SELECTIONS["kernels"])
    layers = frozen["layers"]
    held = layers["attention_norm"]
    frozen = frozen | {"layers": {name: leaf for name, leaf in layers.items() if name != "attention_norm"}}

    def closed(params, batch):
        gains = jax.tree.map(lambda leaf: leaf * 1.0, held)
        return of(params | {"layers": params["layers"] | {"attention_norm": gains}}, batch)

    options = {"frozen": frozen, "weights": WEIGHTS, "kept_bytes": 0}
    with pytest.raises(ConfigError, match="^op layer_stack: needs the value of attention_norm/bias again"):
        jax.eval_shape(lambda p, b: dpx.clipped_sum(closed, p, b, **options), trained, rows)
