"""Defines ops on a table [V, d]: rows are looked up by id, decoded with, or added by position.

B: examples, T: tokens (all middle axes flattened), d: outputs, V: table rows, M: positions decoded.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import bounds, forms, norms
from dpx.clipping.norms import rows
from dpx.clipping.op import ByRow, Formed, Op
from dpx.clipping.probes import apply, check

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
