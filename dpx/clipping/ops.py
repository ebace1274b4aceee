"""Defines the ops of which a model is composed.

With bare parameters they are ordinary jax; with wrapped ones (op.py) they make records. A table [V, d] has rows that are looked up by
id, decoded with, or added by position.

B: examples, T: tokens (all middle axes flattened), p: inputs, d: outputs, V: table rows, M: positions decoded.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import bounds, forms, norms
from dpx.clipping.norms import rows
from dpx.clipping.op import ByRow, Formed, Op, apply, check, session_of

F32 = jnp.float32


class Tie(NamedTuple):
    """The value that `tied_lookup` returns for `decode`.

    Nothing depends on it: the traced loss shows that a table is both looked up and decoded, and the products between both uses are in the
    norm whether a `Tie` is passed or not.
    """

    id_BT: Any
    gathered_BMT: Any
    hidden_BMd: Any


def is_in(id: Array, table_rows: int) -> Array:
    """Returns a mask of the ids that name a row of a table. Every op reads zeros for any other id, and gives it no gradient."""
    return (id >= 0) & (id < table_rows)


@dataclasses.dataclass(frozen=True)
class _Reading(Op):
    """An op that reads rows of a table by id; an id below zero or past the table reads zeros."""

    dtype: Any = F32
    name: str = "lookup"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        (id,), table = inputs, leaves["table"]
        read = table.at[id].get(mode="clip").astype(self.dtype)
        return jnp.where(is_in(id, table.shape[0]).reshape(*id.shape, *(1,) * (table.ndim - 1)), read, 0), id


class Lookup(_Reading, ByRow):
    """The lookup in a table of any size; its norm is computed over pairs of equal ids."""

    def input_cotangent(self, leaves, residuals, cotangent):
        V = leaves["table"].shape[0]
        g = jnp.where(is_in(residuals, V)[..., None], cotangent, 0)
        id_BT = jnp.clip(residuals, 0, V - 1).reshape(residuals.shape[0] // self.rows_per_unit, -1)
        return (None,), {"id": id_BT.astype(F32), "g": self.tokens(g)}

    def weighted_sum(self, leaves, record, weights):
        g_BTd, table = rows(weights[0], record["g"]), leaves["table"]
        start = jnp.zeros(table.shape, norms.float32_or_wider(table.dtype))
        return {"table": start.at[record["id"].astype(jnp.int32)].add(g_BTd)}


def lookup(table: Any, id_BT: Array, dtype: Any = F32) -> Array:
    """Returns table[ids].

    The same table may be looked up again, and decoded. Ids that are not in it read zeros.
    """
    _check_table(table)
    return apply(Lookup(dtype=dtype), {"table": table}, (id_BT,))


def _check_table(table: Any) -> None:
    shape = tuple(table.shape)
    check(table, len(shape) == 2, f"table{shape}", "is not one row of numbers for each id", "Give a table [V, d]")
    check(table, shape[0] < 2**24, f"table{shape}", "has so many ids that float32 cannot represent each one", "Split the table")


def tied_lookup(table: Any, id_BT: Array, decoded: int, dtype: Any = F32) -> tuple[Array, Tie]:
    """Returns the result of `lookup`, and a `Tie` for `decode` at `decoded` positions, for losses that pass one on."""
    B, T = id_BT.shape[0], math.prod(id_BT.shape[1:])
    return lookup(table, id_BT, dtype), Tie(id_BT, jnp.zeros((B, decoded, T), F32), jnp.zeros((B, decoded, table.shape[-1]), F32))


@dataclasses.dataclass(frozen=True)
class Decode(Op):
    """The product h @ table^T (+ bias) at M positions, with logits in float32 or wider.

    The table is a separate part, because a table that is also looked up is clipped with the embeddings.
    """

    norm_sees_all = True
    parts: int
    name: str = "decode"
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()

    def part(self, path: str) -> int:
        return 0 if path == "table" else 1

    def forward(self, leaves, inputs):
        (h_BMd,) = inputs
        at_least_f32 = norms.float32_or_wider(h_BMd.dtype)
        logits_BMV = jnp.einsum("bmd,vd->bmv", h_BMd, leaves["table"].astype(h_BMd.dtype), preferred_element_type=at_least_f32)
        return logits_BMV + leaves["bias"] if "bias" in leaves else logits_BMV, h_BMd

    def input_cotangent(self, leaves, residuals, cotangent):
        h_BMd = residuals
        g_BMd = jnp.einsum("bmv,vd->bmd", cotangent.astype(h_BMd.dtype), leaves["table"].astype(h_BMd.dtype))
        if self.trains("table"):
            return (g_BMd,), {"h": self.tokens(h_BMd), "g": self.tokens(bounds.as_narrow_as(h_BMd, cotangent))}
        is_bias = "bias" in leaves and self.trains("bias")
        return (g_BMd,), {"bias": norms.at_least_float32(self.tokens(cotangent)).sum(1)} if is_bias else {}

    def squared_norm(self, leaves, record):
        """Returns sum_mn (h_m.h_n) (g_m.g_n) for the table and sum_mn g_m.g_n for the bias."""
        if not self.trains("table"):
            bias_B = norms.squares(record["bias"])
            return jnp.zeros_like(bias_B), bias_B
        others = [norms.at_least_float32(record["h"])] + [jnp.ones_like(record["h"][:, :, :1])] * (self.parts - 1)
        return norms.symmetric(record["g"], *others)

    def weighted_sum(self, leaves, record, weights):
        if not self.trains("table"):
            return {"bias": jnp.tensordot(weights[1], record["bias"], 1, precision="highest")}
        g_BMV = record["g"]
        summed = {"table": norms.weighted_product("bmv,bmd->dv", g_BMV, rows(weights[0], record["h"])).T}
        if self.parts == 1 or not self.trains("bias"):
            return summed
        return summed | {"bias": norms.product("bmv,bm->v", g_BMV, jnp.broadcast_to(weights[1][:, None], g_BMV.shape[:2]))}

    def gradients(self, shapes, record):
        if not self.trains("table"):
            return {"bias": forms.Whole(record["bias"])}
        by_leaf: dict[str, forms.Form] = {"table": forms.Outer(record["g"], record["h"])}
        return self.trained(by_leaf | ({"bias": forms.Whole(norms.at_least_float32(record["g"]).sum(1))} if self.parts == 2 else {}))


def decode(h_BMd: Array, table: Any, bias: Any = None, tie: Tie | None = None) -> Array:
    """Returns the logits of M positions.

    The table may be one that is looked up. A `tie` changes nothing.
    """
    leaves = {"table": table} | ({} if bias is None else {"bias": bias})
    return apply(Decode(len(leaves)), leaves, (h_BMd,))


@dataclasses.dataclass(frozen=True)
class AddRows(Op):
    """The sum x + table[offset : offset + T] for x [B, ..., T, d]: the same rows for every text of every example (position embedding)."""

    norm_sees_all = True
    offset: int = 0
    name: str = "add_rows"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        (x,) = inputs
        return x + leaves["table"][self.offset : self.offset + x.shape[-2]].astype(x.dtype), ()

    def input_cotangent(self, leaves, residuals, cotangent):
        # Text by text and row by row the same table rows: a unit's gradient of them is the sum.
        texts = tuple(range(1, cotangent.ndim - 2))
        is_one = not texts and self.rows_per_unit == 1
        return (cotangent,), cotangent if is_one else self.over_rows(norms.at_least_float32(cotangent).sum(texts))

    def squared_norm(self, leaves, record):
        return (norms.squares(record),)

    def weighted_sum(self, leaves, record, weights):
        summed_Td = norms.product("b,btd->td", weights[0], norms.at_least_float32(record))
        place = slice(self.offset, self.offset + summed_Td.shape[0])
        return {"table": jnp.zeros(leaves["table"].shape, summed_Td.dtype).at[place].set(summed_Td)}

    def gradients(self, shapes, record):
        before, rest = self.offset, shapes["table"].shape[0] - self.offset - record.shape[1]
        return {"table": forms.Whole(jnp.pad(norms.at_least_float32(record), ((0, 0), (before, rest), (0, 0))))}


def add_rows(x: Array, table: Any, offset: int = 0) -> Array:
    """Returns x + table[offset : offset + T] for x [B, ..., T, d]."""
    have, wanted = tuple(table.shape), (offset + x.shape[-2], x.shape[-1])
    fits = len(have) == 2 and offset >= 0 and have[0] >= wanted[0] and have[1] == wanted[1]
    check(table, fits and x.ndim >= 3, f"table{have}", f"does not reach rows up to {wanted} for x{x.shape}", "Give x [B, ..., T, d]")
    return apply(AddRows(offset), {"table": table}, (x,))


@dataclasses.dataclass(frozen=True)
class SmallLookup(_Reading, Formed):
    """The lookup in a table so small that its per-example gradient is formed (token types)."""

    name: str = "small_lookup"

    def input_cotangent(self, leaves, residuals, cotangent):
        # An id that is not in the table has no column here.
        is_row_BTV = jax.nn.one_hot(residuals, leaves["table"].shape[0], dtype=cotangent.dtype)
        return (None,), {"table": norms.product("btv,btd->bvd", self.tokens(is_row_BTV), self.tokens(cotangent))}


def small_lookup(table: Any, id_BT: Array, dtype: Any = F32) -> Array:
    """Returns table[ids] for a table so small that its per-example gradient is formed."""
    _check_table(table)
    return apply(SmallLookup(dtype), {"table": table}, (id_BT,))


@dataclasses.dataclass(frozen=True)
class Dense(Op):
    """The product x @ kernel (+ bias) in the type of x; the last `axes` axes of x are contracted with the first axes of the kernel."""

    norm_sees_all = True
    form: norms.Form = "gram"
    axes: int = 1
    name: str = "dense"
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()

    def matrix(self, kernel):
        """Returns the kernel as one matrix [p, d]: its first `axes` axes (inputs) flattened to p, the others (outputs) to d."""
        return kernel.reshape(math.prod(kernel.shape[: self.axes]), math.prod(kernel.shape[self.axes :]))

    def flat(self, x, axes):
        kept = x.shape[: x.ndim - axes]
        return x.reshape(*kept, math.prod(x.shape[len(kept) :]))

    def forward(self, leaves, inputs):
        (x,), kernel = inputs, leaves["kernel"]
        y = self.flat(x, self.axes) @ self.matrix(kernel).astype(x.dtype)
        y = y.reshape(*y.shape[:-1], *kernel.shape[self.axes :])
        return y + leaves["bias"].astype(x.dtype) if "bias" in leaves else y, x

    def input_cotangent(self, leaves, residuals, cotangent):
        x, kernel = residuals, leaves["kernel"]
        g = self.flat(cotangent, kernel.ndim - self.axes)
        a_BTp, g_BTd = self.tokens(self.flat(x, self.axes)), self.tokens(g)
        record = norms.recorded(self.form, a_BTp, g_BTd) if self.trains("kernel") else {}
        if "bias" in leaves and self.trains("bias"):
            record["sum"] = norms.at_least_float32(g_BTd).sum(1)
        return ((g @ self.matrix(kernel).astype(x.dtype).T).reshape(x.shape),), record

    def squared_norm(self, leaves, record):
        bias_B = norms.squares(record["sum"]) if "sum" in record else 0.0
        return (bounds.plus(norms.of_recorded(self.form, record), bias_B) if self.trains("kernel") else bias_B,)

    def weighted_sum(self, leaves, record, weights):
        shape = leaves["kernel"].shape
        shapes = {"kernel": shape, "bias": shape[self.axes :]}
        return {name: forms.summed(form, weights[0], shapes[name]) for name, form in self.gradients(leaves, record).items()}

    def gradients(self, shapes, record):
        by_leaf: dict[str, forms.Form] = {"bias": forms.Whole(record["sum"])} if "sum" in record else {}
        if not self.trains("kernel"):
            return by_leaf
        kernel = forms.Whole(record["kernel"]) if self.form == "kept" else forms.Outer(record["a"], record["g"])
        return by_leaf | {"kernel": kernel}


def dense(x: Array, kernel: Any, bias: Any = None) -> Array:
    """Returns x @ kernel + bias for x [B, ..., p].

    The form of the norm follows from the shapes and from the memory that the session may use.
    """
    shape = tuple(kernel.shape)
    check((kernel, bias), len(shape) == 2, f"kernel{shape}", "is not a matrix", "Give a kernel [p, d], or use dense_general")
    if session_of((kernel, bias)) is None:
        y = x @ kernel.astype(x.dtype)
        return y if bias is None else y + bias.astype(x.dtype)
    return dense_general(x, kernel, bias)


def dense_general(x: Array, kernel: Any, bias: Any = None, axes: int = 1) -> Array:
    """Contracts x [B, ..., *inputs] with a kernel [*inputs, *outputs], which has `axes` axes of inputs.

    Returns [B, ..., *outputs]; a bias has the shape of the outputs.
    """
    inputs = tuple(kernel.shape[:axes])
    shape, ends = tuple(kernel.shape), x.ndim > axes and x.shape[-axes:] == inputs
    reason = f"has no outputs, or no inputs, at axes={axes}"
    check(kernel, 0 < axes < len(shape), f"kernel{shape}", reason, "Give a kernel [*inputs, *outputs]")
    check(kernel, ends, f"x{x.shape}", f"does not end in a kernel's inputs {inputs}", "Give x [B, ..., *inputs]")
    if bias is not None:
        # Widened to a bias, an output has cotangents of another width than the kernel's.
        is_narrow = all(have in (1, wanted) for have, wanted in zip(bias.shape[::-1], shape[: axes - 1 : -1], strict=False))
        check(bias, is_narrow, f"bias{tuple(bias.shape)}", f"is wider than the outputs {shape[axes:]}", "Use the same shape")
    leaves = {"kernel": kernel} | ({} if bias is None else {"bias": bias})
    matrix = (math.prod(inputs), math.prod(shape[axes:]))
    return apply(Dense(form_of(x.shape[0], math.prod(x.shape[1:]) // matrix[0], kernel, matrix), axes), leaves, (x,))


def form_of(B: int, T: int, kernel: Any, matrix: tuple[int, int]) -> norms.Form:
    """Returns the norm form of `kernel`, a matrix [p, d], at B examples of T tokens.

    For a stacked kernel the form is that of all its layers.
    """
    session = session_of(kernel)
    return "gram" if session is None else session.form(kernel.path, B, T, matrix)


@dataclasses.dataclass(frozen=True)
class Normalise(Formed):
    """Normalises over the last axis, in float32 or wider; the result has the input's type.

    It is LayerNorm (`centred`) or RMSNorm, with or without a bias.
    """

    eps: float
    centred: bool = True
    # What is added to the scale, where the parameter is the scale less a constant.
    offset: float = 0.0
    name: str = "layer_norm"
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()

    @property
    def is_recomputed(self):
        # Private steps of BERT are compared with autodiff, whose LayerNorm stays as autodiff makes it.
        return not self.centred

    def forward(self, leaves, inputs):
        x = norms.at_least_float32(inputs[0])
        if self.centred:
            x = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        normalised = x * scale
        y = normalised * (leaves["scale"] + self.offset)
        return (y + leaves["bias"] if "bias" in leaves else y).astype(inputs[0].dtype), (normalised, scale)

    def input_cotangent(self, leaves, residuals, cotangent):
        normalised, scale = residuals
        g = norms.at_least_float32(cotangent)
        record = {"scale": self.tokens(g * normalised).sum(1)} | ({"bias": self.tokens(g).sum(1)} if "bias" in leaves else {})
        g_x = normalise_cotangent(g * (leaves["scale"] + self.offset), normalised, scale, self.centred).astype(cotangent.dtype)
        return (g_x,), self.trained(record)


def normalise_cotangent(g: Array, normalised: Array, scale: Array, centred: bool = True) -> Array:
    """Computes the cotangent of the input from the cotangent of the normalised value."""
    along = normalised * (g * normalised).mean(-1, keepdims=True)
    return scale * (g - g.mean(-1, keepdims=True) - along if centred else g - along)


@dataclasses.dataclass(frozen=True)
class LowRank(Formed):
    """The product x @ a @ b for a [p, r] and b [r, d] of a small rank.

    Per-example gradients of both factors are formed: p r and r d numbers.
    """

    name: str = "low_rank"
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()

    def forward(self, leaves, inputs):
        (x,) = inputs
        h = x @ leaves["a"].astype(x.dtype)
        return h @ leaves["b"].astype(x.dtype), (x, h)

    def input_cotangent(self, leaves, residuals, cotangent):
        x, h = residuals
        g_h = cotangent @ leaves["b"].astype(x.dtype).T
        factors = self.trained({"a": (x, g_h), "b": (h, cotangent)})
        record = {name: norms.per_example(*map(self.tokens, pair)) for name, pair in factors.items()}
        return (g_h @ leaves["a"].astype(x.dtype).T,), record


def low_rank(x: Array, a: Any, b: Any) -> Array:
    """Returns x @ a @ b for x [B, ..., p].

    Added to `dense`, it is an adapter of the kernel (LoRA: Hu et al. 2022). Either factor may be frozen.
    """
    shapes = tuple(a.shape), tuple(b.shape)
    fits = len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][0] and x.shape[-1] == shapes[0][0]
    check((a, b), fits, f"factors{shapes}", f"are not [p, r] and [r, d] for x{x.shape}", "Give matrices whose inner sizes agree")
    return apply(LowRank(), {"a": a, "b": b}, (x,))


def layer_norm(x: Array, scale: Any, bias: Any, eps: float) -> Array:
    """Applies LayerNorm over the last axis; `bias` may be None (Ba et al. 2016)."""
    return apply(Normalise(eps), {"scale": scale} | ({} if bias is None else {"bias": bias}), (x,))


def rms_norm(x: Array, scale: Any, eps: float, offset: float = 0.0) -> Array:
    """Applies RMSNorm over the last axis, times `scale + offset` (Zhang and Sennrich 2019)."""
    return apply(Normalise(eps, centred=False, offset=offset, name="rms_norm"), {"scale": scale}, (x,))


@dataclasses.dataclass(frozen=True)
class AddBias(Formed):
    """Adds a bias over the last axis: x + bias."""

    name: str = "add_bias"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        return inputs[0] + leaves["bias"].astype(inputs[0].dtype), ()

    def input_cotangent(self, leaves, residuals, cotangent):
        return (cotangent,), {"bias": norms.at_least_float32(self.tokens(cotangent)).sum(1)}


def add_bias(x: Array, bias: Any) -> Array:
    """Returns x + bias over the last axis."""
    _check_last(x, bias)
    return apply(AddBias(), {"bias": bias}, (x,))


def _check_last(x: Array, parameter: Any) -> None:
    have, reason = tuple(parameter.shape), f"does not have one number for each entry along the last axis of x{x.shape}"
    check(parameter, have == x.shape[-1:], f"parameter{have}", reason, "Use that shape")


@dataclasses.dataclass(frozen=True)
class Scale(Formed):
    """Multiplies the last axis by a parameter: x * scale."""

    name: str = "scale"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        return inputs[0] * leaves["scale"].astype(inputs[0].dtype), inputs[0]

    def input_cotangent(self, leaves, residuals, cotangent):
        per_example = norms.at_least_float32(self.tokens(cotangent)) * norms.at_least_float32(self.tokens(residuals))
        return (cotangent * leaves["scale"].astype(cotangent.dtype),), {"scale": per_example.sum(1)}


def scale(x: Array, scale: Any) -> Array:
    """Returns x * scale over the last axis."""
    _check_last(x, scale)
    return apply(Scale(), {"scale": scale}, (x,))
