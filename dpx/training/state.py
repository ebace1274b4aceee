"""Declares the state that a run passes from step to step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of a run after a step.

    `params` and `noise` (the mechanism's state) are trees, `moments` is the optimiser's state, `clip` is the clip's state, an array, and
    `kept` is a tree that the mechanism keeps of the parameters at the start.

    `None` means that the mechanism or the clip has none (`Mechanism.initial_state`, `Mechanism.kept_from_start`, `Clip.initial_state`).
    """

    params: Any
    moments: Any
    clip: Any = None
    noise: Any = None
    kept: Any = None

    def in_a_new_noise_epoch(self) -> "State":
        """Returns the state with zeros as past noise.

        Correlated noise never passes from one noise epoch into another: under a fresh key it is a separate mechanism.
        """
        return dataclasses.replace(self, noise=jax.tree.map(jnp.zeros_like, self.noise))

    def saved(self) -> dict[str, Any]:
        """Returns the parts that this run has, by name."""
        return {field.name: part for field in dataclasses.fields(self) if (part := getattr(self, field.name)) is not None}


def restored(saved: dict[str, Any]) -> State:
    """Returns the state for which `State.saved` returned `saved`."""
    return State(**{field.name: saved.get(field.name) for field in dataclasses.fields(State)})
