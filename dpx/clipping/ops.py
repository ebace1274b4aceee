"""The ops a model is composed of: with bare parameters ordinary jax, with wrapped ones (see probes.py) they leave records.

B: examples, T: tokens (all middle axes flattened), p: inputs, d: outputs, V: table rows, M: positions decoded.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import norms
from dpx.clipping.probes import Op, apply, session_of

F32 = jnp.float32


def tokens(x: Array) -> Array:
    """[B, ..., d] as [B, T, d]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def rows(weights_B: Array, x: Array) -> Array:
    """Each example's rows times its weight, in float32 or wider."""
    return norms.wide(x) * weights_B.reshape((-1,) + (1,) * (x.ndim - 1))


@dataclasses.dataclass(frozen=True)
class Dense(Op):
    """x @ kernel (+ bias), computed in x's dtype."""

    form: norms.Form = "gram"
    name: str = "dense"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        (x,) = inputs
        y = x @ leaves["kernel"].astype(x.dtype)
        return y + leaves["bias"].astype(x.dtype) if "bias" in leaves else y, x

    def input_cotangent(self, leaves, residuals, cotangent):
        a_BTp, g_BTd, x = self.tokens(residuals), self.tokens(cotangent), residuals
        record = {"kernel": norms.per_example(a_BTp, g_BTd)} if self.form == "kept" else {"a": a_BTp, "g": g_BTd}
        if "bias" in leaves:
            record["sum"] = norms.wide(g_BTd).sum(1)
        return (cotangent @ leaves["kernel"].astype(x.dtype).T,), record

    def squared_norm(self, leaves, record):
        bias_B = norms.squares(record["sum"]) if "sum" in record else 0.0
        if self.form == "gram":
            return (norms.gram(record["a"], record["g"]) + bias_B,)
        kernel_Bpd = record["kernel"] if self.form == "kept" else norms.per_example(record["a"], record["g"])
        return (norms.squares(kernel_Bpd) + bias_B,)

    def weighted_sum(self, leaves, record, weights):
        (w_B,) = weights
        if self.form == "kept":
            summed = {"kernel": jnp.tensordot(w_B, record["kernel"], 1, precision="highest")}
        else:
            summed = {"kernel": norms.summed(norms.wide(record["a"]), rows(w_B, record["g"]))}
        return summed | ({"bias": jnp.tensordot(w_B, record["sum"], 1, precision="highest")} if "sum" in record else {})


def dense(x: Array, kernel: Any, bias: Any = None) -> Array:
    """x @ kernel + bias for x [B, ..., p]; the norm's form follows from the shapes and the memory the session may use."""
    leaves = {"kernel": kernel} | ({} if bias is None else {"bias": bias})
    return apply(Dense(form_of(x.shape[0], tokens(x).shape[1], kernel)), leaves, (x,))


def form_of(B: int, T: int, kernel: Any) -> norms.Form:
    """The norm form of `kernel` at B examples of T tokens; a stacked kernel's answer covers all its layers."""
    session = session_of(kernel)
    if session is None:
        return "gram"
    full = session.shapes[kernel.path]
    p, d = full[-2:]
    B, T = B // session.rows_per_unit, T * session.rows_per_unit
    if norms.choose(T, p, d, True) != "kept":
        return norms.choose(T, p, d, False)
    return norms.choose(T, p, d, session.keep(kernel.path, 4 * B * math.prod(full)))


@dataclasses.dataclass(frozen=True)
class LayerNorm(Op):
    """Over the last axis, in float32 or wider; the result has the input's dtype."""

    eps: float
    name: str = "layer_norm"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        x = norms.wide(inputs[0])
        centred = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        normalised = centred * scale
        return (normalised * leaves["scale"] + leaves["bias"]).astype(inputs[0].dtype), (normalised, scale)

    def input_cotangent(self, leaves, residuals, cotangent):
        normalised, scale = residuals
        g = norms.wide(cotangent)
        record = {"scale": self.tokens(g * normalised).sum(1), "bias": self.tokens(g).sum(1)}
        return (layer_norm_cotangent(g * leaves["scale"], normalised, scale).astype(cotangent.dtype),), record

    def squared_norm(self, leaves, record):
        return (norms.squares(record["scale"]) + norms.squares(record["bias"]),)

    def weighted_sum(self, leaves, record, weights):
        return jax.tree.map(lambda leaf: jnp.tensordot(weights[0], leaf, 1, precision="highest"), record)


def layer_norm_cotangent(g: Array, normalised: Array, scale: Array) -> Array:
    """Cotangent of the input from that of the normalised value."""
    return scale * (g - g.mean(-1, keepdims=True) - normalised * (g * normalised).mean(-1, keepdims=True))


def layer_norm(x: Array, scale: Any, bias: Any, eps: float) -> Array:
    return apply(LayerNorm(eps), {"scale": scale, "bias": bias}, (x,))


class Tie(NamedTuple):
    """What ties a decoder to the embedding of the same table: the ids looked up and two zeros, through whose cotangents the
    decoder's backward pass sends its part of the cross-term 2 <grad_embedding, grad_decoder> back to the embedding's.

    The zeros are of units: every decoded position of a unit meets every id of it, whichever rows they stand in."""

    id_BT: Any
    gathered_BMT: Array
    hidden_BMd: Array


@dataclasses.dataclass(frozen=True)
class Lookup(Op):
    """Rows of a table by id; `decoded` positions of the same table's decoder are tied to it (0: untied)."""

    decoded: int = 0
    dtype: Any = F32
    name: str = "lookup"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        (id_BT,) = inputs
        x_BTd = leaves["table"][id_BT].astype(self.dtype)
        R, (B, T, d) = self.rows_per_unit, x_BTd.shape
        wide = jnp.promote_types(self.dtype, F32)
        return (x_BTd, jnp.zeros((B // R, R * self.decoded, R * T), wide), jnp.zeros((B // R, R * self.decoded, d), wide)), id_BT

    def input_cotangent(self, leaves, residuals, cotangent):
        g_BTd, gathered_BMT, hidden_BMd = cotangent
        id_BT = residuals.reshape(gathered_BMT.shape[0], -1).astype(F32)
        return (None,), {"id": id_BT, "g": self.tokens(g_BTd), "gathered": gathered_BMT, "hidden": hidden_BMd}

    def squared_norm(self, leaves, record):
        own_B = norms.lookup(record["id"], record["g"])
        return (own_B + self.cross_term(record) if self.decoded else own_B,)

    def cross_term(self, record):
        """2 sum_mt P[m, id_t] (h_m . g_t): without it a tied model is clipped too weakly, with no symptom."""
        across_BMT = norms.product("bmd,btd->bmt", record["hidden"], norms.wide(record["g"]))
        return 2 * (record["gathered"] * across_BMT).sum((1, 2))

    def weighted_sum(self, leaves, record, weights):
        g_BTd, table = rows(weights[0], record["g"]), leaves["table"]
        start = jnp.zeros(table.shape, jnp.promote_types(table.dtype, F32))
        return {"table": start.at[record["id"].astype(jnp.int32)].add(g_BTd)}


def lookup(table: Any, id_BT: Array, dtype: Any = F32) -> Array:
    """table[ids] for a table that nothing else uses."""
    return apply(Lookup(dtype=dtype), {"table": table}, (id_BT,))[0]


def tied_lookup(table: Any, id_BT: Array, decoded: int, dtype: Any = F32) -> tuple[Array, Tie]:
    """table[ids], and the tie its decoder of `decoded` positions per example needs."""
    x_BTd, gathered_BMT, hidden_BMd = apply(Lookup(decoded, dtype), {"table": table}, (id_BT,))
    return x_BTd, Tie(id_BT, gathered_BMT, hidden_BMd)


@dataclasses.dataclass(frozen=True)
class Decode(Op):
    """h @ table^T (+ bias) at M positions; logits float32 or wider. Inputs: h_BMd, and the tie of a table that is also looked up,
    or None. The table is a part of its own: where it is tied, it belongs with the embeddings.
    """

    parts: int
    name: str = "decode"
    rows_per_unit: int = 1

    def part(self, path: str) -> int:
        return 0 if path == "table" else 1

    def forward(self, leaves, inputs):
        h_BMd, tie = inputs
        wide = jnp.promote_types(h_BMd.dtype, F32)
        logits_BMV = jnp.einsum("bmd,vd->bmv", h_BMd, leaves["table"].astype(h_BMd.dtype), preferred_element_type=wide)
        return logits_BMV + leaves["bias"] if "bias" in leaves else logits_BMV, (h_BMd, tie and tie.id_BT)

    def input_cotangent(self, leaves, residuals, cotangent):
        h_BMd, id_BT = residuals
        g_BMd = jnp.einsum("bmv,vd->bmd", cotangent.astype(h_BMd.dtype), leaves["table"].astype(h_BMd.dtype))
        record = {"h": self.tokens(h_BMd), "g": self.tokens(cotangent)}
        return (g_BMd, tie_cotangent(id_BT, record["g"], norms.wide(record["h"]))), record

    def squared_norm(self, leaves, record):
        """sum_mn (h_m.h_n) (g_m.g_n) of the table, sum_mn g_m.g_n of the bias."""
        others = [norms.wide(record["h"])] + [jnp.ones_like(record["h"][:, :, :1])] * (self.parts - 1)
        return tuple(jnp.maximum(square_B, 0) for square_B in norms.symmetric(record["g"], *others))

    def weighted_sum(self, leaves, record, weights):
        g_BMV = record["g"]
        summed = {"table": norms.product("bmv,bmd->dv", g_BMV, rows(weights[0], record["h"])).T}
        if self.parts == 1:
            return summed
        return summed | {"bias": norms.product("bmv,bm->v", g_BMV, jnp.broadcast_to(weights[1][:, None], g_BMV.shape[:2]))}


def tie_cotangent(id_BT: Array | None, g_BMV: Array, h_BMd: Array) -> Tie | None:
    """What a tied decoder sends to the embedding: logit cotangents at the ids looked up, and its inputs; both of units."""
    if id_BT is None:
        return None
    return Tie(None, jnp.take_along_axis(g_BMV, id_BT.reshape(g_BMV.shape[0], 1, -1), axis=2), h_BMd)


def decode(h_BMd: Array, table: Any, bias: Any = None, tie: Tie | None = None) -> Array:
    """Logits of M positions; with the `tie` of `tied_lookup` the table may be the one looked up."""
    leaves = {"table": table} | ({} if bias is None else {"bias": bias})
    return apply(Decode(len(leaves)), leaves, (h_BMd, tie))


@dataclasses.dataclass(frozen=True)
class AddRows(Op):
    """x + table[offset : offset + T] for x [B, ..., T, d], the same rows for every text of every example (position embedding)."""

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
        return (cotangent,), cotangent if is_one else self.over_rows(norms.wide(cotangent).sum(texts))

    def squared_norm(self, leaves, record):
        return (norms.squares(record),)

    def weighted_sum(self, leaves, record, weights):
        summed_Td = norms.product("b,btd->td", weights[0], norms.wide(record))
        place = slice(self.offset, self.offset + summed_Td.shape[0])
        return {"table": jnp.zeros(leaves["table"].shape, summed_Td.dtype).at[place].set(summed_Td)}


def add_rows(x: Array, table: Any, offset: int = 0) -> Array:
    return apply(AddRows(offset), {"table": table}, (x,))


@dataclasses.dataclass(frozen=True)
class SmallLookup(Op):
    """Rows of a table so small that its per-example gradient is formed (token types)."""

    dtype: Any = F32
    name: str = "small_lookup"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        return leaves["table"][inputs[0]].astype(self.dtype), inputs[0]

    def input_cotangent(self, leaves, residuals, cotangent):
        is_row_BTV = jax.nn.one_hot(residuals, leaves["table"].shape[0], dtype=cotangent.dtype)
        return (None,), norms.product("btv,btd->bvd", self.tokens(is_row_BTV), self.tokens(cotangent))

    def squared_norm(self, leaves, record):
        return (norms.squares(record),)

    def weighted_sum(self, leaves, record, weights):
        return {"table": jnp.tensordot(weights[0], record, 1, precision="highest")}


def small_lookup(table: Any, id_BT: Array, dtype: Any = F32) -> Array:
    return apply(SmallLookup(dtype), {"table": table}, (id_BT,))


@dataclasses.dataclass(frozen=True)
class AddBias(Op):
    """x + bias over the last axis."""

    name: str = "add_bias"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        return inputs[0] + leaves["bias"].astype(inputs[0].dtype), ()

    def input_cotangent(self, leaves, residuals, cotangent):
        return (cotangent,), norms.wide(self.tokens(cotangent)).sum(1)

    def squared_norm(self, leaves, record):
        return (norms.squares(record),)

    def weighted_sum(self, leaves, record, weights):
        return {"bias": jnp.tensordot(weights[0], record, 1, precision="highest")}


def add_bias(x: Array, bias: Any) -> Array:
    return apply(AddBias(), {"bias": bias}, (x,))
