"""Describes an op at one place of a traced loss: its leaves, its record, and whether it fulfils the contract of an op.

U: units.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.clipping.probes import Op, leaf_names
from dpx.declaration import ConfigError, require


class Layer(NamedTuple):
    """A leading axis of a parameter that a loop runs along; `depth` counts the loops around it, from 0 for the outermost."""

    depth: int


@dataclasses.dataclass(frozen=True)
class Reference:
    """A parameter, or a part of it.

    `selected` says what was selected along each of its leading axes, an index or the layers of a loop; `cut` is an index whose axis is not
    squeezed yet. With `is_frozen` it is not trained, so any operation may read it.
    """

    path: str
    selected: tuple[int | Layer, ...] = ()
    cut: int | None = None
    is_frozen: bool = False

    @property
    def indices(self) -> tuple[int, ...]:
        """Returns the constant indices that were selected, without loops."""
        return tuple(entry for entry in self.selected if isinstance(entry, int))

    @property
    def depths(self) -> tuple[int, ...]:
        """Returns the loops that run along its axes; in all other loops around it, it is used in every round."""
        return tuple(entry.depth for entry in self.selected if isinstance(entry, Layer))

    def select(self, parameter: Any) -> Any:
        """Returns the part of the whole parameter: indices are applied, and the axes of loops stay in front."""
        return parameter[tuple(slice(None) if isinstance(entry, Layer) else entry for entry in self.selected)]


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """An op at one place of a traced program.

    `shapes`: its leaves as the op sees them; `leaves`: the parameter that each of them is, None if it is not trained; `loops`: the
    lengths of the loops around it, outermost first; `record`: the shapes of its record, the loops' axes first; `is_narrow`: whether
    the op computes anything in less than float32, even if its record is wider; `values`: the parameters whose values its norms and
    sums need, by leaf.
    """

    op: Op
    shapes: Any
    leaves: tuple[Reference | None, ...]
    loops: tuple[int, ...]
    record: Any
    is_narrow: bool
    values: tuple[Reference | None, ...]

    @property
    def is_trained(self) -> bool:
        """Returns whether any of its leaves is trained."""
        return any(reference is not None for reference in self.leaves)

    @property
    def first(self) -> str:
        """Returns the path of its first parameter."""
        return next(reference.path for reference in self.leaves if reference is not None)

    def over_loops(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns `run` mapped over rounds: it takes what the op leaves in each round, in arrays that have the loops' axes first."""
        for _ in self.loops:
            run = jax.vmap(run)
        return run


def is_narrow(dtype: Any) -> bool:
    """Returns whether the type is a floating-point type narrower than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def made(op: Op, values: Any, inputs: tuple, leaves: tuple, loops: tuple[int, ...], units: int, known: tuple) -> Site:
    """Returns the site of `op`. Raises `ConfigError` for an op whose shapes or types break the contract of `dpx.clipping.op.Op`."""

    def record_of(values, inputs):
        outputs, residuals = op.forward(values, inputs)
        return *op.backward(values, residuals, jax.tree.map(jnp.zeros_like, outputs)), (outputs, residuals)

    cotangents, one, on_the_way = jax.eval_shape(record_of, values, inputs)
    for given, back in zip(inputs, cotangents, strict=True):
        if back is not None and any(x.shape != y.shape for x, y in zip(*map(jax.tree.leaves, (given, back)), strict=True)):
            reason = f"has a cotangent whose shape differs from the shape {given.shape} of its input"
            raise ConfigError(f"op {op.name}", reason, "Give both the same shape")
    if any(reference is not None for reference in leaves):
        _check_record(op, values, one, leaves, units)
    record = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*loops, *leaf.shape), leaf.dtype), one)
    rounds = any(is_narrow(leaf.dtype) for leaf in jax.tree.leaves((inputs, one, on_the_way)))
    return Site(op, values, leaves, loops, record, rounds, known)


def _check_record(op: Op, values: Any, one: Any, leaves: tuple[Reference | None, ...], units: int) -> None:
    name, is_float = f"op {op.name}", [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(one)]
    reason = "keeps a record that contains other values than floating-point arrays"
    fix = "Keep floating-point arrays; convert integers to float32"
    require(bool(is_float) and all(is_float), name, reason, fix)
    squares, fix = jax.eval_shape(op.squared_norm, values, one), "Give a tuple with one array for each part"
    require(isinstance(squares, tuple), name, "gives squared norms that are not a tuple", fix)
    shape = (jax.tree.leaves(values)[0].shape[0], units) if op.stacked else (units,)
    shapes = [square.shape for part in squares for square in jax.tree.leaves(part)]
    if len(squares) != op.parts or any(own != shape for own in shapes):
        reason = f"gives squared norms {shapes} for {op.parts} parts of {units} units"
        raise ConfigError(name, reason, "Give each part one number for each example")
    weights = (jax.ShapeDtypeStruct(shape, jnp.float32),) * op.parts
    summed = jax.eval_shape(op.weighted_sum, values, one, weights)
    places = [place for place, name in enumerate(leaf_names(values)) if op.trains(name)]
    is_like_leaves = bool(op.frozen) or jax.tree.structure(summed) == jax.tree.structure(values)
    is_own = is_like_leaves and leaf_names(summed) == [leaf_names(values)[place] for place in places]
    require(is_own, name, "gives sums for leaves that are not its own", "Give exactly one sum for each of its leaves")
    for place, total in zip(places, jax.tree.leaves(summed), strict=True):
        leaf, reference = jax.tree.leaves(values)[place], leaves[place]
        if leaf.shape != total.shape:
            reason = f"has shape {leaf.shape}, but op {op.name} gives a gradient of shape {total.shape} for it"
            raise ConfigError(reference.path if reference else "a leaf", reason, "Give the parameter the shape in which the op uses it")
