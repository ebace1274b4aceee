"""Defines the interface of an op, four functions and methods that follow from them, and marks ops in a traced loss.

The ops of dpx are in ops.py; README.md shows how to add another op.

Parameters are passed wrapped, and an op that gets wrapped parameters binds `op_p`. That is a primitive that only dpx binds, so a walk over
the traced program (readers.py) sees which op reads which parameter, and that nothing else does. It deliberately has no rule for
differentiation or for batching: an op inside a `jax.grad` or a `jax.vmap` of the loss would not leave a record per example, and is refused
there.

B: examples, U: units of R rows each (of one row, unless stated), L: stacked layers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class
from jaxtyping import Array, Bool

from dpx.clipping import forms, norms
from dpx.clipping.bounds import Bounded
from dpx.clipping.forms import Form
from dpx.clipping.groups import zero_unless
from dpx.declaration import ConfigError, require
from dpx.randomness import path_name


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
        units = jax.tree.leaves(cotangent)[0].shape[0] // self.rows_per_unit
        return inputs, self.weighted_sum(leaves, record, (jnp.ones((units,), jnp.float32),) * self.parts)

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


ELSEWHERE = "Use an op of dpx.clipping.ops, dpx.clipped_grad, or clipping_method=traced"


class Matrix(NamedTuple):
    """The sizes of a product with a parameter, for one unit: `groups` matrices [p, d] and T tokens; `form` is that of its norm."""

    T: int
    groups: int
    p: int
    d: int
    form: norms.Form


class Looked(NamedTuple):
    """The sizes of T lookups in a table of V rows [d], for one unit; with `is_kept` the gradient of the table is kept."""

    T: int
    d: int
    V: int
    is_kept: bool


@dataclasses.dataclass(eq=False)
class ProbeSession:
    """The settings that ops and models may query while a loss is traced with wrapped parameters.

    `wanted` are the bytes of all gradients that are better kept, by path, whether they are or not.
    """

    shapes: dict[str, tuple[int, ...]]
    kept_bytes: int = 0
    fused: bool = True
    rows_per_unit: int = 1
    kept: dict[str, bool] = dataclasses.field(default_factory=dict)
    matrices: dict[str, Matrix] = dataclasses.field(default_factory=dict)
    lookups: dict[str, Looked] = dataclasses.field(default_factory=dict)
    wanted: dict[str, int] = dataclasses.field(default_factory=dict)

    def keep(self, path: str, size: int) -> bool:
        """Returns whether `size` bytes of per-example gradients of `path` may be kept; the first paths that ask get the memory."""
        if path not in self.kept:
            self.wanted[path] = size
            self.kept[path] = size <= self.kept_bytes
            self.kept_bytes -= size if self.kept[path] else 0
        return self.kept[path]

    def form(self, path: str, B: int, T: int, matrix: tuple[int, int]) -> norms.Form:
        """Returns the norm form of `path`, a matrix [p, d] or a stack of them, at B rows of T tokens."""
        B, T = B // self.rows_per_unit, T * self.rows_per_unit
        if norms.choose(T, *matrix, True) != "kept":
            return norms.choose(T, *matrix, False)
        return norms.choose(T, *matrix, self.keep(path, 4 * B * math.prod(self.shapes[path])))

    def hold(self, path: str, size: int) -> None:
        """Subtracts `size` bytes from what may be kept, once for each path: for arrays that stay in memory whatever the form of a norm."""
        if path not in self.kept:
            self.kept[path] = True
            self.kept_bytes -= size


@register_pytree_with_keys_class
class Probed:
    """A wrapped parameter of a loss. Any use of it outside an op is refused, here or when the traced program is read."""

    def __init__(self, value: Any, path: str, session: ProbeSession):
        self.value, self.path, self.session = value, path, session

    def tree_flatten_with_keys(self):
        return ((GetAttrKey("value"), self.value),), (self.path, self.session)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, *aux)

    def __getitem__(self, index: Any) -> "Probed":
        """Returns a part of the parameter, such as one layer of a stack; readers.py decides whether an op can take it."""
        return Probed(self.value[index], self.path, self.session)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim", "dtype"):
            return getattr(self.value, name)
        if name.startswith("_"):
            raise AttributeError(name)
        raise _NoArray(self.path, f"is not an array outside ops: it has no .{name}", ELSEWHERE)

    def _outside(self, *_: Any) -> Any:
        raise ConfigError(self.path, "is used outside any op, so its per-example gradient is unknown", ELSEWHERE)

    __jax_array__ = __array__ = __neg__ = __abs__ = __bool__ = __float__ = __iter__ = __len__ = _outside
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _outside
    __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = _outside


class _NoArray(ConfigError, AttributeError):
    """An error that is also an `AttributeError`, so that `hasattr` and `getattr` with a default work on wrapped parameters."""


def leaf_names(leaves: Any) -> list[str]:
    """Returns each leaf's place in `leaves`, such as "norm/scale"."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(leaves)]


def is_probed(leaf: Any) -> bool:
    """Returns whether the leaf is a wrapped parameter."""
    return isinstance(leaf, Probed)


def session_of(params: Any) -> ProbeSession | None:
    """Returns the session of wrapped parameters, or None if all are bare."""
    return next((leaf.session for leaf in jax.tree.leaves(params, is_leaf=is_probed) if is_probed(leaf)), None)


def check(parameter: Any, condition: bool, value: str, reason: str, fix: str) -> None:
    """Raises `ConfigError` unless `condition`, if the parameter is wrapped; with bare parameters jax itself decides what is allowed."""
    require(condition or session_of(parameter) is None, value, reason, fix)


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by path. Raises `ConfigError` if two parameters have the same path or a leaf is not an array."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        require(name not in shapes, name, "is the path of two parameters", "Rename one of them")
        fix = "Give arrays; split a model from its other values by eqx.partition(model, eqx.is_inexact_array) or nnx.split"
        require(hasattr(leaf, "shape"), name, f"is a {type(leaf).__name__} and not an array", fix)
        shapes[name] = leaf.shape
    require(bool(shapes), "params", "contain no parameter", "Give arrays to differentiate by")
    return shapes


def trained_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns `shapes_of` parameters to differentiate by; raises `ConfigError` for one of another type than floating-point."""
    shapes, fix = shapes_of(params), "Do not differentiate by it: pass it as another argument"
    for path, leaf in zip(shapes, jax.tree.leaves(params), strict=True):
        require(jnp.issubdtype(leaf.dtype, jnp.floating), path, f"is of type {leaf.dtype}, which has no gradient", fix)
    return shapes


def evaluated(eqn: Any, given: Any) -> list[Any]:
    """Returns the outputs of a traced equation for other inputs."""
    results = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def value_of(var: Any, values: Mapping[Any, Any]) -> Any:
    """Returns what a variable of a traced program holds, by `values`, or the number that a literal is."""
    return var.val if isinstance(var, core.Literal) else values[var]


op_p = Primitive("dpx_op")
op_p.multiple_results = True
op_p.def_abstract_eval(lambda *_, outputs, **__: [ShapedArray(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) for leaf in outputs])


def apply(op: Op, leaves: Any, inputs: tuple, session: ProbeSession | None = None) -> Any:
    """Returns the op's outputs. Leaves may be wrapped or bare; bare ones are constants and are not trained.

    If all are bare, the op is bound only if a `session` is given, so that the backward pass is still the op's own.
    """
    session = session_of(leaves) or session
    if session is None:
        forward = jax.checkpoint(op.outputs, prevent_cse=False) if op.is_recomputed else op.outputs
        return forward(leaves, inputs)
    op = op.of_units(session.rows_per_unit)
    values = jax.tree.map(lambda leaf: leaf.value if is_probed(leaf) else jnp.asarray(leaf), leaves, is_leaf=is_probed)
    named = tuple(leaf.path if is_probed(leaf) else None for leaf in jax.tree.leaves(leaves, is_leaf=is_probed))
    frozen = tuple(name for name, path in zip(leaf_names(values), named, strict=True) if path is None)
    if frozen and op._has("frozen"):
        op = dataclasses.replace(op, frozen=frozen)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return bound(op, values, named, inputs)


def bound(op: Op, values: Any, named: tuple[str | None, ...], inputs: tuple, shapes: Any = None) -> Any:
    """Returns the op's outputs, marked in the program; `values` are its leaves, and `named` says which parameters they are.

    `shapes` are those of its outputs, where they are known.
    """
    flat, tree = jax.tree.flatten((values, inputs))
    outputs, out_tree = jax.tree.flatten(jax.eval_shape(op.outputs, values, inputs) if shapes is None else shapes)
    results = op_p.bind(*flat, op=op, tree=tree, named=named, outputs=tuple(outputs))
    return jax.tree.unflatten(out_tree, results)


def _refused(how: str, fix: str, *_: Any, op: Op, named: tuple, **__: Any) -> Any:
    raise ConfigError(next(path for path in named if path is not None), f"op {op.name} {how}", fix)


ad.primitive_jvps[op_p] = partial(
    _refused,
    "is differentiated inside the loss, where its per-example gradient is unknown",
    "Use dpx.clipped_grad, or clipping_method=vmap",
)
batching.primitive_batchers[op_p] = partial(
    _refused,
    "is under jax.vmap, which hides the example's axis from it",
    "Call it on the whole batch, or use dpx.clipped_grad or clipping_method=vmap",
)
