"""The ops a model is composed of: with bare parameters ordinary jax, with wrapped ones (see probes.py) they leave records.

B: examples, T: tokens (all middle axes flattened), p: inputs, d: outputs, V: table rows, M: positions decoded.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import forms, norms
from dpx.clipping.probes import Op, apply, session_of
from dpx.declaration import require

F32 = jnp.float32


def rows(weights_B: Array, x: Array) -> Array:
    """Each example's rows times its weight, in float32 or wider."""
    return norms.at_least_float32(x) * weights_B.reshape((-1,) + (1,) * (x.ndim - 1))


def reading(id: Array, table: Array, dtype: Any) -> Array:
    """table[ids], zeros where an id is not in the table."""
    found = table.at[id].get(mode="clip").astype(dtype)
    return jnp.where(is_in(id, table.shape[0]).reshape(*id.shape, *(1,) * (table.ndim - 1)), found, 0)


def check(parameter: Any, condition: bool, value: str, reason: str, fix: str) -> None:
    """Raises `Refused` unless `condition`, where the parameter is wrapped: bare ones may do whatever jax has a meaning for."""
    require(condition or session_of(parameter) is None, value, reason, fix)


@dataclasses.dataclass(frozen=True)
class Dense(Op):
    """x @ kernel (+ bias), computed in x's dtype; the last `axes` axes of x meet the first of the kernel."""

    norm_sees_all = True
    form: norms.Form = "gram"
    axes: int = 1
    name: str = "dense"
    rows_per_unit: int = 1
    resting: tuple[str, ...] = ()

    def matrix(self, kernel):
        """The kernel as [p, d]."""
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
        record = {}
        if self.trains("kernel"):
            record = {"kernel": norms.per_example(a_BTp, g_BTd)} if self.form == "kept" else {"a": a_BTp, "g": g_BTd}
        if "bias" in leaves and self.trains("bias"):
            record["sum"] = norms.at_least_float32(g_BTd).sum(1)
        return ((g @ self.matrix(kernel).astype(x.dtype).T).reshape(x.shape),), record

    def squared_norm(self, leaves, record):
        bias_B = norms.squares(record["sum"]) if "sum" in record else 0.0
        if not self.trains("kernel"):
            return (bias_B,)
        if self.form == "gram":
            return (norms.gram(record["a"], record["g"]) + bias_B,)
        kernel_Bpd = record["kernel"] if self.form == "kept" else norms.per_example(record["a"], record["g"])
        return (norms.squares(kernel_Bpd) + bias_B,)

    def weighted_sum(self, leaves, record, weights):
        (w_B,), summed = weights, {}
        if self.trains("kernel"):
            summed["kernel"] = self._kernel_sum(record, w_B).reshape(leaves["kernel"].shape)
        if "sum" in record:
            bias_d = jnp.tensordot(w_B, record["sum"], 1, precision="highest")
            summed["bias"] = bias_d.reshape(leaves["kernel"].shape[self.axes :])
        return summed

    def _kernel_sum(self, record, w_B):
        if self.form == "kept":
            return jnp.tensordot(w_B, record["kernel"], 1, precision="highest")
        return norms.summed(norms.at_least_float32(record["a"]), rows(w_B, record["g"]))

    def gradients(self, shapes, record):
        found: dict[str, forms.Form] = {"bias": forms.Whole(record["sum"])} if "sum" in record else {}
        if not self.trains("kernel"):
            return found
        kernel = forms.Whole(record["kernel"]) if self.form == "kept" else forms.Outer(record["a"], record["g"])
        return found | {"kernel": kernel}


def dense(x: Array, kernel: Any, bias: Any = None) -> Array:
    """x @ kernel + bias for x [B, ..., p]; the norm's form follows from the shapes and the memory the session may use."""
    shape = tuple(kernel.shape)
    check((kernel, bias), len(shape) == 2, f"kernel{shape}", "is not a matrix", "Give a kernel [p, d], or use dense_general")
    if session_of((kernel, bias)) is None:
        y = x @ kernel.astype(x.dtype)
        return y if bias is None else y + bias.astype(x.dtype)
    return dense_general(x, kernel, bias)


def dense_general(x: Array, kernel: Any, bias: Any = None, axes: int = 1) -> Array:
    """x [B, ..., *inputs] and a kernel [*inputs, *outputs], `axes` of inputs: [B, ..., *outputs]; a bias has the shape of the outputs."""
    inputs = tuple(kernel.shape[:axes])
    shape, ends = tuple(kernel.shape), x.ndim > axes and x.shape[-axes:] == inputs
    reason = f"has no outputs, or no inputs, at axes={axes}"
    check(kernel, 0 < axes < len(shape), f"kernel{shape}", reason, "Give a kernel [*inputs, *outputs]")
    check(kernel, ends, f"x{x.shape}", f"does not end in a kernel's inputs {inputs}", "Give x [B, ..., *inputs]")
    leaves = {"kernel": kernel} | ({} if bias is None else {"bias": bias})
    matrix = (math.prod(inputs), math.prod(shape[axes:]))
    return apply(Dense(form_of(x.shape[0], math.prod(x.shape[1:]) // matrix[0], kernel, matrix), axes), leaves, (x,))


def form_of(B: int, T: int, kernel: Any, matrix: tuple[int, int]) -> norms.Form:
    """The norm form of `kernel`, a matrix [p, d], at B examples of T tokens; a stacked kernel's answer covers all its layers."""
    session = session_of(kernel)
    if session is None:
        return "gram"
    B, T = B // session.rows_per_unit, T * session.rows_per_unit
    if norms.choose(T, *matrix, True) != "kept":
        return norms.choose(T, *matrix, False)
    return norms.choose(T, *matrix, session.keep(kernel.path, 4 * B * math.prod(session.shapes[kernel.path])))


class Formed(Op):
    """An op whose record is the per-example gradient itself, by leaf: parameters so small that this costs nothing."""

    norm_sees_all = True

    def squared_norm(self, leaves, record):
        return (sum(norms.squares(leaf) for leaf in record.values()),)

    def weighted_sum(self, leaves, record, weights):
        return jax.tree.map(lambda leaf: jnp.tensordot(weights[0], leaf, 1, precision="highest"), record)

    def gradients(self, shapes, record):
        return {name: forms.Whole(leaf) for name, leaf in record.items()}


@dataclasses.dataclass(frozen=True)
class Normalise(Formed):
    """Over the last axis, in float32 or wider; the result has the input's dtype. Of LayerNorm (`centred`) or RMSNorm; bias or none."""

    eps: float
    centred: bool = True
    name: str = "layer_norm"
    rows_per_unit: int = 1
    resting: tuple[str, ...] = ()

    def forward(self, leaves, inputs):
        x = norms.at_least_float32(inputs[0])
        if self.centred:
            x = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        normalised = x * scale
        y = normalised * leaves["scale"]
        return (y + leaves["bias"] if "bias" in leaves else y).astype(inputs[0].dtype), (normalised, scale)

    def input_cotangent(self, leaves, residuals, cotangent):
        normalised, scale = residuals
        g = norms.at_least_float32(cotangent)
        record = {"scale": self.tokens(g * normalised).sum(1)} | ({"bias": self.tokens(g).sum(1)} if "bias" in leaves else {})
        g_x = normalise_cotangent(g * leaves["scale"], normalised, scale, self.centred).astype(cotangent.dtype)
        return (g_x,), self.trained(record)


def normalise_cotangent(g: Array, normalised: Array, scale: Array, centred: bool = True) -> Array:
    """Cotangent of the input from that of the normalised value."""
    along = normalised * (g * normalised).mean(-1, keepdims=True)
    return scale * (g - g.mean(-1, keepdims=True) - along if centred else g - along)


@dataclasses.dataclass(frozen=True)
class LowRank(Formed):
    """x @ a @ b for a [p, r] and b [r, d] of a small rank: their per-example gradients are formed, p r and r d numbers."""

    name: str = "low_rank"
    rows_per_unit: int = 1
    resting: tuple[str, ...] = ()

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
    """x @ a @ b for x [B, ..., p]: beside `dense`, an adapter of its kernel (LoRA: Hu et al. 2022). Either factor may rest."""
    shapes = tuple(a.shape), tuple(b.shape)
    fits = len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][0] and x.shape[-1] == shapes[0][0]
    check((a, b), fits, f"factors{shapes}", f"are not [p, r] and [r, d] for x{x.shape}", "Give matrices that meet")
    return apply(LowRank(), {"a": a, "b": b}, (x,))


def layer_norm(x: Array, scale: Any, bias: Any, eps: float) -> Array:
    """LayerNorm; `bias` may be None."""
    return apply(Normalise(eps), {"scale": scale} | ({} if bias is None else {"bias": bias}), (x,))


def rms_norm(x: Array, scale: Any, eps: float) -> Array:
    return apply(Normalise(eps, centred=False, name="rms_norm"), {"scale": scale}, (x,))


class Tie(NamedTuple):
    """What `tied_lookup` hands on to `decode`. Nothing depends on it: that a table is both looked up and decoded is seen in the traced
    loss, and the products between both are in the norm whether it arrives or not."""

    id_BT: Any
    gathered_BMT: Any
    hidden_BMd: Any


def is_in(id: Array, table_rows: int) -> Array:
    """Which ids name a row of a table. An id that does not reads zeros and has no gradient, in every op."""
    return (id >= 0) & (id < table_rows)


@dataclasses.dataclass(frozen=True)
class Lookup(Op):
    """Rows of a table by id; an id below zero or past the table reads zeros."""

    norm_sees_all = True
    dtype: Any = F32
    name: str = "lookup"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        (id,), table = inputs, leaves["table"]
        return reading(id, table, self.dtype), id

    def input_cotangent(self, leaves, residuals, cotangent):
        V = leaves["table"].shape[0]
        g = jnp.where(is_in(residuals, V)[..., None], cotangent, 0)
        id_BT = jnp.clip(residuals, 0, V - 1).reshape(residuals.shape[0] // self.rows_per_unit, -1)
        return (None,), {"id": id_BT.astype(F32), "g": self.tokens(g)}

    def squared_norm(self, leaves, record):
        return (norms.lookup(record["id"], record["g"]),)

    def weighted_sum(self, leaves, record, weights):
        g_BTd, table = rows(weights[0], record["g"]), leaves["table"]
        start = jnp.zeros(table.shape, jnp.promote_types(table.dtype, F32))
        return {"table": start.at[record["id"].astype(jnp.int32)].add(g_BTd)}

    def gradients(self, shapes, record):
        return {"table": forms.Rows(record["id"], record["g"])}


def lookup(table: Any, id_BT: Array, dtype: Any = F32) -> Array:
    """table[ids]; the same table may be looked up again, and decoded. Ids that are not in it read zeros."""
    _check_table(table)
    return apply(Lookup(dtype=dtype), {"table": table}, (id_BT,))


def _check_table(table: Any) -> None:
    shape = tuple(table.shape)
    check(table, len(shape) == 2, f"table{shape}", "is not one row of numbers for each id", "Give a table [V, d]")
    check(table, shape[0] < 2**24, f"table{shape}", "has ids that float32 cannot tell apart", "Split the table")


def tied_lookup(table: Any, id_BT: Array, decoded: int, dtype: Any = F32) -> tuple[Array, Tie]:
    """`lookup`, and a `Tie` for `decode` of `decoded` positions, for losses that hand one on."""
    B, T = id_BT.shape[0], math.prod(id_BT.shape[1:])
    return lookup(table, id_BT, dtype), Tie(id_BT, jnp.zeros((B, decoded, T), F32), jnp.zeros((B, decoded, table.shape[-1]), F32))


@dataclasses.dataclass(frozen=True)
class Decode(Op):
    """h @ table^T (+ bias) at M positions; logits float32 or wider. The table is a part of its own: where it is looked up as well, it
    belongs with the embeddings.
    """

    norm_sees_all = True
    parts: int
    name: str = "decode"
    rows_per_unit: int = 1
    resting: tuple[str, ...] = ()

    def part(self, path: str) -> int:
        return 0 if path == "table" else 1

    def forward(self, leaves, inputs):
        (h_BMd,) = inputs
        wide = jnp.promote_types(h_BMd.dtype, F32)
        logits_BMV = jnp.einsum("bmd,vd->bmv", h_BMd, leaves["table"].astype(h_BMd.dtype), preferred_element_type=wide)
        return logits_BMV + leaves["bias"] if "bias" in leaves else logits_BMV, h_BMd

    def input_cotangent(self, leaves, residuals, cotangent):
        h_BMd = residuals
        g_BMd = jnp.einsum("bmv,vd->bmd", cotangent.astype(h_BMd.dtype), leaves["table"].astype(h_BMd.dtype))
        if self.trains("table"):
            return (g_BMd,), {"h": self.tokens(h_BMd), "g": self.tokens(cotangent)}
        is_bias = "bias" in leaves and self.trains("bias")
        return (g_BMd,), {"bias": norms.at_least_float32(self.tokens(cotangent)).sum(1)} if is_bias else {}

    def squared_norm(self, leaves, record):
        """sum_mn (h_m.h_n) (g_m.g_n) of the table, sum_mn g_m.g_n of the bias."""
        if not self.trains("table"):
            bias_B = norms.squares(record["bias"])
            return jnp.zeros_like(bias_B), bias_B
        others = [norms.at_least_float32(record["h"])] + [jnp.ones_like(record["h"][:, :, :1])] * (self.parts - 1)
        return tuple(jnp.maximum(square_B, 0) for square_B in norms.symmetric(record["g"], *others))

    def weighted_sum(self, leaves, record, weights):
        if not self.trains("table"):
            return {"bias": jnp.tensordot(weights[1], record["bias"], 1, precision="highest")}
        g_BMV = record["g"]
        summed = {"table": norms.product("bmv,bmd->dv", g_BMV, rows(weights[0], record["h"])).T}
        if self.parts == 1 or not self.trains("bias"):
            return summed
        return summed | {"bias": norms.product("bmv,bm->v", g_BMV, jnp.broadcast_to(weights[1][:, None], g_BMV.shape[:2]))}

    def gradients(self, shapes, record):
        if not self.trains("table"):
            return {"bias": forms.Whole(record["bias"])}
        found: dict[str, forms.Form] = {"table": forms.Outer(record["g"], record["h"])}
        return self.trained(found | ({"bias": forms.Whole(norms.at_least_float32(record["g"]).sum(1))} if self.parts == 2 else {}))


def decode(h_BMd: Array, table: Any, bias: Any = None, tie: Tie | None = None) -> Array:
    """Logits of M positions; the table may be one that is looked up. A `tie` may come along, and changes nothing."""
    leaves = {"table": table} | ({} if bias is None else {"bias": bias})
    return apply(Decode(len(leaves)), leaves, (h_BMd,))


@dataclasses.dataclass(frozen=True)
class AddRows(Op):
    """x + table[offset : offset + T] for x [B, ..., T, d], the same rows for every text of every example (position embedding)."""

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
    """x + table[offset : offset + T]."""
    have, wanted = tuple(table.shape), (offset + x.shape[-2], x.shape[-1])
    fits = len(have) == 2 and offset >= 0 and have[0] >= wanted[0] and have[1] == wanted[1]
    check(table, fits and x.ndim >= 3, f"table{have}", f"does not reach rows up to {wanted} for x{x.shape}", "Give x [B, ..., T, d]")
    return apply(AddRows(offset), {"table": table}, (x,))


@dataclasses.dataclass(frozen=True)
class SmallLookup(Formed):
    """Rows of a table so small that its per-example gradient is formed (token types)."""

    dtype: Any = F32
    name: str = "small_lookup"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        (id,), table = inputs, leaves["table"]
        return reading(id, table, self.dtype), id

    def input_cotangent(self, leaves, residuals, cotangent):
        # An id that is not in the table has no column here.
        is_row_BTV = jax.nn.one_hot(residuals, leaves["table"].shape[0], dtype=cotangent.dtype)
        return (None,), {"table": norms.product("btv,btd->bvd", self.tokens(is_row_BTV), self.tokens(cotangent))}


def small_lookup(table: Any, id_BT: Array, dtype: Any = F32) -> Array:
    _check_table(table)
    return apply(SmallLookup(dtype), {"table": table}, (id_BT,))


@dataclasses.dataclass(frozen=True)
class AddBias(Formed):
    """x + bias over the last axis."""

    name: str = "add_bias"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        return inputs[0] + leaves["bias"].astype(inputs[0].dtype), ()

    def input_cotangent(self, leaves, residuals, cotangent):
        return (cotangent,), {"bias": norms.at_least_float32(self.tokens(cotangent)).sum(1)}


def add_bias(x: Array, bias: Any) -> Array:
    _check_last(x, bias)
    return apply(AddBias(), {"bias": bias}, (x,))


def _check_last(x: Array, parameter: Any) -> None:
    have, reason = tuple(parameter.shape), f"is not one number for each of the last axis of x{x.shape}"
    check(parameter, have == x.shape[-1:], f"parameter{have}", reason, "Give it that shape")


@dataclasses.dataclass(frozen=True)
class Scale(Formed):
    """x * scale over the last axis."""

    name: str = "scale"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        return inputs[0] * leaves["scale"].astype(inputs[0].dtype), inputs[0]

    def input_cotangent(self, leaves, residuals, cotangent):
        per_example = norms.at_least_float32(self.tokens(cotangent)) * norms.at_least_float32(self.tokens(residuals))
        return (cotangent * leaves["scale"].astype(cotangent.dtype),), {"scale": per_example.sum(1)}


def scale(x: Array, scale: Any) -> Array:
    _check_last(x, scale)
    return apply(Scale(), {"scale": scale}, (x,))
