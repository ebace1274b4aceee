"""How parametrised ops are known in a traced loss: parameters travel wrapped, and an op that meets wrapped ones binds `op_p`.

`op_p` is a primitive of ours that nothing else can write, so a walk over the traced program (readers.py) sees which op reads which
parameter, and that nothing else does. It has no rule for differentiation or for batching on purpose: an op inside a `jax.grad` or a
`jax.vmap` of the loss would leave no record of one example, and is refused there.

B: examples, U: units of R rows each (of one, unless said), L: stacked layers.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class
from jaxtyping import Array, Bool

from dpx.clipping.forms import Form
from dpx.declaration import Refused

ELSEWHERE = "Use an op of dpx.clipping.ops, dpx.clipped_grad, or clipping=vmap"


class Op:
    """One parametrised op or block. Subclasses are frozen dataclasses of static facts; arrays never hide in them.

    `leaves` is a pytree of parameters, `inputs` a tuple of arrays whose leading axis is the example. A record is a pytree of
    floating arrays (integers travel as float32, exact below 2^24). The leaves fall into `parts`; each has its own squared
    norm, [B] (or [L, B] if the op is `stacked`), so that parts may be clipped apart.

    Where what is clipped is a unit of several rows, inputs hold rows and records units: an op that can says so by a field
    `rows_per_unit: int = 1`, and its records' leading axis is the unit, the products between its rows included.

    Where only some leaves are trained, an op that can says so by a field `resting: tuple[str, ...] = ()`, the names of the
    others: it records nothing for them, and its norms, sums and gradients are of the rest (sums hold nothing, or None, for
    them). Any other op records as ever, and is asked for the `gradients` of what is trained.
    """

    name: str = "op"
    parts: int = 1
    stacked: bool = False
    rows_per_unit = 1
    resting: tuple[str, ...] = ()
    # Whether a norm is not finite wherever the sum would not be. Where that is not known, records are looked through.
    norm_sees_all = False

    def of_units(self, rows_per_unit: int) -> "Op":
        """This op for units of that many rows; raises `Refused` where it has no rule for their joint gradient."""
        if rows_per_unit == self.rows_per_unit:
            return self
        if not self._has("rows_per_unit"):
            reason = "clips row by row: it has no rule for the products between the rows of one unit"
            raise Refused(f"op={self.name}", reason, "Use clipping=vmap, or privacy.unit_mode=group")
        return dataclasses.replace(self, rows_per_unit=rows_per_unit)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def of_leaves(self, resting: tuple[str, ...]) -> "Op":
        """This op where the leaves of these names are not trained."""
        if not resting or not self._has("resting"):
            return self
        return dataclasses.replace(self, resting=resting)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def _has(self, name: str) -> bool:
        return any(field.name == name for field in dataclasses.fields(self))  # pyright: ignore[reportArgumentType]

    def trains(self, name: str) -> bool:
        """Whether the leaf of that name, if there is one, is trained."""
        return name not in self.resting

    def trained(self, found: dict[str, Any]) -> dict[str, Any]:
        """Of something by leaf, what is of trained ones."""
        return {name: leaf for name, leaf in found.items() if self.trains(name)} if self.resting else found

    def values_needed(self) -> tuple[str, ...]:
        """Resting leaves whose values `squared_norm` or `weighted_sum` need; of all others they see zeros."""
        return ()

    def tokens(self, x: Array) -> Array:
        """[B, ..., d] as [U, T, d]: the positions of all rows of a unit in one line."""
        return x.reshape(x.shape[0] // self.rows_per_unit, self.rows_per_unit * math.prod(x.shape[1:-1]), x.shape[-1])

    def over_rows(self, x: Array) -> Array:
        """[B, ...] as [U, ...]: the rows of a unit added up."""
        return x if self.rows_per_unit == 1 else x.reshape(-1, self.rows_per_unit, *x.shape[1:]).sum(1)

    def part(self, path: str) -> int:
        """The part a leaf belongs to; `path` is the leaf's place in `leaves`, such as "norm/scale"."""
        return 0

    def forward(self, leaves: Any, inputs: tuple) -> tuple[Any, Any]:
        """(outputs, residuals). Differentiable: with bare parameters it is what autodiff sees."""
        raise NotImplementedError

    def input_cotangent(self, leaves: Any, residuals: Any, cotangent: Any) -> tuple[tuple, Any]:
        """(cotangents of `inputs`, None for integers; the record)."""
        raise NotImplementedError

    def squared_norm(self, leaves: Any, record: Any) -> tuple[Array, ...]:
        """Each part's per-example squared gradient norm, float32."""
        raise NotImplementedError

    def weighted_sum(self, leaves: Any, record: Any, weights: tuple[Array, ...]) -> Any:
        """sum_b w_b grad_b for every trained leaf, float32; one weight vector a part."""
        raise NotImplementedError

    def gradients(self, shapes: Any, record: Any) -> dict[str, Form]:
        """Each leaf's per-example gradient, by its place in `leaves`, in a form that meets others of the same parameter (forms.py).

        Asked for where a parameter is used more than once, or only some of the leaves are parameters. {}: there is no such rule.
        `shapes` are those of the leaves.
        """
        return {}

    def gradient(self, leaves: Any, residuals: Any, cotangent: Any) -> tuple[tuple, Any]:
        """(cotangents of `inputs`, gradient of `leaves`): the backward pass without clipping."""
        inputs, record = self.input_cotangent(leaves, residuals, cotangent)
        return inputs, self.weighted_sum(leaves, record, self.ones(cotangent))

    def ones(self, cotangent: Any) -> tuple[Array, ...]:
        """Weights of one for every unit, one vector a part."""
        units = jax.tree.leaves(cotangent)[0].shape[0] // self.rows_per_unit
        return (jnp.ones((units,), jnp.float32),) * self.parts

    def masked(self, record: Any, keep_B: Array) -> Any:
        """The record with exact zeros where not kept; a where, so that NaN does not survive. Leaves may hold units or their rows."""

        def one(leaf: Array) -> Array:
            keep = jnp.repeat(keep_B, leaf.shape[0] // keep_B.shape[0])
            return jnp.where(keep.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0)

        return jax.tree.map(one, record)

    def masked_sum(self, leaves: Any, record: Any, weights: tuple[Array, ...], keep_B: Array) -> Any:
        """`weighted_sum` over the rows kept alone, whatever stands in the others."""
        return self.weighted_sum(leaves, self.masked(record, keep_B), weights)

    def by_unit(self, record: Any, units: int) -> list[Array]:
        """Every array of the record as [U, ...]: what a unit's sum is made from."""
        return [leaf.reshape(units, leaf.size // units) for leaf in jax.tree.leaves(record)]

    def is_finite(self, record: Any, units: int) -> Bool[Array, " U"]:
        """Whether all that a unit's sum is made from is finite, its norm being so or not."""
        return jnp.stack([jnp.isfinite(leaf_U).all(1) for leaf_U in self.by_unit(record, units)]).all(0)


@dataclasses.dataclass(eq=False)
class Session:
    """What ops and models may ask while a loss is traced with wrapped parameters."""

    shapes: dict[str, tuple[int, ...]]
    kept_bytes: int = 0
    fused: bool = True
    rows_per_unit: int = 1
    kept: dict[str, bool] = dataclasses.field(default_factory=dict)

    def keep(self, path: str, size: int) -> bool:
        """Whether `size` bytes of per-example gradients of `path` may be kept: first come, first served, and remembered."""
        if path not in self.kept:
            self.kept[path] = size <= self.kept_bytes
            self.kept_bytes -= size if self.kept[path] else 0
        return self.kept[path]

    def hold(self, path: str, size: int) -> None:
        """Takes `size` bytes off what may be kept, once a path: for what stays in memory whatever the form of a norm."""
        if path not in self.kept:
            self.kept[path] = True
            self.kept_bytes -= size


@register_pytree_with_keys_class
class Probed:
    """A parameter on its way through a loss. What is done to its value outside an op is seen in the traced program, and refused."""

    def __init__(self, value: Any, path: str, session: Session):
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
        """One layer of a stack, say; whether an op can make something of it is seen in the program."""
        return Probed(self.value[index], self.path, self.session)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _NoArray(self.path, f"is no array outside ops: it has no .{name}", ELSEWHERE)

    def _outside(self, *_: Any) -> Any:
        raise Refused(self.path, "is used outside any op, so its per-example gradient is unknown", ELSEWHERE)

    __jax_array__ = __array__ = __neg__ = __abs__ = __bool__ = __float__ = __iter__ = __len__ = _outside
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _outside
    __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = _outside


class _NoArray(Refused, AttributeError):
    """What is asked for as an attribute may be asked for in vain."""


def path_name(path: Any) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def leaf_names(leaves: Any) -> list[str]:
    """Each leaf's place in `leaves`, such as "norm/scale"."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(leaves)]


def is_probed(leaf: Any) -> bool:
    return isinstance(leaf, Probed)


def session_of(params: Any) -> Session | None:
    """The session of wrapped parameters; None where all are bare."""
    return next((leaf.session for leaf in jax.tree.leaves(params, is_leaf=is_probed) if is_probed(leaf)), None)


def wrap(params: Any, session: Session) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: Probed(leaf, path_name(path), session), params)


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Raises `Refused` where two parameters have one path."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        if name in shapes:
            raise Refused(name, "is the path of two parameters", "Rename one of them")
        if not hasattr(leaf, "shape"):
            raise Refused(name, f"is a {type(leaf).__name__} and no array", "Give arrays")
        shapes[name] = leaf.shape
    if not shapes:
        raise Refused("params", "hold no parameter", "Give arrays to differentiate by")
    return shapes


op_p = Primitive("dpx_op")
op_p.multiple_results = True


def apply(op: Op, leaves: Any, inputs: tuple, session: Session | None = None) -> Any:
    """The op's outputs. Leaves may be wrapped or bare: bare ones are constants, which nothing trains.

    Where all are bare, an op that knows of `resting` leaves stands in the program of a `session` all the same: for its backward pass.
    """
    session = session_of(leaves) or session
    if session is None:
        return op.forward(leaves, inputs)[0]
    op = op.of_units(session.rows_per_unit)
    values = jax.tree.map(lambda leaf: leaf.value if is_probed(leaf) else jnp.asarray(leaf), leaves, is_leaf=is_probed)
    named = tuple(leaf.path if is_probed(leaf) else None for leaf in jax.tree.leaves(leaves, is_leaf=is_probed))
    resting = tuple(name for name, path in zip(leaf_names(values), named, strict=True) if path is None)
    return bound(op.of_leaves(resting), values, named, inputs)


def bound(op: Op, values: Any, named: tuple[str | None, ...], inputs: tuple) -> Any:
    """The op's outputs, marked in the program: `values` of its leaves, and which parameters they are."""
    flat, tree = jax.tree.flatten((values, inputs))
    outputs, out_tree = jax.tree.flatten(jax.eval_shape(lambda given: op.forward(*given)[0], (values, inputs)))
    found = op_p.bind(*flat, op=op, tree=tree, named=named, outputs=tuple(outputs))
    return jax.tree.unflatten(out_tree, found)


@op_p.def_abstract_eval
def _abstract(*_: Any, outputs: tuple, **__: Any) -> list[Any]:
    return [ShapedArray(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) for leaf in outputs]


def _named(named: tuple) -> str:
    return next(path for path in named if path is not None)


def _differentiated(*_: Any, op: Op, named: tuple, **__: Any) -> Any:
    reason = f"op {op.name} is differentiated inside the loss, where its per-example gradient is unknown"
    raise Refused(_named(named), reason, "Use dpx.clipped_grad, or clipping=vmap")


def _batched(*_: Any, op: Op, named: tuple, **__: Any) -> Any:
    reason = f"op {op.name} stands under jax.vmap, which hides the example's axis from it"
    raise Refused(_named(named), reason, "Call it on the whole batch, or use dpx.clipped_grad or clipping=vmap")


ad.primitive_jvps[op_p] = _differentiated
batching.primitive_batchers[op_p] = _batched
