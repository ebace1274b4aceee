"""Defines what is clipped together, by which weights, and the result: units of rows, groups of parameters, turns, and the place on a mesh.

All parameters are clipped together, or each layer separately (`clip=per_layer`). The gradient of each parameter may be multiplied by a
constant first. Layers are under the top-level name `layers`, stacked (one group for each index of the first axis) or in a list; any other
top-level name is one group. A clip weight is the factor of a unit's gradient that makes its norm at most the clipping norm.

Each row, or all rows of one unit, is clipped together. The loss of a unit is the sum of its rows' losses, so its gradient is the sum of
their gradients, and the norm of that sum is clipped. Where gradients that are formed once do not fit in memory for all units, units take
turns.

On a mesh with Explicit axes, the default of `jax.make_mesh`, every operation must say how its result lies on it. The programs of clipping
leave that to the compiler, so they run with these axes as Auto ones, and their results lie on the mesh as the parameters and the rows do.

B: rows (or units, where weights and norms are computed), R: rows of one unit (padding among them), U = B / R: units, in the order of their
rows, K: groups of parameters, L: stacked layers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from dpx.declaration import ConfigError, require
from dpx.randomness import path_name

Weights = Callable[[Float[Array, "..."]], Float[Array, "..."]]


def flat(limit: Any) -> Weights:
    """Returns a function from norms_B to min(1, limit / norm): every contribution then has at most the norm `limit`."""
    return lambda norms_B: limit / jnp.maximum(norms_B, limit)


def applied(weights: Weights, norms: Array) -> Array:
    """Returns `weights(norms)`. Raises `ConfigError` unless the result is one floating-point number for each norm."""
    found = jnp.asarray(weights(norms))
    is_right = found.shape == norms.shape and jnp.issubdtype(found.dtype, jnp.floating)
    reason = f"gives an array {found.shape} of type {found.dtype} for norms {norms.shape}"
    require(is_right, "weights", reason, "Return one floating-point number for each norm, such as 1 / jnp.maximum(norms, 1)")
    return found


def no_factor(path: str) -> float:
    """Returns 1, the factor of a gradient that is clipped as it is."""
    return 1.0


@dataclasses.dataclass(frozen=True)
class FactoredWeights:
    """Clip weights for gradients that are multiplied by `factor(path)`, a positive constant, before their joint norm is taken.

    The clipped sum is of the multiplied gradients, so its sensitivity is that of `weights`. The weight of a unit depends on its norm alone.
    """

    weights: Weights
    factor: Callable[[str], float]
    # A run sums a batch by microbatches, so no weight can depend on all norms.
    is_by_unit: ClassVar[bool] = True

    @property
    def per_layer(self) -> bool:
        """Returns whether `weights` clip each layer separately."""
        return getattr(self.weights, "per_layer", False)

    def __call__(self, norms: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.weights(norms)


def factor_of(weights: Weights) -> Callable[[str], float]:
    """Returns the function from a parameter's path to the factor that multiplies its gradient before its norm is taken.

    The factor is 1 unless `weights` give another one.
    """
    return getattr(weights, "factor", no_factor)


@dataclasses.dataclass(frozen=True)
class PerLayerWeights:
    """Clip weights for norms_KB of K groups: each group is clipped to C/sqrt(K), so the whole has norm at most C."""

    clipping_norm: float | Float[Array, ""]
    per_layer: bool = True

    def __call__(self, norms_KB: Float[Array, "K B"]) -> Float[Array, "K B"]:
        limit = self.clipping_norm / math.sqrt(norms_KB.shape[0])
        return limit / jnp.maximum(norms_KB, limit)


LAYERS = "layers"

# The layer of a stack to which some parameters belong: one, each (the first axis of their norms), or no stack.
Layer = int | Literal["each"] | None


class Squares(NamedTuple):
    """Per-example squared gradient norms of some parameters, [..., B]; `path` is the path of one of them."""

    path: str
    values: Array
    layer: Layer = None

    @property
    def total_B(self) -> Array:
        """Returns the squared norms summed over all axes but the last, [B]."""
        return self.values.sum(tuple(range(self.values.ndim - 1))) if self.values.ndim > 1 else self.values


class Clipped(NamedTuple):
    """Gradient norms and clip weights of each example.

    `norms_B` are the norms before clipping. `is_finite_B` includes padding, `is_counted_B` does not. `weights` holds the clip weights by
    group, or under "" if all parameters are clipped together. `factor(path)` multiplies the gradient of a parameter before clipping
    (`factor_of`).
    """

    norms_B: Float[Array, " B"]
    is_counted_B: Bool[Array, " B"]
    is_finite_B: Bool[Array, " B"]
    weights: dict[str, Float[Array, " B"]]
    factor: Callable[[str], float] = no_factor

    def weights_of(self, path: str, layer: Layer, layers: int = 0) -> Array:
        """Returns the factor of each example's gradient at `path` in the sum, [B].

        It is [layers, B] if each layer of a stack is a separate group.
        """
        if "" in self.weights:
            own = self.weights[""]
        elif layer == "each" and is_stacked(path):
            own = jnp.stack([self.weights[group(path, at)] for at in range(layers)])
        else:
            own = self.weights[group(path, layer)]
        factor = self.factor(path)
        return own if factor == 1 else own * factor


def group(path: str, layer: Layer) -> str:
    """Returns the name of the group to which the parameter at `path` belongs, such as "layers/3" or "embeddings"."""
    if is_stacked(path) and isinstance(layer, int):
        return f"{LAYERS}/{layer}"
    parts = path.split("/")
    return "/".join(parts[: 2 if parts[0] == LAYERS else 1])


def is_stacked(path: str) -> bool:
    """Returns whether the first axis of the parameter at `path` is the axis of the layers."""
    top, _, rest = path.partition("/")
    return top == LAYERS and not rest.split("/")[0].isdigit()


def clip(weights: Any, squares: list[Squares], losses_B: Array, is_padding_B: Array) -> Clipped:
    """Returns norms and clip weights.

    Padding and examples that are not finite get weight exactly zero. So do norms of 1e19 and more, whose squares overflow float32.
    """
    factor = factor_of(weights)
    squares = [part if factor(part.path) == 1 else part._replace(values=part.values * factor(part.path) ** 2) for part in squares]
    total_B = sum((part.total_B for part in squares), jnp.zeros_like(losses_B))
    is_finite_B = jnp.isfinite(total_B) & jnp.isfinite(losses_B)
    is_counted_B = is_finite_B & ~is_padding_B
    norms_B = _root(total_B, is_counted_B)
    if not getattr(weights, "per_layer", False):
        return Clipped(norms_B, is_counted_B, is_finite_B, {"": _finite(applied(weights, norms_B), is_counted_B)}, factor)
    grouped: dict[str, Array] = {}
    for part in squares:
        if part.layer == "each" and is_stacked(part.path):
            values_LB = part.values.sum(tuple(range(1, part.values.ndim - 1)))
            own = {group(part.path, at): values_LB[at] for at in range(values_LB.shape[0])}
        else:
            own = {group(part.path, part.layer): part.total_B}
        for name, square_B in own.items():
            grouped[name] = grouped[name] + square_B if name in grouped else square_B
    clip_KB = applied(weights, jnp.stack([_root(square_B, is_counted_B) for square_B in grouped.values()]))
    return Clipped(norms_B, is_counted_B, is_finite_B, dict(zip(grouped, _finite(clip_KB, is_counted_B), strict=True)), factor)


def _finite(clip: Any, is_counted_B: Array) -> Array:
    """Returns `clip` with zeros in place of weights that are not finite.

    C / norm is infinite for a zero gradient, and infinity times zero is NaN.
    """
    return jnp.where(is_counted_B & jnp.isfinite(clip), clip, 0)


def _root(square_B: Array, is_counted_B: Array) -> Array:
    return jnp.sqrt(jnp.where(is_counted_B, jnp.maximum(square_B, 0), 0))


LossesFn = Callable[[Any, Any], tuple[Array, dict[str, Array]]]

# Bytes that one microbatch may keep in memory between its passes, if there is a choice: per-example weight gradients instead of Gram
# products, in addition to what a fused stack of layers always needs.
KEPT_BYTES = 72 * 2**20


class ClippedSum(NamedTuple):
    """A clipped sum of gradients, with facts about each unit (an example, or `rows_per_unit` of them).

    Attributes:
        total: sum_b c_b grad_b, float32, a tree like the trained parameters.
        norms_B: Norms of gradients before clipping, [U]; `None` for a plain sum. A norm is an upper bound if so much of the gradient
            cancels that float32 cannot give it (`dpx.clipping.rounding`).
        losses_B: Losses, [U]: sums over the rows of a unit.
        counts: The counts that the loss returned, by name, [U]: sums over the rows of a unit.
        is_counted_B: [U]; false for padding and for a gradient that is not finite. Such a unit has zeros in all other fields.
    """

    total: Any
    norms_B: Float[Array, " U"] | None
    losses_B: Float[Array, " U"]
    counts: dict[str, Array]
    is_counted_B: Bool[Array, " U"]


def batch_size(batch: Any, name: str = "batch", fix: str = "Give arrays whose first axis is the example") -> int:
    """Returns the number of rows.

    Raises `ConfigError`, with `name` before each path and this `fix`, for leaves that are not arrays, for arrays that do not share their
    leading axis, and for a size that is a symbol.
    """
    leaves = [("/".join(filter(None, (name, path_name(path)))), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)]
    name = name or "batch"
    require(bool(leaves), name, "contains no array", fix)
    for path, leaf in leaves:
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        require(is_array, path, f"is a {type(leaf).__name__} and not an array", fix)
        is_key = is_array and leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        require(not is_key, path, "is one random key for all examples", "Give one for each: jax.random.split(key, B)")
    sizes = {leaf.shape[0] if leaf.ndim else "none" for _, leaf in leaves}
    symbols = [size for size in sizes if not isinstance(size, (int, str))]
    reason = "is symbolic, but the choice of the values to keep for each example needs a known number"
    require(not symbols, f"{name} of {symbols and symbols[0]} rows", reason, "Trace it with a fixed number of rows")
    reason = "has arrays whose first axis is not the example"
    is_shared = len(sizes) == 1 and "none" not in sizes
    require(is_shared, f"{name} of leading axes {sorted(sizes, key=str)}", reason, fix)
    return int(sizes.pop())


def with_counts(returned: Any) -> tuple[Any, Any]:
    """Returns (losses_B, counts) from the result of a loss, which may leave out the counts."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned[0], {} if returned[1] is None else returned[1]
    if isinstance(returned, (tuple, list, dict)):
        described = f"a {type(returned).__name__} from the loss"
        raise ConfigError(described, "must be the losses, or a pair of losses and counts", "Return losses_B, or (losses_B, counts)")
    return returned, {}


def check_losses(losses_B: Any, examples: int) -> None:
    """Raises `ConfigError` unless the losses are one floating-point number for each example."""
    shape = getattr(losses_B, "shape", ())
    reason = f"do not have one number for each of the {examples} examples"
    require(shape == (examples,), f"losses of shape {shape}", reason, "Return an array [B]")
    is_float = jnp.issubdtype(losses_B.dtype, jnp.floating)
    require(is_float, f"losses of type {losses_B.dtype}", "have no gradient", "Return floating-point numbers")


def of_no_rows(run: Callable[[Any, Array], ClippedSum], batch: Any, rows: int) -> ClippedSum:
    """Returns the clipped sum of a batch without rows: zeros, and arrays of length zero.

    `run(batch, is_padding_B)` is called with one unit of padding, to find the shapes.
    """

    def stand_in(leaf: Any) -> Any:
        shape = (rows, *leaf.shape[1:])
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0, impl=jax.random.key_impl(leaf)), shape)
        return jnp.zeros(shape, leaf.dtype)

    found = run(jax.tree.map(stand_in, batch), jnp.ones((rows,), bool))
    return found._replace(**{name: jax.tree.map(lambda leaf: leaf[:0], getattr(found, name)) for name in found._fields if name != "total"})


def zero_unless(keep_B: Array, tree: Any) -> Any:
    """Returns every leaf [B, ...] with exact zeros in the rows that are not kept; it uses `where`, so that NaN does not survive."""
    return jax.tree.map(lambda leaf: jnp.where(keep_B.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, jnp.zeros((), leaf.dtype)), tree)


def check_rows(rows: Any) -> None:
    """Raises `ConfigError` unless the value is a number of rows that a unit can have."""
    is_count = isinstance(rows, int) and not isinstance(rows, bool) and rows > 0
    require(is_count, f"rows_per_unit={rows!r}", "is not a whole number above zero", "Give the number of rows of a unit")


def flags(is_padding: Any, examples: int, name: str) -> Bool[Array, " B"]:
    """Returns a mask of padding rows, bool [B]; None means that no row is padding.

    Raises `ConfigError` unless the mask has one boolean for each row.
    """
    if is_padding is None:
        return jnp.zeros((examples,), bool)
    is_bool = hasattr(is_padding, "dtype") and is_padding.dtype == bool
    kind = getattr(is_padding, "dtype", type(is_padding).__name__)
    require(is_bool, name, f"is of type {kind}, but a mask of rows must be boolean", "Give an array of bool, True for padding")
    is_flat, reason = is_padding.shape == (examples,), f"does not have one flag for each of the {examples} rows"
    require(is_flat, f"{name}{is_padding.shape}", reason, "Give it the shape [B]")
    return jnp.asarray(is_padding)


@dataclasses.dataclass(frozen=True)
class Units:
    """The units of a batch: `rows` is the number R of rows of each unit, and `is_padding_B` marks rows that no unit's loss includes."""

    rows: int
    is_padding_B: Bool[Array, " B"]

    def __post_init__(self) -> None:
        count = self.is_padding_B.shape[0]
        reason = f"does not divide the {count} rows of a microbatch"
        require(
            count % self.rows == 0,
            f"rows_per_unit={self.rows}",
            reason,
            "Add padding rows to every unit until all have this number of rows",
        )

    @property
    def is_padding_U(self) -> Bool[Array, " U"]:
        """Returns a mask of the units without a single real row."""
        return self.is_padding_B.reshape(-1, self.rows).all(1)

    def filled(self, batch: Any) -> Any:
        """Returns `batch` with each padding row replaced by a copy of a real row.

        The copied row is of the same unit, or of any unit if its own has no real row.

        The copy's loss has weight zero. Its results are finite wherever those of the copied row are, so that zero times them is zero.
        """
        if self.rows == 1:
            return batch
        is_padding_UR = self.is_padding_B.reshape(-1, self.rows)
        own_UR = jnp.arange(is_padding_UR.size).reshape(is_padding_UR.shape)
        first_U = jnp.where(self.is_padding_U, jnp.argmin(self.is_padding_B), own_UR[:, 0] + jnp.argmin(is_padding_UR, axis=1))
        source_B = jnp.where(is_padding_UR, first_U[:, None], own_UR).reshape(-1)
        return jax.tree.map(lambda leaf: leaf[source_B], batch)

    def summed(self, values: Any) -> Any:
        """Returns leaves [B, ...] as [U, ...]: sums over the real rows of each unit."""
        real = zero_unless(~self.is_padding_B, values)
        if self.rows == 1:
            return real
        return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] // self.rows, self.rows, *leaf.shape[1:]).sum(1), real)

    def of_rows(self, values_U: Float[Array, " U"]) -> Float[Array, " B"]:
        """Returns each unit's value for every one of its rows, [B]; zero for padding rows."""
        return jnp.where(self.is_padding_B, 0, jnp.repeat(values_U, self.rows))


# The most padding that turns may add to a batch, as a share of its units.
MOST_PADDING = 0.02


def units_at_once(units: int, most: int) -> int:
    """Returns the largest number of units, up to `most`, whose turns need little padding."""
    return next(count for count in range(min(units, most), 0, -1) if math.ceil(units / count) * count <= (1 + MOST_PADDING) * units)


def summed_by_turns(run: Callable[[Any, Any], ClippedSum], batch: Any, is_padding_B: Any, rows: int, at_once: int) -> ClippedSum:
    """Returns the clipped sum of `batch` from `run(batch, is_padding_B)` of `at_once` units of R `rows` at a time.

    A turn takes every n-th unit, so that each device of a mesh has units in every turn.
    """
    units = is_padding_B.shape[0] // rows
    count = math.ceil(units / at_once)
    more = count * at_once - units

    def in_turns(leaf_B: Any) -> Any:
        by_unit = leaf_B.reshape(units, rows, *leaf_B.shape[1:])
        if more:
            by_unit = jnp.concatenate([by_unit, by_unit[:more]])
        by_turn = jnp.swapaxes(by_unit.reshape(at_once, count, rows, *leaf_B.shape[1:]), 0, 1)
        return by_turn.reshape(count, at_once * rows, *leaf_B.shape[1:])

    is_added = jnp.arange(units + more) >= units
    is_padding = in_turns(is_padding_B) | jnp.repeat(jnp.swapaxes(is_added.reshape(at_once, count), 0, 1), rows, 1)
    given = jax.tree.map(in_turns, batch), is_padding
    of_turn = jax.jit(run)
    start = jax.eval_shape(of_turn, *jax.tree.map(lambda leaf: leaf[0], given)).total

    def turn(total: Any, own: Any) -> tuple[Any, ClippedSum]:
        found = of_turn(*own)
        return jax.tree.map(jnp.add, total, found.total), found._replace(total=())

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), start)
    total, facts = jax.lax.scan(turn, zeros, given)
    of_units = lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(units + more, *leaf.shape[2:])[:units]  # noqa: E731
    return jax.tree.map(of_units, facts)._replace(total=total)


def on_explicit_mesh(run: Callable[..., Any], result: type, like: Any, batch: Any, rows_per_unit: Any, *arguments: Any) -> Any:
    """Returns `run(*arguments)`: a `result`, whose `total` has the structure of `like` and whose other fields are arrays [U, ...].

    Raises `ConfigError` for a loss that closes over an array of an Explicit mesh.
    """
    mesh = next((mesh for mesh in map(_explicit_mesh, jax.tree.leaves(arguments)) if mesh is not None), None)
    if mesh is None:
        return run(*arguments)
    check_rows(rows_per_unit)
    explicit = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    total = jax.tree.map(lambda leaf: NamedSharding(mesh, _spec(leaf) or PartitionSpec()), like)
    # The facts of units lie with their rows, or on every device if the units cannot be divided among them.
    place = PartitionSpec()
    for leaf in jax.tree.leaves(batch):
        spec = _spec(leaf)
        if spec and spec[0] is not None:
            names = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
            devices = math.prod(mesh.shape[name] for name in names)
            place = PartitionSpec(spec[0]) if leaf.shape[0] // rows_per_unit % devices == 0 else place
            break
    facts = NamedSharding(mesh, place)
    placed = result(total, *[facts] * (len(result._fields) - 1))  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return jax.sharding.auto_axes(run, axes=explicit, out_sharding=placed)(*arguments)
    except ValueError as error:
        if "should match the aval mesh" not in str(error):
            raise
        reason, fix = "closes over an array that lies on an Explicit mesh", "Pass the array as an argument, named in shared_argnums"
        raise ConfigError("the loss", reason, fix) from error


def is_explicit(leaf: Any) -> bool:
    """Returns whether the leaf is an array that lies on a mesh with Explicit axes."""
    return _explicit_mesh(leaf) is not None


def _explicit_mesh(leaf: Any) -> Any:
    """Returns the mesh on which an array lies if it has Explicit axes, else None."""
    mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None) if hasattr(leaf, "dtype") else None
    return None if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types else mesh


def _spec(leaf: Any) -> PartitionSpec | None:
    return jax.typeof(leaf).sharding.spec if is_explicit(leaf) else None
