"""Checkpoints through Orbax, asynchronous; the only file that names Orbax.

A checkpoint counts only after its atomic commit. It holds a run's `State`; the sampler and independent noise have no state of their own,
being functions of (root secret, step).
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from dpx.declaration import ConfigError, require
from dpx.init.weights import by_path, checksums, facts_beside
from dpx.training.state import State, restored


@contextlib.contextmanager
def _storage_faults(directory: Path) -> Iterator[None]:
    """A full disk is the user's to mend, so it reads as one line; earlier checkpoints and the ledger stay whole."""
    try:
        yield
    except Exception as fault:
        text = f"{fault} {fault.__cause__ or ''}"
        if "No space left" in text or "RESOURCE_EXHAUSTED" in text or getattr(fault, "errno", None) == 28:
            raise ConfigError(
                directory,
                "the disk is full, the checkpoint was not written",
                "Free space and run the same command: it goes on from the last one",
            ) from fault
        raise


class Checkpoints:
    """The checkpoints of one run, under `private/checkpoints/<steps done>`."""

    def __init__(self, directory: Path, kept: int):
        self.directory = directory.absolute()
        policy: Any = ocp.training.preservation_policies.LatestN(kept)
        self._checkpointer = ocp.training.Checkpointer(str(self.directory), cleanup_tmp_directories=True, preservation_policy=policy)
        self._pending: Any = None

    @property
    def latest(self) -> int | None:
        """Steps done at the newest committed checkpoint."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    @property
    def steps(self) -> list[int]:
        """Steps done at every committed checkpoint, oldest first."""
        return [one.step for one in self._checkpointer.checkpoints]

    def save(self, steps_done: int, state: State, facts: dict[str, Any]) -> None:
        """Starts saving `state` with `facts` (JSON) beside it; waits first for the save before it. Raises `ConfigError` on a full disk."""
        self.wait()
        with _storage_faults(self.directory):
            self._pending = self._checkpointer.save_async(steps_done, state.saved(), force=True, overwrite=True, custom_metadata=facts)

    def facts(self, steps_done: int) -> dict[str, Any]:
        """What was saved beside the state after `steps_done` steps; empty for a checkpoint from before there were such facts."""
        noted = self._checkpointer.metadata(steps_done).custom_metadata
        return noted if isinstance(noted, dict) else {}

    def wait(self) -> None:
        """Returns when the last save is committed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with _storage_faults(self.directory):
                pending.result()

    def load(self, steps_done: int, like: State) -> State:
        """The state saved after `steps_done` steps, laid out as `like` (of arrays or ShapeDtypeStructs with shardings)."""
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like.saved())
        try:
            return restored(self._checkpointer.load(steps_done, abstract))
        except Exception as fault:
            where = self.directory / str(steps_done)
            raise ConfigError(
                where, "this checkpoint is cut short or damaged", "Move it away and run the same command: it goes on from the one before"
            ) from fault

    def parts(self, steps_done: int) -> set[str]:
        """The names under which parts of the state were saved after `steps_done` steps (the keys of `State.saved`)."""
        return set(self._checkpointer.metadata(steps_done).metadata)

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


def export(directory: Path, params: Any, facts: dict[str, Any]) -> None:
    """Writes parameters alone, for `release/`, with `facts` (JSON) beside them; replaces what an earlier run of the same command left."""
    with _storage_faults(directory):
        shutil.rmtree(directory, ignore_errors=True)
        ocp.save(str(directory.absolute()), params, custom_metadata=facts)


def released(directory: Path) -> Any:
    """The parameters that `export` wrote, on this process's devices. Raises `ConfigError` where they are cut short, or are not those whose
    checksums were written beside them."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = shapes_on_disk(directory)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
    try:
        params = ocp.load(str(directory.absolute()), abstract)
    except Exception as fault:
        raise _unreadable(directory) from fault
    known = facts_beside(directory).get("weights")
    are_known = known is None or known == checksums(by_path(params))
    require(are_known, directory, "holds other weights than were released there", "Restore the folder")
    return params


def shapes_on_disk(directory: Path, part: str | None = None) -> Any:
    """Leaves with `shape` and `dtype` of a tree that `export` wrote, or that `Checkpoints.save` wrote as `part` of its state. Raises
    `ConfigError` where it is cut short."""
    try:
        shapes = ocp.metadata(str(directory.absolute())).metadata
        return shapes if part is None else shapes[part]
    except Exception as fault:
        raise _unreadable(directory) from fault


def on_host(directory: Path, part: str | None = None) -> Any:
    """The tree of `shapes_on_disk` as NumPy arrays. Raises `ConfigError` where it is cut short."""
    shapes = shapes_on_disk(directory, part)
    like = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    context: Any = ocp.Context()
    context.pytree.loading.partial_load = part is not None
    try:
        with context:
            tree = ocp.load(str(directory.absolute()), like if part is None else {part: like})
        return tree if part is None else tree[part]
    except Exception as fault:
        raise _unreadable(directory) from fault


def _unreadable(directory: Path) -> ConfigError:
    return ConfigError(directory, "these weights are cut short or damaged", "Restore the folder, or name other weights")
