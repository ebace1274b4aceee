"""What a run carries from step to step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """`params` and `noise` (what the mechanism carries) are trees, `moments` is optax's state, `clip` what the clip carries: an array.

    `None` stands for a mechanism or a clip without a memory (`Mechanism.initial_state`, `Clip.initial_state`).
    """

    params: Any
    moments: Any
    clip: Any = None
    noise: Any = None

    def in_a_new_epoch(self) -> "State":
        """Correlated noise never reaches from one noise epoch into another: under a fresh key it is a mechanism of its own."""
        return dataclasses.replace(self, noise=jax.tree.map(jnp.zeros_like, self.noise))

    def saved(self) -> dict[str, Any]:
        """The parts that this run has, by name."""
        return {field.name: part for field in dataclasses.fields(self) if (part := getattr(self, field.name)) is not None}


def restored(saved: dict[str, Any]) -> State:
    """The state whose `saved` this is."""
    return State(**{field.name: saved.get(field.name) for field in dataclasses.fields(State)})
