"""What a run carries from step to step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Under these names checkpoints hold the parts of a state; one that a run does not have is not there.
SAVED_AS = {"params": "params", "moments": "moments", "clip": "clipping_norm", "noise": "past_noise"}


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
        """The parts that this run has, by their names in a checkpoint."""
        parts = {name: getattr(self, field) for field, name in SAVED_AS.items()}
        return {name: part for name, part in parts.items() if part is not None}


def restored(saved: dict[str, Any]) -> State:
    """The state whose `saved` this is."""
    return State(**{field: saved.get(name) for field, name in SAVED_AS.items()})
