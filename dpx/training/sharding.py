"""Where arrays live: parameters at rest over `fsdp`, accumulators and microbatches over `data` and `fsdp`."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# The axes that split examples.
EXAMPLE_AXES = ("data", "fsdp")


def parameter_spec(shape: tuple[int, ...], fsdp: int) -> P:
    """Last axis over `fsdp` where it divides, else replicated.

    Never the first axis of a table: 30,522 words have few divisors, and noise slices are cut along rows.
    """
    if fsdp > 1 and shape and shape[-1] % fsdp == 0:
        return P(*([None] * (len(shape) - 1)), "fsdp")
    return P()


def parameter_specs(params: Any, mesh: Mesh) -> Any:
    """A tree of `PartitionSpec` for parameters, or for any tree with leaves of their shapes (Adam's moments)."""
    return jax.tree.map(lambda leaf: parameter_spec(leaf.shape, mesh.shape["fsdp"]), params)


def at_rest(tree: Any, mesh: Mesh) -> Any:
    """A tree of `NamedSharding`, parameters' own layout."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, parameter_spec(leaf.shape, mesh.shape["fsdp"])), tree)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def microbatches(mesh: Mesh) -> NamedSharding:
    """Rows [microbatch, example, ...] split by example."""
    return NamedSharding(mesh, P(None, EXAMPLE_AXES))
