"""Connects the devices of several processes before a run needs them.

Gloo lets the members of a group of devices wait 30 seconds for each other, the first time that they exchange something; under load, one
process may compile so much longer than another. So small programs, one for each group, are compiled, all processes wait for each other, and
then all groups connect at once.
"""

import itertools
from typing import Any

import jax
import numpy as np

from dpx.processes.team import Team

# Used where `mesh.deadline_s` sets no limit.
SECONDS = 600.0


def connect(team: Team, mesh: jax.sharding.Mesh, deadline_s: float | None) -> None:
    """Connects the devices along every set of axes of `mesh`, and those of all processes; nothing in one process.

    Raises `dpx.processes.team.PeerLost` if a process is not ready after `deadline_s` seconds, by default 600.
    """
    if team.is_alone:
        return
    # As `jax.experimental.multihost_utils` lays out what it gathers.
    of_processes = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(team.count, -1), ("process", "device"))
    programs = [_joined(one, axes) for one in (mesh, of_processes) for axes in _sets(one)]
    team.meet_within(SECONDS if deadline_s is None else deadline_s)
    for program in programs:
        jax.block_until_ready(program())


def _sets(mesh: jax.sharding.Mesh) -> list[tuple[str, ...]]:
    wide = [name for name, size in mesh.shape.items() if size > 1]
    return [axes for count in range(1, len(wide) + 1) for axes in itertools.combinations(wide, count)]


def _joined(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> Any:
    """Returns a compiled program without arguments in which the devices along `axes` exchange a number."""

    # A constant would be summed by the compiler.
    def summed() -> jax.Array:
        return jax.lax.psum(jax.lax.axis_index(axes), axes)

    spec = jax.sharding.PartitionSpec()
    program = jax.shard_map(summed, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False)
    return jax.jit(program, out_shardings=jax.sharding.NamedSharding(mesh, spec)).lower().compile()
