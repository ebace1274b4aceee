"""Programs nobody thought of: ops in any order, shared, looped, branched, now and then along the wrong axis. Right, or refused.

A step takes x [B, T, d] to the like; a program is a few of them, and says which parameters each has. What is not drawn is what a
test would have to know about the inside of clipping.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dpx.clipping import ops
from tests.clipping.attacks import ALL_WAYS, Attack, B, D, L, V, batch, drawn, look, outcome, total, truth

# As many tokens as examples: no shape tells a wrong axis.
T = B
SHAPES = {"kernel": (D, D), "table": (V, D), "bias": (D,), "scale": (D,), "rows": (T, D), "stack": (L, D, D)}


def swapped(x):
    return jnp.swapaxes(x, 0, 1)


def layer(x, kernel):
    return jnp.tanh(ops.dense(x, kernel)), None


def attended(x):
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)), x)


def in_line(x, stack):
    for i in range(L):
        x, _ = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], stack))
    return x


# Each with the kinds of its parameters.
OPS = {
    "dense": (("kernel",), lambda x, b, k: jnp.tanh(ops.dense(x, k))),
    "dense_and_bias": (("kernel", "bias"), lambda x, b, k, c: jnp.tanh(ops.dense(x, k, c))),
    "gated": (("kernel",), lambda x, b, k: x * jnp.tanh(ops.dense(x, k))),
    "of_one_text": (("kernel",), lambda x, b, k: jnp.tanh(ops.dense(x[:, None], k))[:, 0]),
    "pooled": (("kernel",), lambda x, b, k: x + jnp.tanh(ops.dense(x.mean(1), k))[:, None]),
    "lookup": (("table",), lambda x, b, t: x + look(t, b["id"])),
    "small_lookup": (("table",), lambda x, b, t: x * ops.small_lookup(t, b["label"], jnp.result_type(float))),
    "add_bias": (("bias",), lambda x, b, c: ops.add_bias(x, c)),
    "add_rows": (("rows",), lambda x, b, t: ops.add_rows(x, t)),
    "layer_norm": (("scale", "bias"), lambda x, b, s, c: ops.layer_norm(x, s, c, 1e-3)),
    "decode": (("table",), lambda x, b, t: jnp.tanh(ops.decode(x, t))[..., :D]),
    "scan": (("stack",), lambda x, b, k: jax.lax.scan(layer, x, k)[0]),
    "scan_backwards": (("stack",), lambda x, b, k: jax.lax.scan(layer, x, k, reverse=True)[0]),
    "in_line": (("stack",), lambda x, b, k: in_line(x, k)),
    "attended": ((), lambda x, b: attended(x)),
    "turned": ((), lambda x, b: x[:, ::-1]),
    "turned_around": ((), lambda x, b: swapped(jnp.cumsum(swapped(x), 0)) / T),
    "flat": ((), lambda x, b: jnp.tanh(x.reshape(-1, T * D)[:, ::-1]).reshape(-1, T, D)),
}
# Lawful too, but parameters meet more than one op, or come to it another way.
HARD = {
    "remat": (("kernel", "bias"), lambda x, b, k, c: jax.checkpoint(lambda k, c, x: jnp.tanh(ops.dense(x, k, c)))(k, c, x)),
    "remat_scan": (("stack",), lambda x, b, k: jax.lax.scan(jax.checkpoint(layer), x, k)[0]),
    "jit": (("kernel",), lambda x, b, k: jax.jit(lambda k, x: jnp.tanh(ops.dense(x, k)))(k, x)),
    "rounds": (("kernel",), lambda x, b, k: jax.lax.scan(lambda x, _: layer(x, k), x, None, length=2)[0]),
    "for": (("kernel",), lambda x, b, k: jax.lax.fori_loop(0, 2, lambda _, x: layer(x, k)[0], x)),
    "branches": (("kernel", "kernel"), lambda x, b, k, j: jax.lax.cond(jnp.array(True), lambda: layer(x, k)[0], lambda: layer(x, j)[0])),
    "a_branch": (("kernel",), lambda x, b, k: jax.lax.cond(jnp.array(False), lambda: x, lambda: layer(x, k)[0])),
    "tied": (("table",), lambda x, b, t: jnp.tanh(ops.decode(jnp.tanh(x + look(t, b["id"])), t))[..., :D]),
    "twice": (("kernel",), lambda x, b, k: layer(layer(x, k)[0], k)[0]),
    "rows_twice": (("rows",), lambda x, b, t: ops.add_rows(jnp.tanh(ops.add_rows(x, t)), t)),
}
WRONG = {
    "time_major": (("kernel",), lambda x, b, k: swapped(layer(swapped(x), k)[0])),
    "ids_time_major": (("table",), lambda x, b, t: x + swapped(look(t, swapped(b["id"])))),
    "vmap_over_tokens": (("kernel",), lambda x, b, k: jax.vmap(lambda x: layer(x, k)[0], 1, 1)(x)),
    "vmap_over_examples": (("bias",), lambda x, b, c: jax.vmap(lambda x: ops.add_bias(x[None], c)[0])(x)),
    "rolled_and_back": (("kernel",), lambda x, b, k: jnp.roll(layer(jnp.roll(x, 1, 0), k)[0], -1, 0)),
    "rolled": ((), lambda x, b: jnp.roll(x, 1, 0)),
    "centred": ((), lambda x, b: x - x.mean(0)),
    "a_row_of_nobody": (("table",), lambda x, b, t: x + look(t, jnp.arange(T)[None])),
    "scaled": (("kernel",), lambda x, b, k: layer(x, jax.tree.map(lambda leaf: 2 * leaf, k))[0]),
    "read": (("kernel",), lambda x, b, k: layer(x, k)[0] * jnp.mean(jax.tree.leaves(k)[0])),
    "gradient": (("kernel",), lambda x, b, k: x + jax.grad(lambda x: layer(x, k)[0].sum())(x)),
}
STEPS = OPS | HARD | WRONG


def program_of(seed: int) -> list[tuple]:
    """[(step, names of its parameters)]: mostly plain steps, each on its own parameters.

    Drawn from a seed, so that every draw is another program: hypothesis would try many that differ in one word.
    """
    draw, program, count = np.random.default_rng(seed), [], Counter()
    for _ in range(draw.integers(1, 5)):
        step = str(draw.choice(sorted([OPS, HARD, WRONG][draw.choice(3, p=[0.86, 0.11, 0.03])])))
        names = []
        for kind in STEPS[step][0]:
            number = int(draw.integers(count[kind])) if count[kind] and draw.random() < 0.2 else count[kind]
            count[kind] = max(count[kind], number + 1)
            names.append(f"{kind}{number}")
        program.append((step, *names))
    # Steps without parameters leave nothing to clip.
    return program if any(len(step) > 1 for step in program) else [*program, ("dense", "kernel0")]


def attack_of(program) -> Attack:
    def losses(p, b):
        x = b["x"]
        for step, *names in program:
            x = STEPS[step][1](x, b, *[p[name] for name in names])
        return total(x), {}

    names = sorted({name for _, *names in program for name in names})
    rows = {key: leaf[:, :T] for key, leaf in batch().items() if key in ("x", "id", "label")}
    # The sum of many layers is less exact than an op; a term left out is off by far more.
    return Attack(losses, drawn({name: SHAPES[name.rstrip("0123456789")] for name in names}), rows, tolerance=1e-3, floor=1e-5)


# Methods that take a row at a time have no axis to go wrong along, and must agree all the same.
EACH = ALL_WAYS | {"vmap": {"method": "vmap"}, "traced": {"method": "traced"}}


def judged(examples: int, only: str | None = None) -> None:
    """So many programs, each by one way or `only` by that: none is wrong, and refusing them is no way out."""
    found = Counter()

    @settings(max_examples=examples, phases=[Phase.generate], deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1))
    def one(seed):
        program, way = program_of(seed), only or sorted(EACH)[seed % len(EACH)]
        attack = attack_of(program)
        result = outcome(attack, EACH[way], known=lambda: truth(attack))
        found[result.split(":")[0]] += 1
        assert result.startswith(("right", "refused")), f"{way}: {program}: {result}"

    one()
    assert found["right"] > found.total() / 2, found


# Of what is drawn here each op and each place of it is an attack of its own.
@pytest.mark.slow
def test_programs_of_ops():
    judged(5)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", EACH)
def test_many_programs_of_ops(way):
    judged(400, way)
