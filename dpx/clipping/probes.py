"""How parametrised ops report to clipping: parameters travel wrapped, and an op that meets wrapped ones leaves a record.

A record (an op's input and its output cotangent, say) is returned by the op's backward pass as the cotangent of a dummy input,
the tap, that travels with the parameter. So one `vjp` through any program made of ops, `lax.scan` over layers included, yields
every op's record, and no Python state outlives a trace.

B: examples, L: stacked layers.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class
from jaxtyping import Array

from dpx.declaration import Refused

# The tap through which a parameter's summed gradient comes back.
SUM = "sum"


class Op:
    """One parametrised op or block. Subclasses are frozen dataclasses of static facts; arrays never hide in them.

    `leaves` is a pytree of parameters, `inputs` a tuple of arrays whose leading axis is the example. A record is a pytree of
    floating arrays (integers travel as float32, exact below 2^24). The leaves fall into `parts`; each has its own squared
    norm, [B] (or [L, B] if the op is `stacked`), so that parts may be clipped apart.

    Where what is clipped is a unit of several rows, inputs hold rows and records units: an op that can says so by a field
    `rows_per_unit: int = 1`, and its records' leading axis is the unit, the products between its rows included.
    """

    name: str = "op"
    parts: int = 1
    stacked: bool = False
    rows_per_unit = 1

    def of_units(self, rows_per_unit: int) -> "Op":
        """This op for units of that many rows; raises `Refused` where it has no rule for their joint gradient."""
        if rows_per_unit == self.rows_per_unit:
            return self
        if not any(field.name == "rows_per_unit" for field in dataclasses.fields(self)):  # pyright: ignore[reportArgumentType]
            reason = "clips row by row: it has no rule for the products between the rows of one unit"
            raise Refused(f"op={self.name}", reason, "Use clipping=vmap, or privacy.unit_mode=group")
        return dataclasses.replace(self, rows_per_unit=rows_per_unit)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def tokens(self, x: Array) -> Array:
        """[B, ..., d] as [U, T, d]: the positions of all rows of a unit in one line."""
        return x.reshape(x.shape[0] // self.rows_per_unit, -1, x.shape[-1])

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
        """sum_b w_b grad_b for every leaf, float32; one weight vector a part."""
        raise NotImplementedError

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


@dataclasses.dataclass(eq=False)
class Session:
    """One trace of a loss with wrapped parameters. `mode`: "discover", "record", "norm", "weighted" or "plain"."""

    mode: str
    shapes: dict[str, tuple[int, ...]]
    kept_bytes: int = 0
    fused: bool = True
    rows_per_unit: int = 1
    claims: dict[tuple[str, str], "Claim"] = dataclasses.field(default_factory=dict)
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


@dataclasses.dataclass(frozen=True)
class Claim:
    """An op's claim on parameters: `paths` of its leaves, `record` the shapes of one record, `layers` the scan around it (or ()).

    `is_narrow`: whether the op rounds to less than float32 anywhere on its way, though its record may be wide.
    """

    op: Op
    paths: tuple[str, ...]
    treedef: Any
    record: Any
    layers: tuple[int, ...]
    is_narrow: bool

    @property
    def is_stacked(self) -> bool:
        return self.op.stacked or bool(self.layers)

    def part_paths(self) -> list[str]:
        """One path for each part: that of its first leaf."""
        places = jax.tree.unflatten(self.treedef, self.paths)
        parts: dict[int, str] = {}
        for place, path in jax.tree_util.tree_leaves_with_path(places):
            parts.setdefault(self.op.part(path_name(place)), path)
        return [parts[part] for part in range(self.op.parts)]


@register_pytree_with_keys_class
class Probed:
    """A parameter on its way through a model: its value, and the taps of the ops that will claim it."""

    def __init__(self, value: Any, taps: dict[str, Any], path: str, session: Session):
        self.value, self.taps, self.path, self.session = value, taps, path, session

    def tree_flatten_with_keys(self):
        return ((GetAttrKey("value"), self.value), (GetAttrKey("taps"), self.taps)), (self.path, self.session)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, *aux)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __jax_array__(self):
        reason = "is used outside any op, so its per-example gradient is unknown"
        raise Refused(self.path, reason, "Use an op of dpx.clipping.ops, or clipping=vmap")


def path_name(path: Any) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def is_probed(leaf: Any) -> bool:
    return isinstance(leaf, Probed)


def session_of(params: Any) -> Session | None:
    """The session of wrapped parameters; None for bare ones."""
    first = jax.tree.leaves(params, is_leaf=is_probed)[0]
    return first.session if is_probed(first) else None


def wrap(params: Any, session: Session, taps: dict[tuple[str, str], Any] | None = None, sums: Any = None) -> Any:
    """`params` with every leaf wrapped; `taps` by (path of a claim's first leaf, op name); `sums` from `empty_sums`."""
    by_path: dict[str, dict[str, Any]] = {}
    for (path, name), tap in (taps or {}).items():
        by_path.setdefault(path, {})[name] = tap

    def one(path, leaf, total):
        own = {} if sums is None else {SUM: total}
        return Probed(leaf, by_path.get(path_name(path), {}) | own, path_name(path), session)

    return jax.tree_util.tree_map_with_path(one, params, params if sums is None else sums)


def empty_sums(params: Any) -> Any:
    """Zeros through whose cotangents gradients come back: float32 or wider even where parameters are bfloat16, whose own
    cotangents would be rounded to that after they were weighted, beyond the clipping norm."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), params)


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def apply(op: Op, leaves: Any, inputs: tuple) -> Any:
    """The op's outputs; with wrapped leaves its backward pass does what the session asks for."""
    wrapped, treedef = jax.tree.flatten(leaves, is_leaf=is_probed)
    session = session_of(leaves)
    if session is None:
        return op.forward(leaves, inputs)[0]
    op = op.of_units(session.rows_per_unit)
    values = jax.tree.unflatten(treedef, [leaf.value for leaf in wrapped])
    if session.mode == "discover":
        return _discover(op, session, wrapped, treedef, values, inputs)
    if session.mode == "record":
        return _recorded(op, values, inputs, wrapped[0].taps[op.name])
    sums = jax.tree.unflatten(treedef, [leaf.taps[SUM] for leaf in wrapped])
    if session.mode == "plain":
        return _plain(op, values, inputs, sums)
    return {"norm": _normed, "weighted": _weighted}[session.mode](op, values, inputs, wrapped[0].taps[op.name], sums)


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _discover(op: Op, session: Session, wrapped: list, treedef: Any, values: Any, inputs: tuple) -> Any:
    def record_of(values, inputs):
        outputs, residuals = op.forward(values, inputs)
        cotangent = jax.tree.map(jnp.zeros_like, outputs)
        return op.input_cotangent(values, residuals, cotangent)[1], (outputs, residuals)

    paths = tuple(leaf.path for leaf in wrapped)
    full, here = session.shapes[paths[0]], wrapped[0].value.shape
    layers = full[: len(full) - len(here)]
    one, on_the_way = jax.eval_shape(record_of, values, inputs)
    record = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(layers + leaf.shape, leaf.dtype), one)
    is_narrow = any(_is_narrow(leaf.dtype) for leaf in jax.tree.leaves((inputs, one, on_the_way)))
    session.claims[paths[0], op.name] = Claim(op, paths, treedef, record, layers, is_narrow)
    return op.forward(values, inputs)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plain(op: Op, values: Any, inputs: tuple, sums: Any) -> Any:
    return op.forward(values, inputs)[0]


def _saving(op, values, inputs, *_):
    """What every forward pass saves but one that weighs."""
    outputs, residuals = op.forward(values, inputs)
    return outputs, (values, residuals)


def _plain_backward(op, saved, cotangent):
    values, residuals = saved
    input_cotangents, gradient = op.gradient(values, residuals, cotangent)
    return None, input_cotangents, gradient


_plain.defvjp(_saving, _plain_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recorded(op: Op, values: Any, inputs: tuple, tap: Any) -> Any:
    return op.forward(values, inputs)[0]


def _recorded_backward(op, saved, cotangent):
    values, residuals = saved
    input_cotangents, record = op.input_cotangent(values, residuals, cotangent)
    return None, input_cotangents, record


_recorded.defvjp(_saving, _recorded_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(op: Op, values: Any, inputs: tuple, probe: Any, sums: Any) -> Any:
    """The probe's cotangent is the squared norm; the sums' is the gradient, weighted by whatever cotangent came in."""
    return op.forward(values, inputs)[0]


def _normed_backward(op, saved, cotangent):
    values, residuals = saved
    input_cotangents, record = op.input_cotangent(values, residuals, cotangent)
    return None, input_cotangents, op.squared_norm(values, record), op.weighted_sum(values, record, op.ones(cotangent))


_normed.defvjp(_saving, _normed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(op: Op, values: Any, inputs: tuple, weights: Any, sums: Any) -> Any:
    """The sums' cotangent is the gradient weighted example by example, rows of weight zero masked."""
    return op.forward(values, inputs)[0]


def _weighted_forward(op, values, inputs, weights, sums):
    outputs, residuals = op.forward(values, inputs)
    return outputs, (values, residuals, weights)


def _weighted_backward(op, saved, cotangent):
    values, residuals, weights = saved
    input_cotangents, record = op.input_cotangent(values, residuals, cotangent)
    keep_B = jnp.stack([jnp.any(part.reshape(-1, part.shape[-1]) > 0, axis=0) for part in weights]).any(0)
    gradient = op.masked_sum(values, record, weights, keep_B)
    return None, input_cotangents, jax.tree.map(jnp.zeros_like, weights), gradient


_weighted.defvjp(_weighted_forward, _weighted_backward)
