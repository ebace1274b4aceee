"""The judge of an attack: the clipped sum of a loss matches float64, or the loss is refused with a message. Nothing else passes.

An attack is a loss that was, or could be, clipped wrongly with no symptom. The judge knows only what users know: each example's
gradient is that of its row alone, which autodiff computes in float64 when parameters are bare.

B: examples, T: tokens, M: positions decoded, C: choices, L: layers (as many as examples, so that no shape tells them apart),
d: width, V: rows of a table.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.declaration import ConfigError
from tests.clipping.batches import QUICKLY, example

B, T, D, V, L, M, C = 3, 5, 4, 6, 3, 2, 2
# Two methods, and the two ways to a norm: per-example gradients kept, or products of tokens. The others are for the long suite.
WAYS = {"book_keeping": {"method": "book_keeping"}, "ghost": {"method": "ghost", "kept_bytes": 0}}
ALL_WAYS = WAYS | {"book_keeping_grams": {"method": "book_keeping", "kept_bytes": 0}, "ghost_kept": {"method": "ghost"}}


@dataclasses.dataclass(frozen=True, eq=False)
class Attack:
    """A loss, its arguments, and the required result: "right", "refused", or either (None).

    "loud": jax may raise an error before dpx can refuse. "raises": autodiff raises an error as well, with bare parameters, and then any
    error passes. `floor` is the size of gradients that float32 cannot tell from zero where terms cancel; `is_zero`: all gradients are zero.
    """

    losses: Any
    params: Any
    batch: Any
    must: str | None = None
    options: dict = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-4
    floor: float = 1e-6
    is_zero: bool = False
    ways: tuple[str, ...] = tuple(WAYS)


@dataclasses.dataclass
class Attacks:
    """A table of attacks: each is a function (params, batch) -> losses_B under a decorator that says which parameters it has.

    With `in_turn` the short suite tries each attack in one of `WAYS`, every second one in the other: where no parameter is met twice,
    ways differ by their arithmetic alone, which is the same for all attacks.
    """

    in_turn: bool = False
    table: dict = dataclasses.field(default_factory=dict)

    def __call__(self, must=None, *, params=None, rows=None, slow=False, has_counts=False, settings=None, **shapes):
        def add(function):
            losses = function if has_counts else lambda p, b: (function(p, b), {})
            found = params if params is not None else drawn(shapes)
            names = list(WAYS)
            ways = (names[sum(not is_slow for _, is_slow in self.table.values()) % 2],) if self.in_turn else tuple(names)
            attack = Attack(losses, found, batch() if rows is None else rows, must, ways=ways, **(settings or {}))
            assert function.__name__ not in self.table, function.__name__
            self.table[function.__name__] = attack, slow
            return function

        return add

    def each(self):
        """One pytest parameter an attack."""
        marks = {name: [pytest.mark.slow] if slow else [] for name, (_, slow) in self.table.items()}
        return pytest.mark.parametrize("attack", [pytest.param(a, id=name, marks=marks[name]) for name, (a, _) in self.table.items()])


def drawn(shapes, seed: int = 0):
    """Arrays of these shapes (a pytree of tuples): large enough that a term left out of a norm shows."""
    generator = np.random.default_rng(seed)
    is_shape = lambda s: isinstance(s, tuple) and all(isinstance(n, int) for n in s)  # noqa: E731
    return jax.tree.map(lambda s: jnp.asarray(generator.normal(0, 0.7, s), jnp.float32), shapes, is_leaf=is_shape)


def batch(B: int = B, seed: int = 1):
    """Rows of different sizes, so that some are clipped and some not; ids that repeat, within an example and between them."""
    generator = np.random.default_rng(seed)
    size_B = np.linspace(0.4, 2.0, B)

    def rows(*shape):
        return jnp.asarray(generator.normal(0, 1, (B, *shape)) * size_B.reshape(-1, *[1] * len(shape)), jnp.float32)

    found = {"x": rows(T, D), "h": rows(M, D), "choices": rows(C, T, D), "y": rows(D)}
    found |= {
        "id": jnp.asarray(generator.integers(0, V, (B, T)), jnp.int32),
        "label": jnp.asarray(generator.integers(0, V, (B, T)), jnp.int32),
    }
    return found | {"has_label": jnp.arange(T) % (jnp.arange(B)[:, None] + 1) == 0}


def total(y):
    """[B, ...] as losses_B, curved, so that every cotangent is another."""
    return jnp.sin(y).sum(tuple(range(1, y.ndim)))


def look(table, id_BT):
    """A lookup in the type of the day: float64 where the truth is computed."""
    return ops.lookup(table, id_BT, jnp.result_type(float))


def widened(tree):
    """By numpy: jax would compile a program for each shape."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda leaf: leaf.astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, arrays)


def truth(attack: Attack):
    """(losses_U, gradients of each unit) in float64, one row at a time, with bare parameters; padding belongs to no unit."""

    def loss_of_one(params, row):
        found = attack.losses(params, row)
        return jnp.sum((found[0] if isinstance(found, (tuple, list)) else found).astype(jnp.float64))

    with jax.enable_x64(True):
        params, rows = widened(attack.params), widened(attack.batch)
        one = jax.jit(jax.value_and_grad(loss_of_one), compiler_options=QUICKLY)
        pairs = [one(params, example(rows, b)) for b in range(jax.tree.leaves(rows)[0].shape[0])]
    gradients = [[np.asarray(leaf) for leaf in jax.tree.leaves(gradient)] for _, gradient in pairs]
    weight_B = 1.0 - np.asarray(attack.options.get("is_padding_B", np.zeros(len(pairs))))
    R = attack.options.get("rows_per_unit", 1)
    # A where and not a product: padding may hold NaN.
    kept = [[leaf if keep else np.zeros_like(leaf) for leaf in gradient] for keep, gradient in zip(weight_B, gradients, strict=True)]
    losses = np.asarray([float(loss) if keep else 0.0 for keep, (loss, _) in zip(weight_B, pairs, strict=True)])
    units = [[sum(leaves) for leaves in zip(*kept[at : at + R], strict=True)] for at in range(0, len(pairs), R)]
    return losses.reshape(-1, R).sum(1), units


def prepared(attack: Attack, way: dict, is_compiled: bool = True):
    """The clipped sum as a function of the clipping norm. What is refused is refused here, unless it is to run operation by operation."""

    def clipped(limit, params, rows):
        weights = lambda norms: limit / jnp.maximum(norms, limit)  # noqa: E731
        return dpx.clipped_sum(attack.losses, params, rows, weights=weights, **way, **attack.options)

    given = attack.params, attack.batch
    if not is_compiled:
        return lambda limit: clipped(limit, *given)
    run = jax.jit(clipped, compiler_options=QUICKLY).lower(np.float32(1), *given).compile()
    return lambda limit: run(np.float32(limit), *given)


def fault(attack: Attack, found, losses_U, units, limit: float) -> str:
    """The fault of a clipped sum, as text; "" if it is right. A unit whose loss or gradient is not finite must contribute zero."""
    with np.errstate(all="ignore"):
        square_U = np.asarray([sum(np.sum(np.square(leaf)) for leaf in unit) for unit in units])
        is_counted_U = np.isfinite(losses_U) & np.isfinite(square_U) & (square_U < np.finfo(np.float32).max)
        norm_U = np.sqrt(np.where(is_counted_U, square_U, 0))
    if np.shape(found.norms_B) != norm_U.shape:
        return f"norms of shape {np.shape(found.norms_B)}"
    losses_U = np.where(is_counted_U, losses_U, 0)
    if np.shape(found.losses_B) != losses_U.shape or not np.allclose(found.losses_B, losses_U, rtol=attack.tolerance, atol=1e-5):
        return f"losses {np.asarray(found.losses_B).tolist()}, truly {losses_U}"
    norm_error = np.max(np.abs(found.norms_B - norm_U) / (attack.tolerance * norm_U + attack.floor))
    if not norm_error <= 1:
        return f"norms {np.asarray(found.norms_B)}, truly {norm_U}"
    factor_U = np.where(is_counted_U, limit / np.maximum(norm_U, limit), 0)
    for number, leaf in enumerate(jax.tree.leaves(found.total)):
        terms = [c * unit[number] if c else np.zeros(unit[number].shape) for c, unit in zip(factor_U, units, strict=True)]
        if leaf.shape != terms[0].shape:
            return f"sum {number} of shape {leaf.shape}"
        scale = max(np.max(np.abs(term), initial=0) for term in terms)
        error = np.max(np.abs(leaf - sum(terms)), initial=0)
        if not error <= attack.tolerance * scale + attack.floor:
            return f"sum of parameter {number} off by {error:.3g}, scale {scale:.3g}"
    return ""


def attempted(call) -> tuple[Any, str]:
    """(the result, "") or (None, the reason): "refused ..." or "crashes ..."; only a `ConfigError` counts as a refusal."""
    try:
        return call(), ""
    except ConfigError as refused:
        return None, f"refused: {refused}"
    except Exception as error:
        return None, f"crashes: {type(error).__name__}: {' '.join(str(error).split())[:120]}"


def outcome(attack: Attack, way: dict, is_compiled: bool = True, *, known) -> str:
    """ "right", "refused ...", "wrong ..." or "crashes ...". `known` is asked for the truth, or for None, where nothing is refused: to
    trace and compile the gradients of single rows in float64 takes as long as a way."""
    clipped, words = attempted(lambda: prepared(attack, way, is_compiled))
    if words:
        return words
    truly = known()
    losses_U, units = truly or (None, [])
    limit = middle(units)
    found, words = attempted(lambda: jax.device_get(clipped(limit)))
    if words:
        return words
    reason = fault(attack, found, losses_U, units, limit) if truly else "accepted, though nobody can differentiate it"
    return f"wrong: {reason}" if reason else "right"


def middle(units, none: float = 1.0) -> float:
    """A clipping norm that some are above and some below."""
    with np.errstate(all="ignore"):
        norms = np.sqrt([sum(np.sum(np.square(leaf)) for leaf in unit) for unit in units])
    norms = norms[np.isfinite(norms) & (norms > 0)]
    return float(0.9 * np.median(norms)) if norms.size else none


def truth_if_any(attack: Attack):
    """`truth`, or None if autodiff cannot compute it. Fails for an attack that cannot be judged, or that has no gradient."""
    try:
        known = truth(attack)
    except ConfigError:
        return None  # of bare parameters as well
    except Exception:
        assert attack.must == "raises", "an attack that nobody can judge"
        return None
    assert attack.is_zero or middle(known[1], none=0.0) > 0, "an attack without a gradient"
    return known


def right_or_refused(attack: Attack, ways=None, is_compiled: bool = True) -> None:
    """By each of `ways`: right, or refused; what the attack insists on where it does.

    By default those of the short suite, up to the first that refuses: what it is refused for, examples that are not apart or a reader
    without a rule, is found before ways differ.
    """
    known = functools.cache(lambda: None if attack.must == "refused" else truth_if_any(attack))
    tried: dict = {}
    for name, way in ({name: WAYS[name] for name in attack.ways} if ways is None else ways).items():
        found = outcome(attack, tried | way, is_compiled, known=known)
        allowed = (attack.must,) if attack.must in ("right", "refused") else ("right", "refused")
        if not found.startswith(allowed):
            # Of what autodiff has no gradient of either, any error will do.
            is_loud = attack.must == "loud" or (attack.must not in ("right", "refused") and known() is None)
            assert is_loud and found.startswith("crashes"), f"{name}: {found}"
        if ways is None and found.startswith("refused"):
            break
        # Whether examples are apart is the loss's own: where the first way has tried it, only the other ways' arithmetic is left to judge.
        # Gradients that cancel to zero are refused by ways that compare products, and exact by ways that form gradients.
        is_tried = found == "right" and "checked" not in attack.options and not attack.is_zero
        tried = {"checked": False} if is_tried else {}
