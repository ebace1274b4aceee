"""Groups rows into units: each row, or all rows of one unit, is clipped together.

The loss of a unit is the sum of its rows' losses, so its gradient is the sum of their gradients, and the norm of that sum is clipped.

B: rows, R: rows of one unit (padding among them), U = B / R: units, in the order of their rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpx.clipping.result import zero_unless
from dpx.declaration import require


def check_rows(rows: Any) -> None:
    """Raises `ConfigError` unless the value is a number of rows that a unit can have."""
    is_count = isinstance(rows, int) and not isinstance(rows, bool) and rows > 0
    require(is_count, f"rows_per_unit={rows!r}", "is not a whole number above zero", "Give the number of rows of a unit")


def flags(is_padding: Any, examples: int, name: str) -> Bool[Array, " B"]:
    """Returns a mask of padding rows, bool [B]; None means that no row is padding.

    Raises `ConfigError` unless the mask has one boolean for each row.
    """
    if is_padding is None:
        return jnp.zeros((examples,), bool)
    is_bool = hasattr(is_padding, "dtype") and is_padding.dtype == bool
    kind = getattr(is_padding, "dtype", type(is_padding).__name__)
    require(is_bool, name, f"is of type {kind}, but a mask of rows must be boolean", "Give an array of bool, True for padding")
    is_flat, reason = is_padding.shape == (examples,), f"does not have one flag for each of the {examples} rows"
    require(is_flat, f"{name}{is_padding.shape}", reason, "Give it the shape [B]")
    return jnp.asarray(is_padding)


@dataclasses.dataclass(frozen=True)
class Units:
    """The units of a batch: `rows` is the number R of rows of each unit, and `is_padding_B` marks rows that no unit's loss includes."""

    rows: int
    is_padding_B: Bool[Array, " B"]

    def __post_init__(self) -> None:
        count = self.is_padding_B.shape[0]
        reason = f"does not divide the {count} rows of a microbatch"
        require(
            count % self.rows == 0,
            f"rows_per_unit={self.rows}",
            reason,
            "Add padding rows to every unit until all have this number of rows",
        )

    @property
    def is_padding_U(self) -> Bool[Array, " U"]:
        """Returns a mask of the units without a single real row."""
        return self.is_padding_B.reshape(-1, self.rows).all(1)

    def filled(self, batch: Any) -> Any:
        """Returns `batch` with each padding row replaced by a copy of a real row.

        The copied row is of the same unit, or of any unit if its own has no real row.

        The copy's loss has weight zero. Its results are finite wherever those of the copied row are, so that zero times them is zero.
        """
        if self.rows == 1:
            return batch
        is_padding_UR = self.is_padding_B.reshape(-1, self.rows)
        own_UR = jnp.arange(is_padding_UR.size).reshape(is_padding_UR.shape)
        first_U = jnp.where(self.is_padding_U, jnp.argmin(self.is_padding_B), own_UR[:, 0] + jnp.argmin(is_padding_UR, axis=1))
        source_B = jnp.where(is_padding_UR, first_U[:, None], own_UR).reshape(-1)
        return jax.tree.map(lambda leaf: leaf[source_B], batch)

    def summed(self, values: Any) -> Any:
        """Returns leaves [B, ...] as [U, ...]: sums over the real rows of each unit."""
        real = zero_unless(~self.is_padding_B, values)
        if self.rows == 1:
            return real
        return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] // self.rows, self.rows, *leaf.shape[1:]).sum(1), real)

    def of_rows(self, values_U: Float[Array, " U"]) -> Float[Array, " B"]:
        """Returns each unit's value for every one of its rows, [B]; zero for padding rows."""
        return jnp.where(self.is_padding_B, 0, jnp.repeat(values_U, self.rows))
