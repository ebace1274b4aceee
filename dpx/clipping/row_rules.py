"""Gives, for each primitive, its effect on the axis of the examples: from the layouts of an equation's inputs to those of its outputs.

A layout says which axis of an array indexes the examples. A primitive that is missing here is assumed to mix examples. Rules are used only
if some input has rows and no input is mixed.

Indexing keeps examples apart if every index certainly stays within its own example: each example has its own index (a batching axis, as
`jax.vmap` and `take_along_axis` write it), or the examples' axis is taken whole, or every index is known to point into its own example's
part. So whole numbers are bounded: a smallest and a largest value of each are known where they do not depend on data alone. With them an
index that stays within the example's own rows, such as `arange(B)[:, None] * T + id % T`, is told from one that data choose freely.

B: examples (units, where these have several rows).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
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


def bounds_of(value: Any) -> Bounds | None:
    """Returns the bounds of a concrete array, or None for one that is traced, large, or not of whole numbers."""
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    if isinstance(value, Tracer) or not _is_whole(dtype) or np.size(value) > MOST:
        return None
    exact = np.asarray(value, np.float64)
    return Bounds(exact, exact)


def _is_whole(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def _unknown(shape: tuple[int, ...]) -> Bounds:
    return Bounds(np.full(shape, -np.inf), np.full(shape, np.inf))


def bounds_after(eqn: Any, given: list[Bounds | None]) -> Bounds | None:
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
    operands = [_unknown(var.aval.shape) if bounds is None else bounds for var, bounds in zip(eqn.invars, given, strict=True)]
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


_MOVES: dict[str, Callable[[Any, list[np.ndarray]], np.ndarray]] = {
    "broadcast_in_dim": lambda eqn, given: np.broadcast_to(
        np.expand_dims(given[0], [axis for axis in range(len(eqn.params["shape"])) if axis not in eqn.params["broadcast_dimensions"]]),
        eqn.params["shape"],
    ),
    "reshape": lambda eqn, given: given[0].reshape(eqn.outvars[0].aval.shape),
    "squeeze": lambda eqn, given: given[0].reshape(eqn.outvars[0].aval.shape),
    "transpose": lambda eqn, given: np.transpose(given[0], eqn.params["permutation"]),
    "concatenate": lambda eqn, given: np.concatenate(given, eqn.params["dimension"]),
    "slice": lambda eqn, given: given[0][
        tuple(map(slice, eqn.params["start_indices"], eqn.params["limit_indices"], eqn.params["strides"] or (1,) * given[0].ndim))
    ],
    "convert_element_type": lambda eqn, given: given[0],
    "copy": lambda eqn, given: given[0],
    "stop_gradient": lambda eqn, given: given[0],
}


def _times(a: Bounds, b: Bounds) -> Bounds:
    corners = np.nan_to_num(np.stack(np.broadcast_arrays(*(x * y for x in a for y in b))), nan=0, posinf=np.inf, neginf=-np.inf)
    return Bounds(corners.min(0), corners.max(0))


def _less(a: Bounds, b: Bounds) -> Bounds:
    return Bounds((a.high < b.low) * 1.0, (a.low < b.high) * 1.0)


def _chosen(which: Bounds, first: Bounds, second: Bounds, *more: Bounds) -> Bounds:
    if more:
        return _unknown(first.low.shape)
    low = np.where(which.low >= 1, second.low, np.where(which.high <= 0, first.low, np.minimum(first.low, second.low)))
    high = np.where(which.low >= 1, second.high, np.where(which.high <= 0, first.high, np.maximum(first.high, second.high)))
    return Bounds(low, high)


_ARITHMETIC: dict[str, Callable[..., Bounds]] = {
    "add": lambda a, b: Bounds(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Bounds(a.low - b.high, a.high - b.low),
    "mul": _times,
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


# (equation, layouts of its inputs, number of examples, bounds of its whole-number inputs) -> the layout of every output.
Rule = Callable[[Any, list[Layout], int, list[Bounds | None]], Rows]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the primitives of these names."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def require(condition: Any, how: str) -> None:
    """Raises `Crosses` unless `condition`."""
    if not condition:
        raise Crosses(how)


def shape_of(var: Any) -> tuple[int, ...]:
    """Returns the shape of a variable."""
    return tuple(var.aval.shape)


def rows_of(held: Iterable[Layout]) -> Rows:
    """Returns the one layout with rows; raises `Crosses` if there are several."""
    rows = {layout for layout in held if isinstance(layout, Rows)}
    require(len(rows) <= 1, "meets examples along two axes")
    assert rows, "this rule needs an input with an example axis"
    return rows.pop()


def _beside(axis: int, along: Any) -> SupportsIndex | None:
    return None if axis in along else axis


def _without(axis: int, gone: Any) -> SupportsIndex | None:
    return None if axis in gone else axis - sum(other < axis for other in gone)


_SORTED = ("dimension", "axis", "reduction_dimension")
# Primitives, the axis of their outputs along which the examples are by that of their inputs, None where the equation crosses them, and how.
_FAMILIES: tuple[tuple[str, Callable[[Any, int], SupportsIndex | None], str], ...] = (
    (
        "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
        "convert_element_type copy copy_p cos cosh device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt "
        "igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p logistic lt lt_to "
        "max min mul mulhi name ne neg nextafter not or polygamma population_count pow pvary random_clone "
        "random_fold_in real reduce_precision regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint "
        "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh tie "
        "threefry2x32 xor zeta",
        lambda eqn, axis: axis,
        "",
    ),
    ("broadcast_in_dim", lambda eqn, axis: eqn.params["broadcast_dimensions"][axis], ""),
    ("transpose", lambda eqn, axis: list(eqn.params["permutation"]).index(axis), ""),
    ("stack", lambda eqn, axis: axis + (eqn.params["axis"] <= axis), ""),
    ("squeeze", lambda eqn, axis: _without(axis, eqn.params["dimensions"]), "drops the examples' axis"),
    ("unstack", lambda eqn, axis: _without(axis, (eqn.params["axis"],)), "splits the examples' axis"),
    (
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce",
        lambda eqn, axis: _without(axis, eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]),
        "reduces the examples' axis",
    ),
    (
        "cumsum cumprod cummax cummin cumlogsumexp",
        lambda eqn, axis: _beside(axis, (eqn.params["axis"],)),
        "accumulates along the examples' axis",
    ),
    (
        "sort top_k approx_top_k",
        # A top_k without the parameter sorts along the last axis.
        lambda eqn, axis: _beside(axis, (next((eqn.params[name] for name in _SORTED if name in eqn.params), eqn.invars[0].aval.ndim - 1),)),
        "sorts along the examples' axis",
    ),
    ("rev", lambda eqn, axis: _beside(axis, eqn.params["dimensions"]), "reverses the examples' axis"),
    ("concatenate", lambda eqn, axis: _beside(axis, (eqn.params["dimension"],)), "joins arrays along the examples' axis"),
    ("split", lambda eqn, axis: _beside(axis, (eqn.params["axis"],)), "splits the examples' axis"),
    ("tile", lambda eqn, axis: axis if eqn.params["reps"][axis] == 1 else None, "repeats the examples' axis"),
    (
        "slice",
        lambda eqn, axis: (
            axis
            if shape_of(eqn.invars[0])[axis] == shape_of(eqn.outvars[0])[axis] and (eqn.params["strides"] or (1,) * (axis + 1))[axis] == 1
            else None
        ),
        "takes a part of the examples' axis",
    ),
    (
        "pad",
        lambda eqn, axis: axis if tuple(eqn.params["padding_config"][axis]) == (0, 0, 0) else None,
        "pads or shifts the examples' axis",
    ),
)


def _follow(place: Callable[[Any, int], SupportsIndex | None], how: str, eqn: Any, held: list[Layout], examples: int, bounds: Any) -> Rows:
    """Gives the layout of an equation of one of the `_FAMILIES`."""
    rows = rows_of(held)
    axis = place(eqn, rows.axis)
    if axis is None:
        raise Crosses(how)
    return rows.at(axis)


for _names, _place, _how in _FAMILIES:
    RULES.update(dict.fromkeys(_names.split(), functools.partial(_follow, _place, _how)))


@rule("random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed", "random_gamma", "bitcast_convert_type")
def _leading(eqn, held, examples, bounds):
    """Follows an equation whose inputs' axes come first in its outputs."""
    rows = rows_of(held)
    sizes = [shape_of(var)[rows.axis : rows.axis + 1] for var in (*eqn.invars, *eqn.outvars) if shape_of(var)]
    require(len(set(sizes)) == 1 and sizes[0] != (), "changes the examples' axis")
    return rows


@rule(*"cholesky triangular_solve eigh eig svd qr lu geqrf householder_product schur tridiagonal_solve fft".split())
def _of_matrices(eqn, held, examples, bounds):
    """Follows an equation that is batched over all axes but the last ones."""
    rows = rows_of(held)
    last = len(eqn.params["fft_lengths"]) if eqn.primitive.name == "fft" else 2
    smallest = min(len(shape_of(var)) for var, layout in zip(eqn.invars, held, strict=True) if isinstance(layout, Rows))
    require(rows.axis < smallest - last, "computes along the examples' axis")
    return rows


@rule("reshape")
def _reshape(eqn, held, examples, bounds):
    require(eqn.params.get("dimensions") is None, "changes the order of axes")
    rows, old, new = rows_of(held), shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    outer, inner = math.prod(old[: rows.axis]) * rows.before, rows.after * math.prod(old[rows.axis + 1 :])
    for axis, size in enumerate(new):
        earlier, later = math.prod(new[:axis]), math.prod(new[axis + 1 :])
        if outer % earlier == 0 and inner % later == 0 and outer // earlier * examples * (inner // later) == size:
            return Rows(axis, outer // earlier, inner // later)
    raise Crosses("cuts the examples' axis")


@rule("dynamic_slice", "dynamic_update_slice")
def _dynamic_slice(eqn, held, examples, bounds):
    rows = rows_of(held)
    sizes = {shape_of(var)[rows.axis] for var, layout in zip(eqn.invars, held, strict=True) if isinstance(layout, Rows)}
    parts = {shape_of(eqn.outvars[0])[rows.axis], shape_of(eqn.invars[0])[rows.axis]}
    if eqn.primitive.name == "dynamic_update_slice":
        parts.add(shape_of(eqn.invars[1])[rows.axis])
    require(len(sizes | parts) == 1, "takes a part of the examples' axis")
    return rows


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_scatter_add", "select_and_gather_add")
def _window(eqn, held, examples, bounds):
    rows, params = rows_of(held), eqn.params
    entries = [(params[name] or [1] * (rows.axis + 1))[rows.axis] for name in ("window_dimensions", "window_strides") if name in params]
    is_one = set(entries) == {1} and tuple(params["padding"][rows.axis]) == (0, 0)
    require(is_one, "slides a window along the examples' axis")
    return rows


@rule("conv_general_dilated")
def _convolution(eqn, held, examples, bounds):
    spec = eqn.params["dimension_numbers"]
    is_batch = isinstance(held[0], Rows) and held[1] == SHARED and held[0].axis == spec.lhs_spec[0]
    require(is_batch and eqn.params["batch_group_count"] == 1, "has the examples along an axis that is not its batch axis")
    return rows_of(held).at(spec.out_spec[0])


@rule("dot_general")
def _product(eqn, held, examples, bounds):
    contracted, batched = eqn.params["dimension_numbers"]
    free = [
        [axis for axis in range(len(shape_of(var))) if axis not in (*gone, *shared)]
        for var, gone, shared in zip(eqn.invars, contracted, batched, strict=True)
    ]
    places = []
    for side, layout in enumerate(held):
        if isinstance(layout, Rows):
            require(layout.axis not in contracted[side], "sums products over the examples' axis")
            is_batched = layout.axis in batched[side]
            start = 0 if is_batched else len(batched[0]) + (len(free[0]) if side else 0)
            places.append(layout.at(start + list(batched[side] if is_batched else free[side]).index(layout.axis)))
    return rows_of(places)


@rule("gather")
def _gather(eqn, held, examples, bounds):
    numbers, sizes, operand = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], held[0]
    places = [axis for axis in range(len(shape_of(eqn.outvars[0]))) if axis not in numbers.offset_dims]
    by_index = _of_index(held[1], eqn.invars[1], places)
    if not isinstance(operand, Rows):
        return rows_of([by_index])
    size = shape_of(eqn.invars[0])[operand.axis]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if operand.axis in numbers.operand_batching_dims:
        along = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(operand.axis)]
        return rows_of([by_index, operand.at(places[along])])
    if operand.axis in gone:
        require(operand.axis in numbers.start_index_map, "drops the examples' axis")
        axis = _known(operand, eqn.invars[1], held[1], bounds[1], list(numbers.start_index_map).index(operand.axis), examples)
        return rows_of([by_index, axis.at(places[axis.axis])])
    require(sizes[operand.axis] == size, "takes a part of the examples' axis")
    offset = [axis for axis in range(len(sizes)) if axis not in gone]
    return rows_of([by_index, operand.at(numbers.offset_dims[offset.index(operand.axis)])])


def _of_index(index: Layout, var: Any, places: list[int]) -> Layout:
    if not isinstance(index, Rows):
        return index
    require(index.axis < len(shape_of(var)) - 1, "reads an index that is computed from several examples")
    return index.at(places[index.axis])


def _known(operand: Rows, var: Any, index: Layout, bounds: Bounds | None, component: int, examples: int) -> Rows:
    """Returns the axis of the index that holds the examples.

    Every index along the examples' axis of the operand must be known to stay within its own example.
    """
    how = "reads rows of the examples' axis by an index that may belong to another example"
    if bounds is None or operand.before != 1:
        raise Crosses(how)
    shape = shape_of(var)[:-1]
    low, high = (np.floor(end[..., component] / operand.after) for end in bounds)
    options = [index] if isinstance(index, Rows) else [Rows(axis) for axis, size in enumerate(shape) if size == examples]
    for option in options:
        own = bounds.along(shape, option, examples)
        if bool((low == own).all() and (high == own).all()):
            return option
    raise Crosses(how)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(eqn, held, examples, bounds):
    numbers, (operand, index, updates) = eqn.params["dimension_numbers"], held
    sizes, given = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    if index == SHARED and updates == SHARED:
        return rows_of([operand])
    if isinstance(updates, Rows) and updates.axis in numbers.update_window_dims:
        window = [axis for axis in range(len(sizes)) if axis not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
        axis = window[list(numbers.update_window_dims).index(updates.axis)]
        is_whole = index == SHARED and sizes[axis] == given[updates.axis]
        require(is_whole, "writes a part of the examples' axis")
        return rows_of([operand, updates.at(axis)])
    # From here on `rows` is by the axes of the index.
    places = [axis for axis in range(len(given)) if axis not in numbers.update_window_dims]
    by_update = updates.at(places.index(updates.axis)) if isinstance(updates, Rows) else updates
    rows = rows_of([_of_index(index, eqn.invars[1], list(range(len(places)))), by_update])
    if rows.axis in numbers.scatter_indices_batching_dims:
        axis = numbers.operand_batching_dims[list(numbers.scatter_indices_batching_dims).index(rows.axis)]
        return rows_of([operand, rows.at(axis)])
    # The axis of an operand that is written by a known index, which puts each example into its own part.
    places = [axis for axis in numbers.scatter_dims_to_operand_dims if axis in numbers.inserted_window_dims and sizes[axis] % examples == 0]
    axis = operand.axis if isinstance(operand, Rows) else next(iter(places), -1)
    require(axis in places, "writes rows by an index that may belong to another example")
    target = Rows(axis, 1, sizes[axis] // examples)
    _known(target, eqn.invars[1], rows, bounds[1], list(numbers.scatter_dims_to_operand_dims).index(axis), examples)
    return rows_of([operand, target])
