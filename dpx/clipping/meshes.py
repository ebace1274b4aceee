"""Computes clipped sums of arrays on a mesh with Explicit axes, the default of `jax.make_mesh`.

There every operation must say how its result lies on the mesh. The programs of clipping leave that to the compiler, so they run with
these axes as Auto ones, and their results lie on the mesh as the parameters and the rows do.

U: units.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dpx.clipping.result import check_rows
from dpx.declaration import ConfigError


def summed(run: Callable[..., Any], result: type, like: Any, batch: Any, rows_per_unit: Any, *arguments: Any) -> Any:
    """Returns `run(*arguments)`: a `result`, whose `total` has the structure of `like` and whose other fields are arrays [U, ...].

    Raises `ConfigError` for a loss that closes over an array of an Explicit mesh.
    """
    mesh = next((mesh for mesh in map(_explicit_mesh, jax.tree.leaves(arguments)) if mesh is not None), None)
    if mesh is None:
        return run(*arguments)
    check_rows(rows_per_unit)
    explicit = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    total = jax.tree.map(lambda leaf: NamedSharding(mesh, _spec(leaf) or PartitionSpec()), like)
    facts = NamedSharding(mesh, _of_units(batch, rows_per_unit, mesh))
    placed = result(total, *[facts] * (len(result._fields) - 1))  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return jax.sharding.auto_axes(run, axes=explicit, out_sharding=placed)(*arguments)
    except ValueError as error:
        if "should match the aval mesh" not in str(error):
            raise
        reason, fix = "closes over an array that lies on an Explicit mesh", "Pass the array as an argument, named in shared_argnums"
        raise ConfigError("the loss", reason, fix) from error


def is_explicit(leaf: Any) -> bool:
    """Returns whether the leaf is an array that lies on a mesh with Explicit axes."""
    return _explicit_mesh(leaf) is not None


def _explicit_mesh(leaf: Any) -> Any:
    """Returns the mesh on which an array lies if it has Explicit axes, else None."""
    mesh = getattr(_sharding(leaf), "mesh", None)
    return None if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types else mesh


def _sharding(leaf: Any) -> Any:
    return getattr(jax.typeof(leaf), "sharding", None) if hasattr(leaf, "dtype") else None


def _spec(leaf: Any) -> PartitionSpec | None:
    return _sharding(leaf).spec if is_explicit(leaf) else None


def _of_units(batch: Any, rows_per_unit: int, mesh: Any) -> PartitionSpec:
    """Returns where the facts of units lie: with their rows, or on every device if the units cannot be divided among them."""
    for leaf in jax.tree.leaves(batch):
        spec = _spec(leaf)
        if spec and spec[0] is not None:
            names = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
            devices = math.prod(mesh.shape[name] for name in names)
            return PartitionSpec(spec[0]) if leaf.shape[0] // rows_per_unit % devices == 0 else PartitionSpec()
    return PartitionSpec()
