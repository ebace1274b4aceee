"""Nets with loops over rounds and experts that are gathered, as users write them: libraries' own cells and loops by hand.

T: rounds, D: width, N: states, E: experts, F: width between.
"""

from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

from tests.clipping.test_programs_cost import programs

T, D, N, E, F, ROWS = 32, 64, 8, 8, 128, 16


def of_tree(loss, params, example=(T, D)):
    """A subject whose parameters are the leaves of a library's tree."""
    flat, tree = jax.tree.flatten(params)
    shapes = {f"leaf_{at:02}": leaf.shape for at, leaf in enumerate(flat)}
    return programs.Subject(lambda p, x: loss(jax.tree.unflatten(tree, [p[name] for name in shapes]), x), shapes, example, ROWS)


def squared(y):
    return jnp.square(y).mean()


def linen(cell, has_batch=True):
    """With an axis of batches, which `nn.RNN` does not need."""
    x = jnp.zeros((1, T, D) if has_batch else (T, D))
    params = jax.eval_shape(nn.RNN(cell(D)).init, jax.random.key(0), x)["params"]

    def loss(p: Any, x: Any) -> Any:
        # The carried state begins in the type of the parameters.
        model = nn.RNN(cell(D, param_dtype=jax.tree.leaves(p)[0].dtype))
        return squared(model.apply({"params": p}, x[None] if has_batch else x))

    return of_tree(loss, params)


def nnx_scanned():
    """Layers stacked by `nnx.vmap`, run by `nnx.scan`."""

    class Layer(nnx.Module):
        def __init__(self, rngs: Any):
            self.up, self.down = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.down(nnx.tanh(self.up(x)))

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stacked(rngs: Any) -> Any:
        return Layer(rngs)

    graph, params = nnx.split(stacked(nnx.Rngs(0)), nnx.Param)

    def loss(p: Any, x: Any) -> Any:
        return squared(nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, nnx.merge(graph, p)))

    return of_tree(loss, params)


def nnx_cell():
    """A cell of nnx in every round of `nnx.scan`."""
    graph, params = nnx.split(nnx.GRUCell(D, D, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(p: Any, x: Any) -> Any:
        cell = nnx.merge(graph, p)
        return squared(nnx.scan(lambda h, x: cell(h, x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(jnp.zeros(D), x)[1])

    return of_tree(loss, params)


def haiku(core):
    model = hk.without_apply_rng(hk.transform(lambda x: hk.dynamic_unroll(own := core(D), x, own.initial_state(None))[0]))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((T, D)))
    return of_tree(lambda p, x: squared(model.apply(p, x)), params)


def by_hand():
    """A simple net in `lax.scan`."""
    shapes = {"into": (D, D), "across": (D, D), "bias": (D,)}

    def loss(p: Any, x: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ p["into"] + h @ p["across"] + p["bias"])
            return h, h

        return squared(jax.lax.scan(cell, jnp.zeros(D), x)[1])

    return programs.Subject(loss, shapes, (T, D), ROWS)


def s4d(is_associative=False):
    """A diagonal state space for each feature, with a skip and a mix of features."""
    shapes = {"log_step": (D,), "decay": (D, N), "into": (D, N), "out": (D, N), "skip": (D,), "mix": (D, D)}

    def loss(p: Any, x: Any) -> Any:
        step = jnp.exp(p["log_step"])[:, None]
        kept = jnp.exp(-step * jnp.exp(p["decay"]))
        driven = x[:, :, None] * (step * p["into"])
        if is_associative:
            join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
            states = jax.lax.associative_scan(join, (jnp.broadcast_to(kept, driven.shape), driven))[1]
            y = (states * p["out"]).sum(-1)
        else:

            def round_of(h: Any, u: Any) -> Any:
                h = kept * h + u
                return h, (h * p["out"]).sum(-1)

            y = jax.lax.scan(round_of, jnp.zeros((D, N)), driven)[1]
        return squared(jnp.tanh(y + p["skip"] * x) @ p["mix"])

    return programs.Subject(loss, shapes, (T, D), ROWS)


def s4d_in_loop():
    """Every parameter is read in every round."""
    shapes = {"decay": (D, N), "into": (D, N), "out": (D, N), "mix": (D, D)}

    def loss(p: Any, x: Any) -> Any:
        def round_of(h: Any, u: Any) -> Any:
            h = jax.nn.sigmoid(p["decay"]) * h + u[:, None] * p["into"]
            return h, jnp.tanh((h * p["out"]).sum(-1)) @ p["mix"]

        return squared(jax.lax.scan(round_of, jnp.zeros((D, N)), x)[1])

    return programs.Subject(loss, shapes, (T, D), ROWS)


def mamba():
    """A selective scan: step, input and output of the states depend on the token."""
    shapes = {"into": (D, 2 * D), "step": (D, D), "bias": (D,), "select": (D, 2 * N), "decay": (D, N), "skip": (D,), "out": (D, D)}

    def loss(p: Any, x: Any) -> Any:
        u, gate = jnp.split(x @ p["into"], 2, -1)

        def round_of(h: Any, u: Any) -> Any:
            step = jax.nn.softplus(u @ p["step"] + p["bias"])[:, None]
            into, out = jnp.split(u @ p["select"], 2, -1)
            h = jnp.exp(-step * jnp.exp(p["decay"])) * h + step * u[:, None] * into
            return h, (h * out).sum(-1) + p["skip"] * u

        y = jax.lax.scan(round_of, jnp.zeros((D, N)), u)[1]
        return squared((y * jax.nn.silu(gate)) @ p["out"])

    return programs.Subject(loss, shapes, (T, D), ROWS)


def gathered(kind):
    """Each token has one expert: its kernels are gathered (`take`), or sliced for one token after another."""
    shapes = {"router": (D, E), "up": (E, D, F), "down": (E, F, D)}

    def loss(p: Any, x: Any) -> Any:
        routed = jax.nn.softmax(x @ p["router"])
        chosen = jnp.argmax(routed, -1)
        if kind == "take":
            y = jnp.einsum("tf,tfd->td", jax.nn.gelu(jnp.einsum("td,tdf->tf", x, p["up"][chosen])), p["down"][chosen])
        elif kind == "vmap":
            y = jax.vmap(lambda x, e: jax.nn.gelu(x @ p["up"][e]) @ p["down"][e])(x, chosen)
        else:
            y = jax.lax.map(lambda given: jax.nn.gelu(given[0] @ p["up"][given[1]]) @ p["down"][given[1]], (x, chosen))
        return squared(x + y * routed.max(-1)[:, None])

    return programs.Subject(loss, shapes, (T, D), ROWS)


def expert_of_example():
    """All tokens of an example have one expert."""
    shapes = {"router": (D, E), "up": (E, D, F), "down": (E, F, D)}

    def loss(p: Any, x: Any) -> Any:
        routed = jax.nn.softmax(x.mean(0) @ p["router"])
        e = jnp.argmax(routed)
        return squared(x + routed[e] * (jax.nn.gelu(x @ p["up"][e]) @ p["down"][e]))

    return programs.Subject(loss, shapes, (T, D), ROWS)


LOOPS = {
    "linen_lstm": lambda: linen(nn.OptimizedLSTMCell),
    "linen_gru": lambda: linen(nn.GRUCell),
    "linen_simple": lambda: linen(nn.SimpleCell),
    "linen_lstm_of_one": lambda: linen(nn.LSTMCell, has_batch=False),
    "nnx_layers": nnx_scanned,
    "nnx_gru": nnx_cell,
    "haiku_lstm": lambda: haiku(hk.LSTM),
    "haiku_gru": lambda: haiku(hk.GRU),
    "by_hand": by_hand,
    "s4d": s4d,
    "s4d_associative": lambda: s4d(True),
    "s4d_in_loop": s4d_in_loop,
    "mamba": mamba,
    "experts_taken": lambda: gathered("take"),
    "experts_vmapped": lambda: gathered("vmap"),
    "experts_in_turn": lambda: gathered("map"),
    "expert_of_example": expert_of_example,
}
