"""Defines the interface of an op: four functions, and methods that follow from them.

The ops of dpx are in ops.py; README.md shows how to add another op.

B: examples, U: units of R rows each (of one row, unless stated), L: stacked layers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from dpx.clipping import forms, norms
from dpx.clipping.bounds import Bounded
from dpx.clipping.forms import Form
from dpx.clipping.result import zero_unless
from dpx.declaration import ConfigError


class Op:
    """One parametrised operation or block. Subclasses are frozen dataclasses of static facts; they never hold arrays.

    `leaves` is a pytree of parameters, `inputs` a tuple of arrays whose leading axis is the example. A record is a pytree of
    floating arrays (integers travel as float32, exact below 2^24). The leaves fall into `parts`; each has its own squared
    norm, [B] (or [L, B] if the op is `stacked`), so that parts may be clipped apart.

    If units of several rows are clipped, inputs hold rows and records hold units. An op that supports this has a field
    `rows_per_unit: int = 1`: the leading axis of its records is the unit, and products between its rows are in its norms.

    If only some leaves are trained, an op that supports this has a field `frozen: tuple[str, ...] = ()` with the names of the
    frozen leaves: it records nothing for them, and its norms, sums and gradients omit them (a sum may hold None for them). Any other
    op records all leaves, and its `gradients` are used for the trained leaves.
    """

    name: str = "op"
    parts: int = 1
    stacked: bool = False
    rows_per_unit = 1
    frozen: tuple[str, ...] = ()
    # Whether the norm is non-finite whenever the sum would be. If this is not certain, records are searched for non-finite numbers.
    norm_sees_all = False
    # Whether autodiff keeps the inputs alone and computes the op again, where the op trains nothing.
    is_recomputed = False

    def of_units(self, rows_per_unit: int) -> "Op":
        """Returns this op for units of that many rows; raises `ConfigError` if it has no rule for their joint gradient."""
        if rows_per_unit == self.rows_per_unit:
            return self
        if not self._has("rows_per_unit"):
            reason = "clips each row separately: it has no rule for the products between the rows of one unit"
            raise ConfigError(f"op={self.name}", reason, "Use clipping_method=vmap, or privacy.unit_mode=group")
        return dataclasses.replace(self, rows_per_unit=rows_per_unit)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def of_leaves(self, frozen: tuple[str, ...]) -> "Op":
        """Returns this op with the leaves of these names frozen."""
        if not frozen or not self._has("frozen"):
            return self
        return dataclasses.replace(self, frozen=frozen)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def _has(self, name: str) -> bool:
        return any(field.name == name for field in dataclasses.fields(self))  # pyright: ignore[reportArgumentType]

    def holds_gradients(self) -> bool:
        """Returns whether the record is the gradient of each unit, [U, ...]."""
        return getattr(self, "form", None) == "kept"

    def trains(self, name: str) -> bool:
        """Returns whether the leaf of that name, if there is one, is trained."""
        return name not in self.frozen

    def trained(self, leaves: dict[str, Any]) -> dict[str, Any]:
        """Returns the entries of `leaves` that belong to trained leaves."""
        return {name: leaf for name, leaf in leaves.items() if self.trains(name)} if self.frozen else leaves

    def values_needed(self) -> tuple[str, ...]:
        """Returns the names of frozen leaves whose values `squared_norm` or `weighted_sum` need.

        All other frozen leaves reach them as zeros.
        """
        return ()

    def tokens(self, x: Array) -> Array:
        """Returns `x` [B, ..., d] as [U, T, d]: the positions of all rows of a unit along one axis."""
        return x.reshape(x.shape[0] // self.rows_per_unit, self.rows_per_unit * math.prod(x.shape[1:-1]), x.shape[-1])

    def over_rows(self, x: Array) -> Array:
        """Sums `x` [B, ...] over the `rows_per_unit` rows of each unit: [U, ...] with U = B / rows_per_unit."""
        return x if self.rows_per_unit == 1 else x.reshape(x.shape[0] // self.rows_per_unit, self.rows_per_unit, *x.shape[1:]).sum(1)

    def box(self, leaf: str) -> tuple[tuple[int, int, int], ...] | None:
        """Returns the part of a leaf that counts as a separate parameter, None for all of it: (first place, places, step) of each axis.

        The op's `gradients` are then of this part alone, while its sums are of the whole leaf.
        """
        return None

    def part(self, path: str) -> int:
        """Returns the part a leaf belongs to; `path` is the leaf's place in `leaves`, such as "norm/scale"."""
        return 0

    def forward(self, leaves: Any, inputs: tuple) -> tuple[Any, Any]:
        """Returns (outputs, residuals). With bare parameters autodiff differentiates this function, so it must be differentiable."""
        raise NotImplementedError

    def outputs(self, leaves: Any, inputs: tuple) -> Any:
        """Returns the outputs of `forward`."""
        return self.forward(leaves, inputs)[0]

    def input_cotangent(self, leaves: Any, residuals: Any, cotangent: Any) -> tuple[tuple, Any]:
        """Returns (cotangents of `inputs`, with None for integers; the record)."""
        raise NotImplementedError

    def squared_norm(self, leaves: Any, record: Any) -> tuple[Array | Bounded, ...]:
        """Returns the squared per-example gradient norm of each part, float32.

        It is an array if the gradient itself is squared and its record summed; otherwise it includes bounds on rounding errors (bounds.py).
        """
        raise NotImplementedError

    def weighted_sum(self, leaves: Any, record: Any, weights: tuple[Array, ...]) -> Any:
        """Returns sum_b w_b grad_b for every trained leaf, float32; `weights` has one vector for each part."""
        raise NotImplementedError

    def gradients(self, shapes: Any, record: Any) -> dict[str, Form]:
        """Returns each leaf's per-example gradient, by its place in `leaves`, in a form that can be joined with other uses (forms.py).

        Called if a parameter is used more than once, or if only some of the leaves are trained. An op without such a rule returns {}.
        `shapes` are the shapes of the leaves.
        """
        return {}

    def backward(self, leaves: Any, residuals: Any, cotangent: Any) -> tuple[tuple, Any]:
        """Returns `input_cotangent`, with numbers of 8 bits in the record as bfloat16, which holds them exactly."""
        inputs, record = self.input_cotangent(leaves, residuals, cotangent)
        return inputs, jax.tree.map(norms.at_least_bfloat16, record)

    def gradient(self, leaves: Any, residuals: Any, cotangent: Any) -> tuple[tuple, Any]:
        """Returns (cotangents of `inputs`, gradient of `leaves`): the backward pass without clipping."""
        inputs, record = self.backward(leaves, residuals, cotangent)
        return inputs, self.weighted_sum(leaves, record, self.ones(cotangent))

    def ones(self, cotangent: Any) -> tuple[Array, ...]:
        """Returns a weight of one for every unit, one vector for each part."""
        units = jax.tree.leaves(cotangent)[0].shape[0] // self.rows_per_unit
        return (jnp.ones((units,), jnp.float32),) * self.parts

    def masked(self, record: Any, keep_B: Array) -> Any:
        """Returns the record with exact zeros for units or rows that are not kept.

        It uses `where`, so that NaN does not survive. Leaves may hold units or rows.
        """
        repeated = lambda times: keep_B if times == 1 else jnp.repeat(keep_B, times)  # noqa: E731
        return jax.tree.map(lambda leaf: zero_unless(repeated(leaf.shape[0] // keep_B.shape[0]), leaf), record)

    def masked_sum(self, leaves: Any, record: Any, weights: tuple[Array, ...], keep_B: Array) -> Any:
        """Returns `weighted_sum` over the kept rows only; the other rows may hold any values."""
        if not self.holds_gradients():
            return self.weighted_sum(leaves, self.masked(record, keep_B), weights)
        if self.parts == 1 and not self.stacked:
            # Gradients are linear in their sum: it is the gradient of one unit of weight one.
            summed = jax.tree.map(lambda leaf: norms.contracted_units(leaf, weights[0], keep_B)[None], record)
            return self.weighted_sum(leaves, summed, (jnp.ones_like(weights[0][:1]),))
        return one_by_one(
            lambda record, keep_1, *weights: self.weighted_sum(leaves, self.masked(record, keep_1), weights), record, keep_B, *weights
        )

    def by_unit(self, record: Any, units: int) -> list[Array]:
        """Returns every array of the record as [U, ...]: the data from which a unit's sum is computed."""
        return [leaf.reshape(units, leaf.size // units) for leaf in jax.tree.leaves(record)]

    def is_finite(self, record: Any, units: int) -> Bool[Array, " U"]:
        """Returns whether all data from which a unit's sum is computed are finite, bool [U], whatever its norm is."""
        return jnp.stack([jnp.isfinite(leaf_U).all(1) for leaf_U in self.by_unit(record, units)]).all(0)


def one_by_one(of_units: Callable[..., Any], *given: Any) -> Any:
    """Returns the sum over all units of `of_units`, which takes the rows [1, ...] of one unit in trees of arrays [U, ...].

    A masked copy of all gradients would take as much memory as the gradients.
    """
    units = jax.tree.map(lambda leaf: leaf[:, None], given)
    shapes = jax.eval_shape(of_units, *jax.tree.map(lambda leaf: leaf[0], units))
    total = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
    return jax.lax.scan(lambda total, unit: (jax.tree.map(jnp.add, total, of_units(*unit)), None), total, units)[0]


class ByRow(Op):
    """An op that reads rows of its leaf `table` [V, d]; its record holds their `id` [U, T] and the cotangents `g` [U, T, d]."""

    norm_sees_all = True

    def squared_norm(self, leaves, record):
        return (norms.lookup(record["id"], record["g"], leaves["table"].shape[0]),)

    def gradients(self, shapes, record):
        return {"table": forms.Rows(record["id"], record["g"])}


class Formed(Op):
    """An op whose record is the per-example gradient itself, by leaf, for parameters so small that this costs little."""

    norm_sees_all = True

    def holds_gradients(self):
        return True

    def squared_norm(self, leaves, record):
        return (sum(norms.squares(leaf) for leaf in record.values()),)

    def weighted_sum(self, leaves, record, weights):
        return jax.tree.map(lambda leaf: jnp.tensordot(weights[0], leaf, 1, precision="highest"), record)

    def gradients(self, shapes, record):
        return {name: forms.Whole(leaf) for name, leaf in record.items()}
