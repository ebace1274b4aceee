"""Adds Dirac canaries to an objective: one more parameter, in which each canary has its own coordinate.

No row of the data touches that parameter and no canary touches the others, so canaries cost no accuracy; their gradients go through
the run's own clipping, accumulation, reduction, noise and divisor. The parameter moves by the released gradients alone (rate 1,
`dpx.training.update`): after a run it is minus their sum, each canary's inner product with everything released.

Shape legend: B rows, M canaries, R rows and W columns of the table they lie in (R * W >= M).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping.ops import lookup
from dpx.config.declared_audit import Canaries

# The parameter of an audit's gradient canaries (`dpx.audit.canary_objective`), in addition to the model's parameters.
CANARIES = "canaries"

WIDTH = 100
# Every canary is this many times longer than the clipping norm, so an unclipped one shows.
LENGTH = 10.0


@dataclasses.dataclass(frozen=True)
class Audited:
    """An objective with Dirac canaries.

    `inner` is the model's objective (or nothing beside the canaries); the gradient of each of `canaries` canaries has norm `length`. Rows
    have the field `canary`: its number, or -1 for a row of the data. A canary's loss is 0, with that gradient, and no metric counts it.
    `counts` names what a step counts if there is no `inner`.
    """

    inner: Any
    canaries: int
    length: float
    counts: tuple[str, ...] = ()

    def init(self, key: Any) -> dict[str, Any]:
        table_RW = jnp.zeros((max(1, -(-self.canaries // WIDTH)), WIDTH))
        return ({} if self.inner is None else dict(self.inner.init(key))) | {CANARIES: {"table": table_RW}}

    def batch(self, key: Any, rows: dict[str, Any]) -> dict[str, Any]:
        own, rest = {"canary": jnp.asarray(rows["canary"])}, without(rows, "canary")
        return own if self.inner is None else self.inner.batch(key, rest) | own

    def losses(self, params: Any, batch: dict[str, Any], dropout_key: Any = None) -> tuple[Array, dict[str, Array]]:
        canary_B = batch["canary"]
        losses_B = jnp.zeros(len(canary_B))
        counts = dict.fromkeys(self.counts, losses_B)
        if self.inner is not None:
            losses_B, counts = self.inner.losses(without(params, CANARIES), without(batch, "canary"), dropout_key)
        is_canary_B = canary_B >= 0
        row_BW = lookup(params[CANARIES]["table"], jnp.maximum(canary_B, 0)[:, None] // WIDTH)[:, 0]
        is_own_BW = is_canary_B[:, None] & (jnp.arange(WIDTH) == canary_B[:, None] % WIDTH)
        own_B = self.length * jnp.sum(jnp.where(is_own_BW, row_BW, 0), axis=1)
        losses_B = jnp.where(is_canary_B, own_B - jax.lax.stop_gradient(own_B), losses_B)
        return losses_B, {name: jnp.where(is_canary_B, 0, value) for name, value in counts.items()}


def audited(objective: Any, audit: Any, clipping_norm: float) -> Any:
    """Returns `objective` with the gradient canaries that `audit` declares, or unchanged without canaries."""
    return Audited(objective, audit.gradients, LENGTH * clipping_norm) if isinstance(audit, Canaries) else objective


def without(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the dict without the entry `name`."""
    return {key: value for key, value in tree.items() if key != name}
