"""Marks parametrised ops in a traced loss: parameters are passed wrapped, and an op that gets wrapped parameters binds `op_p`.

`op_p` is a primitive that only dpx binds, so a walk over the traced program (readers.py) sees which op reads which
parameter, and that nothing else does. It deliberately has no rule for differentiation or for batching: an op inside a `jax.grad` or a
`jax.vmap` of the loss would not leave a record per example, and is refused there.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

from dpx.clipping import norms
from dpx.clipping.op import Op
from dpx.declaration import ConfigError, require
from dpx.randomness import path_name

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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def __getitem__(self, index: Any) -> "Probed":
        """Returns a part of the parameter, such as one layer of a stack; readers.py decides whether an op can take it."""
        return Probed(self.value[index], self.path, self.session)

    def __getattr__(self, name: str) -> Any:
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


def wrap(params: Any, session: ProbeSession) -> Any:
    """Returns `params` with every leaf wrapped for this session."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: Probed(leaf, path_name(path), session), params)


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
    return bound(op.of_leaves(frozen), values, named, inputs)


def bound(op: Op, values: Any, named: tuple[str | None, ...], inputs: tuple, shapes: Any = None) -> Any:
    """Returns the op's outputs, marked in the program; `values` are its leaves, and `named` says which parameters they are.

    `shapes` are those of its outputs, where they are known.
    """
    flat, tree = jax.tree.flatten((values, inputs))
    outputs, out_tree = jax.tree.flatten(jax.eval_shape(op.outputs, values, inputs) if shapes is None else shapes)
    results = op_p.bind(*flat, op=op, tree=tree, named=named, outputs=tuple(outputs))
    return jax.tree.unflatten(out_tree, results)


def _named(named: tuple) -> str:
    return next(path for path in named if path is not None)


def _differentiated(*_: Any, op: Op, named: tuple, **__: Any) -> Any:
    reason = f"op {op.name} is differentiated inside the loss, where its per-example gradient is unknown"
    raise ConfigError(_named(named), reason, "Use dpx.clipped_grad, or clipping_method=vmap")


def _batched(*_: Any, op: Op, named: tuple, **__: Any) -> Any:
    reason = f"op {op.name} is under jax.vmap, which hides the example's axis from it"
    raise ConfigError(_named(named), reason, "Call it on the whole batch, or use dpx.clipped_grad or clipping_method=vmap")


ad.primitive_jvps[op_p] = _differentiated
batching.primitive_batchers[op_p] = _batched
