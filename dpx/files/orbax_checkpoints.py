"""Saves and loads checkpoints through Orbax, asynchronously; no other file imports Orbax.

A checkpoint is valid only after its atomic commit, and is loaded only if it holds the values that were saved. It holds the `State` that a
run passes from step to step; the sampler and independent noise have no state: they are functions of (root secret, step).
"""

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from dpx import durable
from dpx.declaration import ConfigError, require
from dpx.durable import make_folder, narrow, put_in_place, write_durably
from dpx.files.array_checksums import checksums
from dpx.files.weights import DAMAGED, by_path, facts_beside, facts_of_checkpoint, sealed
from dpx.files.weights import checksums as weight_checksums
from dpx.processes import team
from dpx.processes.team import tells_of_a_loss


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


# In each checkpoint: the checksums of its files. They are compared first, since reading damaged files has no defined result.
FILES = "files.json"
# Among the facts of a checkpoint: the checksum of each part of its state.
VALUES = "values"
# Error numbers of the operating system for a full disk or quota, and for a file that may not grow further.
_OF_A_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NUMBER_IN_TEXT = re.compile(r"os_error_code='(\d+)'")
# Text in faults that are not caused by the file: they need other permissions, more memory or more open files.
_OF_THE_MACHINE = ("RESOURCE_EXHAUSTED", "MemoryError", "PERMISSION_DENIED", "PermissionError", "Too many open files")
_COMMITTED = "commit_success.txt"


@contextlib.contextmanager
def _storage_faults(directory: Path) -> Iterator[None]:
    """Reports a full disk as a one-line error, since the user must free space; earlier checkpoints and the ledger stay undamaged.

    A full disk is identified by the operating system's error number, which TensorStore writes into the text of its faults. The status of
    such a fault, RESOURCE_EXHAUSTED, is also that of a device without free memory.
    """
    try:
        yield
    except Exception as fault:
        chain: list[BaseException] = []
        cause: BaseException | None = fault
        while cause is not None and cause not in chain:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        of_system = {link.errno for link in chain if isinstance(link, OSError)}
        of_system |= {int(number) for link in chain for number in _NUMBER_IN_TEXT.findall(str(link))}
        if of_system & _OF_A_FULL_DISK:
            raise ConfigError(
                directory,
                "the disk is full, so the checkpoint was not written",
                "Free space and run the same command: it resumes from the last checkpoint",
            ) from fault
        if numbers := _NUMBER_IN_TEXT.findall(str(fault)):
            # What Orbax was told by the operating system is told as such.
            raise OSError(int(numbers[0]), os.strerror(int(numbers[0])), str(directory)) from fault
        raise


class Damaged(ConfigError):
    """A checkpoint that is incomplete, or does not hold the values that were saved."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A verified checkpoint: steps done, the state after them, and the facts that were saved with it."""

    steps_done: int
    state: State
    facts: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, under `private/checkpoints/<steps done>`.

    Facts (JSON) are saved with each state: those of the caller, a checksum of each part of the state, and a checksum of these facts.
    """

    def __init__(self, directory: Path, kept: int):
        self.directory = directory.absolute()
        self._kept = kept
        self._pending: Any = None
        self._saver = ThreadPoolExecutor(1, "checkpoint")

    @functools.cached_property
    def _checkpointer(self) -> Any:
        # The first save creates it: Orbax reads every checkpoint that it finds, and damaged ones are moved away before.
        make_folder(self.directory)
        policy: Any = ocp.training.preservation_policies.LatestN(self._kept)
        return ocp.training.Checkpointer(str(self.directory), cleanup_tmp_directories=True, preservation_policy=policy)

    @property
    def steps(self) -> list[int]:
        """Returns the number of steps done at every committed checkpoint, oldest first."""
        return sorted(int(path.name) for path in self.directory.glob("[0-9]*") if path.name.isdigit())

    def save(self, steps_done: int, state: State, facts: dict[str, Any]) -> None:
        """Starts saving `state` and `facts` (JSON), after the previous save has ended. Raises `ConfigError` on a full disk.

        Every process writes its shards, process 0 the rest.
        """
        self.wait()
        if team().is_owner:
            team().tell("save", directory=str(self.directory), steps_done=steps_done, facts=facts)
        saved = state.saved()
        facts = sealed(facts | {VALUES: checksums(saved)})
        with _storage_faults(self.directory):
            response = self._checkpointer.save_async(steps_done, saved, force=True, overwrite=True, custom_metadata=facts)
            place = self.directory / str(steps_done)
            self._pending = self._saver.submit(_note_files, response, place) if team().is_owner else self._saver.submit(response.result)
            self._pending.add_done_callback(self._note_fault)

    def wait(self) -> None:
        """Waits until the last save is committed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            if team().is_owner:
                team().tell("wait", directory=str(self.directory))
            with _storage_faults(self.directory):
                pending.result()

    def _note_fault(self, ended: Future[Any]) -> None:
        """Lets the other processes know of a save that failed before they would wait for this process to commit its part."""
        if (fault := ended.exception()) is not None and not tells_of_a_loss(fault):
            reason = (str(fault) or type(fault).__name__).splitlines()[0][:200]
            team().note_storage_fault(f"could not save its part of a checkpoint in {self.directory} ({reason})")

    def newest_whole(self, like: State) -> tuple[Saved | None, list[int]]:
        """Returns the newest undamaged checkpoint, and the steps of the damaged ones that are newer.

        The checkpoint is `None` if all are damaged or missing.
        """
        damaged = []
        for steps_done in reversed(self.steps):
            try:
                return self.load(steps_done, like), damaged
            except Damaged:
                damaged.append(steps_done)
        return None, damaged

    def load(self, steps_done: int, like: State) -> Saved:
        """Returns the checkpoint after `steps_done` steps, its state laid out as `like` (of arrays or ShapeDtypeStructs with shardings).

        Raises `Damaged` if it is incomplete or does not hold the values that were saved; another `ConfigError` if it is complete but its
        structure differs.
        """
        place = self.directory / str(steps_done)
        facts = _facts(place)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like.saved())
        # Files that are unchanged since they were written cannot be the cause.
        unlike = ConfigError(
            place,
            "does not contain a state with the structure that this run needs",
            "Use the version of dpx and the optimizer.arguments that wrote it",
        )
        team().tell("load", directory=str(self.directory), steps_done=steps_done)
        fault = None
        with _reading(place, unlike if (place / FILES).exists() else _damaged(place)):
            try:
                saved: Any = ocp.load(str(place), abstract)
            except Exception as error:
                fault = error
            is_whole = all(team().gather(fault is None))
            if fault is not None:
                raise fault
        require(is_whole, place, "could not be read by every process", "Check that all processes share one disk")
        _require_saved(place, saved, facts)
        return Saved(steps_done, restored(saved), facts)

    def loaded_together(self, steps_done: int, like: State) -> State | None:
        """Takes part in `load` as a process that is not process 0, which decides; returns the state, `None` if it cannot be read."""
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like.saved())
        try:
            saved: Any = ocp.load(str(self.directory / str(steps_done)), abstract)
        except Exception:
            saved = None
        if not all(team().gather(saved is not None)) or saved is None:
            return None
        checksums(saved)
        return restored(saved)

    def parts(self, steps_done: int) -> set[str]:
        """Returns the names under which parts of the state were saved after `steps_done` steps (the keys of `State.saved`)."""
        place = self.directory / str(steps_done)
        return set(_facts(place, compares_files=False)[VALUES])

    def set_aside(self, steps_done: int) -> Path:
        """Renames a damaged checkpoint so that it is not used as a checkpoint and not deleted; returns its new path."""
        aside = self.directory / f"{DAMAGED}{steps_done}"
        for number in itertools.count(2):
            if not aside.exists():
                break
            aside = aside.with_name(f"{DAMAGED}{steps_done}-{number}")
        put_in_place(self.directory / str(steps_done), aside)
        return aside

    def close(self) -> None:
        """Waits for the last save and closes Orbax's manager."""
        try:
            self.wait()
        finally:
            self._saver.shutdown()
            if "_checkpointer" in vars(self):
                self._checkpointer.close()


def _note_files(response: Any, checkpoint: Path) -> None:
    """Waits until a checkpoint is committed, withholds it from others as its folder is, and writes the checksums of its files into it."""
    response.result()
    narrow(checkpoint)
    files = durable.of_folder(checkpoint, without=FILES)
    write_durably(checkpoint / FILES, json.dumps(sealed({"files": files})))


def _facts(checkpoint: Path, compares_files: bool = True) -> dict[str, Any]:
    """Returns the facts saved with a state.

    Raises `Damaged` if they, or any file of the checkpoint, have changed since they were written.

    A process that was killed between the commit and `_note_files` leaves a checkpoint of which only the values can be verified.
    """
    facts = facts_of_checkpoint(checkpoint)
    if facts is None or not isinstance(facts.get(VALUES), dict):
        raise _damaged(checkpoint)
    if compares_files and (checkpoint / FILES).exists():
        with _reading(checkpoint, _damaged(checkpoint)):
            known = json.loads((checkpoint / FILES).read_text())
            if known != sealed({"files": durable.of_folder(checkpoint, without=FILES)}):
                raise _damaged(checkpoint)
    return facts


def _require_saved(checkpoint: Path, saved: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raises `Damaged` if these parts of a state do not have the checksums that were saved with them."""
    known = facts[VALUES]
    if checksums(saved) != {name: known.get(name) for name in saved}:
        raise _damaged(checkpoint)


def _damaged(checkpoint: Path) -> Damaged:
    others = sorted(int(path.name) for path in checkpoint.parent.glob("[0-9]*") if path.name.isdigit() and path != checkpoint)
    fix = f"Use one of {others}" if others else "Restore it"
    return Damaged(checkpoint, "this checkpoint is damaged", fix)


@contextlib.contextmanager
def _reading(place: Path, otherwise: ConfigError) -> Iterator[None]:
    """Raises `otherwise` if a file cannot be read as what it should hold, and another `ConfigError` if the machine is the cause."""
    try:
        yield
    except Exception as fault:
        text = f"{type(fault).__name__} {fault} {fault.__cause__ or ''}"
        of_the_machine = next((word for word in _OF_THE_MACHINE if word in text), None)
        if of_the_machine is not None:
            raise ConfigError(place, f"could not be read ({of_the_machine})", "Correct this and run the same command") from fault
        raise otherwise from fault


def export(directory: Path, params: Any, facts: dict[str, Any]) -> None:
    """Writes parameters alone, together with `facts` (JSON; `dpx.files.weights.facts` and more); replaces earlier content."""
    with _storage_faults(directory):
        if team().is_owner:
            shutil.rmtree(directory, ignore_errors=True)
        team().gather(True)
        ocp.save(str(directory.absolute()), params, custom_metadata=facts)
        if team().is_owner and (directory / _COMMITTED).is_file():
            # Orbax only checks that this file exists, but writes the folder's path on this machine into it.
            write_durably(directory / _COMMITTED, f"committed as {directory.name}\n")
        if team().is_owner:
            narrow(directory)


def released(directory: Path) -> Any:
    """Returns the parameters that `export` wrote, on this process's devices.

    Raises `ConfigError` if they are incomplete, or do not match the checksums that were written with them.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = shapes_on_disk(directory)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
    with _reading(directory, _unreadable(directory)):
        params = ocp.load(str(directory.absolute()), abstract)
    _require_exported(directory, params)
    return params


def shapes_on_disk(directory: Path, part: str | None = None) -> Any:
    """Returns the shapes and types of a saved tree, as leaves with `shape` and `dtype`.

    The tree is what `export` wrote, or what `Checkpoints.save` wrote as `part` of its state. Raises `ConfigError` if it is incomplete.
    """
    with _reading(directory, _unreadable(directory) if part is None else _damaged(directory)):
        shapes: Any = ocp.metadata(str(directory.absolute())).metadata
        return shapes if part is None else shapes[part]


def on_host(directory: Path, part: str | None = None) -> Any:
    """Returns the tree of `shapes_on_disk` as NumPy arrays. Raises `ConfigError` if it is incomplete, or does not hold the saved values."""
    facts = None if part is None else _facts(directory)
    shapes = shapes_on_disk(directory, part)
    like = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    context: Any = ocp.Context()
    context.pytree.loading.partial_load = part is not None
    with _reading(directory, _unreadable(directory) if part is None else _damaged(directory)), context:
        tree: Any = ocp.load(str(directory.absolute()), like if part is None else {part: like})
    if facts is None:
        _require_exported(directory, tree)
        return tree
    _require_saved(directory, tree, facts)
    return tree[part]


def read_together(directory: Path, part: str | None = None) -> Any:
    """Returns what `on_host` does, for process 0 of a job: all processes read, since Orbax waits for all of them."""
    team().tell("read", directory=str(directory.absolute()), part=part)
    return on_host(directory, part)


def _require_exported(directory: Path, params: Any) -> None:
    """Raises `ConfigError` if parameters do not have the checksums that `export` was given."""
    is_known = facts_beside(directory).get("weights") == weight_checksums(by_path(params))
    require(is_known, directory, "contains other weights than the run released in this folder", "Restore the folder")


def _unreadable(directory: Path) -> ConfigError:
    return ConfigError(directory, "these weights are incomplete or damaged", "Restore the folder, or name other weights")
