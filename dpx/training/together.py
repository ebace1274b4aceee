"""The operations on a run's state that all processes of a job compute at once. Process 0 calls them; they tell the others to do the same.

A key never leaves a process: a command names the secret by its noise epoch and tag, and every process derives the key from the secret's
file, which lies on the disk that they share and only its owner can read.

The devices of several processes are connected before a run needs them. Gloo lets the members of a group of devices wait 30 seconds for each
other, the first time that they exchange something; under load, one process may compile so much longer than another. So small programs, one
for each group, are compiled, all processes wait for each other, and then all groups connect at once.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpx.clipping.readers import merged
from dpx.files import weights
from dpx.files.orbax_checkpoints import State, export
from dpx.files.weights import FROZEN
from dpx.models.trainable import whole as models_own
from dpx.privacy.lines import NoiseEpoch
from dpx.processes import team
from dpx.processes.team import Team
from dpx.randomness import RootSecret
from dpx.training import frozen
from dpx.training.evaluation import HeldOut
from dpx.training.step import Step

# Which parameters are evaluated: those of the state, or of a model that `init` made only to be measured.
STATE, UNTRAINED = "state", "untrained"


def init(step: Step, secret: RootSecret, noise_epoch: NoiseEpoch, purpose: str, start: Any = None) -> State:
    """Draws a state with the key of `purpose`; `start` holds parameters that are not drawn (`dpx.init`)."""
    team().tell("init", **named(secret, noise_epoch), purpose=purpose, start=_shapes(start))
    return initial(step, secret, purpose, start)


def initial(step: Step, secret: RootSecret, purpose: str, start: Any) -> State:
    """Does what `init` tells; process 0 sends the arrays of `start`."""
    return step.init(secret.key(purpose), _from_owner(start))


def in_a_new_noise_epoch(state: State) -> State:
    """Returns the state with zeros as past noise (`State.in_a_new_noise_epoch`)."""
    team().tell("new_noise_epoch")
    return state.in_a_new_noise_epoch()


def keep_frozen(private: Path, step: Step, secret: RootSecret, noise_epoch: NoiseEpoch, start: Any = None) -> Any:
    """Writes the frozen parameters of a new run unless they were written before; returns them as `place_frozen` does."""
    if step.has_frozen and not (private / FROZEN).exists():
        team().tell("write_frozen", **named(secret, noise_epoch), start=_shapes(start))
        write_frozen(private, step, secret, start)
    return place_frozen(private, step)


def write_frozen(private: Path, step: Step, secret: RootSecret, start: Any) -> None:
    """Does what `keep_frozen` tells: draws the frozen parameters with the key of the first state and writes them."""
    params = step.draw_frozen(secret.key("init"), _from_owner(start))
    export(private / FROZEN, params, weights.facts(on_hosts(params), ()))


def place_frozen(private: Path, step: Step) -> Any:
    """Returns the frozen parameters on the devices, in their compute type; empty if all are trained."""
    if step.has_frozen:
        team().tell("place_frozen")
    return frozen.placed(private, step)


def evaluate(which: str, heldout: HeldOut, params: Any, split: str = "heldout") -> dict[str, float]:
    """Returns the metrics of `params`, which are those of `which` state, on the rows of a split."""
    team().tell("evaluate", which=which, split=split)
    return heldout(params)


def write_weights(directory: Path, state: State, step: Step, private: Path, facts: Any) -> None:
    """Writes the model's parameters to `directory`, with the facts that `facts(parameters on the host, trained paths)` returns."""
    team().tell("gather")
    params, told = gathered(state, step, private)
    found = facts(params, told)
    team().tell("export", directory=str(directory), facts=found)
    export(directory, params, found)


def gathered(state: State, step: Step, private: Path) -> tuple[Any, list[str]]:
    """Does what `write_weights` tells first: returns the model's parameters on the host, and the paths of the trained ones."""
    own = {name: leaf for name, leaf in on_hosts(state.params).items() if name != frozen.CANARIES}
    params = models_own(merged(own, frozen.loaded(private))) if step.has_frozen else own
    return params, list(weights.by_path(own))


def whole(params: Any) -> Any:
    """Returns the trained and the frozen parameters for work that process 0 does alone: on its host if there are several."""
    team().tell("gather_whole")
    return on_hosts(params)


def on_hosts(tree: Any) -> Any:
    """Returns the leaves of `tree` as they are for one process, and whole, as NumPy arrays on every host, for several."""
    if team().is_alone:
        return tree
    return multihost_utils.process_allgather(tree, tiled=True)


def on_devices(params: Any, frozen_params: Any) -> Any:
    """Returns the trained and the frozen parameters, in the form that the model takes, without an audit's canaries."""
    return {name: leaf for name, leaf in merged(params, frozen_params).items() if name != frozen.CANARIES}


def named(secret: RootSecret, noise_epoch: NoiseEpoch) -> dict[str, Any]:
    """Returns what names a secret in a command, and reveals nothing else of it."""
    return {"epoch": noise_epoch.number, "tag": secret.tag}


def zeros(shapes: Mapping[str, Any] | None) -> Any:
    """Returns arrays of the shapes that a command names, which `initial` replaces by those of process 0."""
    if shapes is None:
        return None
    return weights.nested({path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()})


def _shapes(start: Any) -> dict[str, Any] | None:
    if start is None or team().is_alone:
        return None
    return {path: (list(leaf.shape), str(leaf.dtype)) for path, leaf in weights.by_path(start).items()}


def _from_owner(start: Any) -> Any:
    """Returns the arrays that process 0 has as `start`; in other processes they have the same shapes."""
    if start is None or team().is_alone:
        return start
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(start))


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
    programs = []
    for one in (mesh, of_processes):
        wide = [name for name, size in one.shape.items() if size > 1]
        programs += [_joined(one, axes) for count in range(1, len(wide) + 1) for axes in itertools.combinations(wide, count)]
    team.meet_within(SECONDS if deadline_s is None else deadline_s)
    for program in programs:
        jax.block_until_ready(program())


def _joined(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> Any:
    """Returns a compiled program without arguments in which the devices along `axes` exchange a number."""

    # A constant would be summed by the compiler.
    def summed() -> jax.Array:
        return jax.lax.psum(jax.lax.axis_index(axes), axes)

    spec = jax.sharding.PartitionSpec()
    program = jax.shard_map(summed, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False)
    return jax.jit(program, out_shardings=jax.sharding.NamedSharding(mesh, spec)).lower().compile()
