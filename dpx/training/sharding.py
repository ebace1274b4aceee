"""Lays out parameters on devices: stored between steps, in the microbatch computation, and back as reduced sums.

When stored, every leaf is split over `tensor` and `fsdp` along its last axis, never along the first axis of a table: 30,522 words have
few divisors, and noise slices are cut along rows. While microbatches are summed, `fsdp` holds examples and every leaf is whole
there; a layer's weights stay split over `tensor`, by output or, after weights split by output, by input (Shoeybi et al. 2019), and the
compiler's work within a layer follows from that. Every other leaf is then whole on each device of `tensor`, and counts once.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from dpx.randomness import path_name

# The axes that split examples.
EXAMPLE_AXES = ("data", "fsdp")
STACKED = "layers/"
# Weights of a layer whose input is already split by the weights before them: they are split by input.
READERS = ("attention_out", "down")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of one parameter on the devices.

    `shards` split its last axis when stored; `tensor_axis` is the axis split over `tensor` in computation, or None.
    """

    ndim: int
    shards: tuple[str, ...]
    tensor_axis: int | None

    @property
    def storage(self) -> P:
        """Returns the layout between steps."""
        return P(*[None] * (self.ndim - 1), self.shards) if self.shards else P()

    @property
    def compute(self) -> P:
        """Returns the layout while microbatches are summed."""
        return P() if self.tensor_axis is None else P(*["tensor" if axis == self.tensor_axis else None for axis in range(self.ndim)])

    @property
    def summed(self) -> P:
        """Returns the layout of the sums that each device keeps for itself, [D, ...]."""
        return P(EXAMPLE_AXES, *self.compute)

    def gather(self, leaf: Array, dtype: Any) -> Array:
        """Returns the part that this device computes with, in `dtype`, from the part that it stores."""
        leaf, last = leaf.astype(dtype), self.ndim - 1
        if "fsdp" in self.shards:
            leaf = jax.lax.all_gather(leaf, "fsdp", axis=last, tiled=True)
        if "tensor" not in self.shards or self.tensor_axis == last:
            return leaf
        if self.tensor_axis is None:
            return jax.lax.all_gather(leaf, "tensor", axis=last, tiled=True)
        return jax.lax.all_to_all(leaf, "tensor", split_axis=self.tensor_axis, concat_axis=last, tiled=True)

    def reduce(self, total: Array) -> Array:
        """Returns this device's stored part of the sum over all examples, from its own sum.

        It is the reverse of `gather`, and counts each number once.
        """
        last = self.ndim - 1
        if "tensor" in self.shards and self.tensor_axis is None:
            # The devices of `tensor` hold equal sums: each keeps its own part and none are added.
            own = total.shape[last] // jax.lax.axis_size("tensor")
            total = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index("tensor") * own, own, axis=last)
        elif "tensor" in self.shards and self.tensor_axis != last:
            total = jax.lax.all_to_all(total, "tensor", split_axis=last, concat_axis=self.tensor_axis, tiled=True)
        if "fsdp" not in self.shards:
            return jax.lax.psum(total, EXAMPLE_AXES)
        return jax.lax.psum(jax.lax.psum_scatter(total, "fsdp", scatter_dimension=last, tiled=True), "data")


def layout(path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> Layout:
    """Returns the layout of a parameter; it stays whole over axes whose size does not divide it."""
    wanted = tuple(axis for axis in ("tensor", "fsdp") if mesh.shape[axis] > 1)
    divides = lambda axes: shape and shape[-1] % math.prod(mesh.shape[axis] for axis in axes) == 0  # noqa: E731
    shards = next((axes for axes in (wanted, ("fsdp",) if "fsdp" in wanted else ()) if divides(axes)), ())
    if "tensor" not in shards or not path.startswith(STACKED) or len(shape) <= 2:
        return Layout(len(shape), shards, None)
    # A matrix is split by output, or by input if its input is already split.
    names = path.split("/")
    reads = names[-2] in READERS
    axis = len(shape) - (2 if reads else 1)
    # One of an adapter's two factors is split like its target and the other is whole: the rank between them is never split.
    is_whole = "lora" in names and (names[-1] == "a") != reads
    return Layout(len(shape), shards, None if is_whole or shape[axis] % mesh.shape["tensor"] else axis)


def layouts(params: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns a tree of `Layout` like `params`, or like any tree with leaves of their shapes (Adam's moments)."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: layout(path_name(path), leaf.shape, mesh), params)


def storage_shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns a tree of `NamedSharding`, the layout in which parameters are stored."""
    return jax.tree.map(lambda of_leaf: NamedSharding(mesh, of_leaf.storage), layouts(tree, mesh))
