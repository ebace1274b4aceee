"""Describes which axis of an array in a traced loss indexes the examples, and bounds the whole numbers by which it is indexed.

A smallest and a largest value of each number are known where they do not depend on data alone. With them an index that stays within the
example's own rows, such as `arange(B)[:, None] * T + id % T`, is told from one that data choose freely.

B: examples (units, where these have several rows).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array in which every number depends on one example.

    The number at index i along `axis` depends on example (i // after) % B. The axis has before * B * after entries.
    """

    axis: int
    before: int = 1
    after: int = 1

    def at(self, axis: SupportsIndex) -> "Rows":
        """Returns the same layout along another axis; jax gives some axes as numpy's numbers."""
        return dataclasses.replace(self, axis=axis.__index__())


@dataclasses.dataclass(frozen=True)
class Mixed:
    """An array in which some number may depend on several examples; `by` names the cause."""

    by: str


# No number depends on an example; in the body of a loop over examples, all numbers depend on that of the round.
SHARED, OWN = "shared", "own"
Layout = Rows | Mixed | str


class Crosses(Exception):
    """An equation that reads, or may read, several examples for one number; the message says how."""


def joined(first: Layout, second: Layout) -> Layout:
    """Returns the layout of an array that is one of two arrays."""
    if first == second or second == SHARED:
        return first
    if first == SHARED:
        return second
    mixed = [layout for layout in (first, second) if isinstance(layout, Mixed)]
    return mixed[0] if mixed else Mixed("a choice between arrays with the examples along different axes")


def the_same(layouts: Iterable[Layout]) -> Rows | None:
    """Returns the one layout with rows among `layouts`, or None if no layout has rows. Raises `Crosses` if they differ."""
    rows = {layout for layout in layouts if isinstance(layout, Rows)}
    if len(rows) > 1:
        raise Crosses("meets examples along two axes")
    return next(iter(rows), None)


def reshaped(rows: Rows, old: Sequence[int], new: Sequence[int], examples: int) -> Rows:
    """Returns the layout after a reshape; raises `Crosses` if no single axis holds the examples."""
    outer, inner = math.prod(old[: rows.axis]) * rows.before, rows.after * math.prod(old[rows.axis + 1 :])
    for axis, size in enumerate(new):
        earlier, later = math.prod(new[:axis]), math.prod(new[axis + 1 :])
        if outer % earlier == 0 and inner % later == 0 and outer // earlier * examples * (inner // later) == size:
            return Rows(axis, outer // earlier, inner // later)
    raise Crosses("cuts the examples' axis")


# Arrays of more numbers than this are taken as unknown.
MOST = 1 << 22
# What may leave the range of its type, and start again at the other end.
WRAPPING = ("add", "sub", "mul", "convert_element_type")


class Bounds(NamedTuple):
    """The smallest and the largest value of each number, float64 in the array's shape; infinite where unknown, 0 and 1 for booleans."""

    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def along(shape: tuple[int, ...], rows: Rows, examples: int) -> np.ndarray:
        """Returns the example of each position of an array of that shape."""
        own = np.arange(shape[rows.axis]) // rows.after % examples
        return np.broadcast_to(own.reshape([-1 if axis == rows.axis else 1 for axis in range(len(shape))]), shape)


def of_value(value: Any) -> Bounds | None:
    """Returns the bounds of a concrete array, or None for one that is traced, large, or not of whole numbers."""
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    if isinstance(value, Tracer) or not _is_whole(dtype) or np.size(value) > MOST:
        return None
    exact = np.asarray(value, np.float64)
    return Bounds(exact, exact)


def _is_whole(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def unknown(aval: Any) -> Bounds:
    """Returns infinite bounds for an array of this shape and type."""
    return Bounds(np.full(aval.shape, -np.inf), np.full(aval.shape, np.inf))


def after(eqn: Any, given: list[Bounds | None]) -> Bounds | None:
    """Returns the bounds of an equation's one output, or None if nothing is known of it."""
    if len(eqn.outvars) != 1:
        return None
    out = eqn.outvars[0].aval
    if not _is_whole(getattr(out, "dtype", np.float32)) or out.size > MOST:
        return None
    name = eqn.primitive.name
    if name == "iota":
        along = np.arange(out.shape[eqn.params["dimension"]], dtype=np.float64)
        shape = [-1 if axis == eqn.params["dimension"] else 1 for axis in range(out.ndim)]
        return Bounds(*[np.broadcast_to(along.reshape(shape), out.shape)] * 2)
    if all(bounds is None for bounds in given):
        return None
    if name == "jit":
        return _remainder(eqn, given)
    operands = [unknown(var.aval) if bounds is None else bounds for var, bounds in zip(eqn.invars, given, strict=True)]
    with np.errstate(invalid="ignore"):
        if name in _MOVES:
            found = Bounds(*(_MOVES[name](eqn, list(ends)) for ends in zip(*operands, strict=True)))
        elif name in _ARITHMETIC:
            found = _ARITHMETIC[name](*operands)
        else:
            return None
    low, high = (np.broadcast_to(end, out.shape) for end in found)
    if name not in WRAPPING:
        return Bounds(low, high)
    # A cast to boolean is treated as one that can wrap around.
    lowest, highest = (1, 0) if out.dtype == jnp.bool_ else (jnp.iinfo(out.dtype).min, jnp.iinfo(out.dtype).max)
    is_sound = (low >= lowest) & (high <= highest)
    return Bounds(np.where(is_sound, low, -np.inf), np.where(is_sound, high, np.inf))


def _sliced(eqn: Any, operands: list[np.ndarray]) -> np.ndarray:
    starts, ends, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    return operands[0][tuple(map(slice, starts, ends, strides or (1,) * len(starts)))]


def _broadcast(eqn: Any, operands: list[np.ndarray]) -> np.ndarray:
    shape = [1] * len(eqn.params["shape"])
    for axis, size in zip(eqn.params["broadcast_dimensions"], operands[0].shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(operands[0].reshape(shape), eqn.params["shape"])


_MOVES: dict[str, Callable[[Any, list[np.ndarray]], np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda eqn, given: given[0].reshape(eqn.outvars[0].aval.shape),
    "squeeze": lambda eqn, given: given[0].reshape(eqn.outvars[0].aval.shape),
    "transpose": lambda eqn, given: np.transpose(given[0], eqn.params["permutation"]),
    "concatenate": lambda eqn, given: np.concatenate(given, eqn.params["dimension"]),
    "slice": _sliced,
    "convert_element_type": lambda eqn, given: given[0],
    "copy": lambda eqn, given: given[0],
    "stop_gradient": lambda eqn, given: given[0],
}


def _product(a: Bounds, b: Bounds) -> Bounds:
    corners = np.nan_to_num(np.stack(np.broadcast_arrays(*(x * y for x in a for y in b))), nan=0, posinf=np.inf, neginf=-np.inf)
    return Bounds(corners.min(0), corners.max(0))


def _less(a: Bounds, b: Bounds) -> Bounds:
    return Bounds((a.high < b.low) * 1.0, (a.low < b.high) * 1.0)


def _chosen(which: Bounds, first: Bounds, second: Bounds, *more: Bounds) -> Bounds:
    if more:
        return Bounds(np.full(first.low.shape, -np.inf), np.full(first.low.shape, np.inf))
    low = np.where(which.low >= 1, second.low, np.where(which.high <= 0, first.low, np.minimum(first.low, second.low)))
    high = np.where(which.low >= 1, second.high, np.where(which.high <= 0, first.high, np.maximum(first.high, second.high)))
    return Bounds(low, high)


_ARITHMETIC: dict[str, Callable[..., Bounds]] = {
    "add": lambda a, b: Bounds(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Bounds(a.low - b.high, a.high - b.low),
    "mul": _product,
    "max": lambda a, b: Bounds(np.maximum(a.low, b.low), np.maximum(a.high, b.high)),
    "min": lambda a, b: Bounds(np.minimum(a.low, b.low), np.minimum(a.high, b.high)),
    "clamp": lambda a, x, b: Bounds(np.clip(x.low, a.low, b.low), np.clip(x.high, a.high, b.high)),
    "lt": _less,
    "gt": lambda a, b: _less(b, a),
    "select_n": _chosen,
}


def _remainder(eqn: Any, given: list[Bounds | None]) -> Bounds | None:
    """Returns the bounds 0 to d - 1 of `x % d` for a known d above zero, which jnp writes as a separate function."""
    divisor = given[-1]
    if divisor is None or len(given) != 2 or not (divisor.low > 0).all() or not np.array_equal(*divisor):
        return None
    if not all(_is_whole(var.aval.dtype) for var in eqn.invars):
        return None
    avals = tuple((tuple(var.aval.shape), np.dtype(var.aval.dtype), bool(var.aval.weak_type)) for var in eqn.invars)
    if str(eqn.params["jaxpr"]) != _written_out(avals):
        return None
    shape = eqn.outvars[0].aval.shape
    return Bounds(np.zeros(shape), np.broadcast_to(divisor.high - 1, shape))


@functools.lru_cache(maxsize=64)
def _written_out(avals: tuple) -> str:
    operands = [ShapedArray(shape, dtype, weak_type=is_weak) for shape, dtype, is_weak in avals]
    closed: core.ClosedJaxpr = jax.make_jaxpr(jnp.remainder)(*operands)
    return str(closed.eqns[0].params["jaxpr"]) if len(closed.eqns) == 1 and "jaxpr" in closed.eqns[0].params else ""
