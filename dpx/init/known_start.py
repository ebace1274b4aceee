"""Finds the initial values of a run's trained parameters, as far as they follow from public data.

Known are weights of a public file, weights that another run released, and values that no random number decides, such as zeros. Values that
were drawn from the run's secret are not known.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.interpreters import partial_eval

from dpx.data.vocabulary import SpecialIds
from dpx.declaration import ConfigError
from dpx.init.declarations import FromCheckpoint, FromFile, FromRun, Init
from dpx.init.parent import open_parent
from dpx.init.parent_weights import parameters_of
from dpx.init.start import ADAPTERS, Receiver, taken_from
from dpx.init.weights import Leaves, checksum, nested, read_file
from dpx.interop.checkpoint import Checkpoint
from dpx.privacy.origins import ReleasedFile, ReleasedRun
from dpx.task.objective import objective as make_objective
from dpx.training import frozen
from dpx.training.change import NotCompared


def known_start(init: Init, receiver: Receiver, origins: Sequence[ReleasedRun | ReleasedFile]) -> Leaves:
    """Returns, by path, the initial values of trained parameters that do not depend on the run's secret.

    `origins` are in the run's statement. Raises `NotCompared` if the weights that the run began from are missing or changed, or were never
    released.
    """
    start = None
    if origins:
        start = nested(_loaded(init, receiver, origins[0]))
    # Marks decide how rows become batches, and no initial value.
    objective = make_objective(receiver.model, receiver.task, receiver.vocabulary_size, SpecialIds(*range(5)))

    def drawn(key: Any, start: Any) -> dict[str, Any]:
        return flatten_dict(frozen.draw(receiver.train, objective, key, start)[0], sep="/")

    known = _independent(drawn, start)
    # Only these are computed: no random number is drawn.
    values = jax.jit(lambda start: {path: leaf for path, leaf in drawn(jnp.zeros(2, jnp.uint32), start).items() if path in known})
    return {path: np.asarray(leaf) for path, leaf in values(start).items()}


def _independent(drawn: Callable[[Any, Any], dict[str, Any]], start: Any) -> list[str]:
    """Returns the paths of the outputs of `drawn` that do not depend on its key, from the traced program."""
    closed, shapes = jax.make_jaxpr(drawn, return_shape=True)(jax.ShapeDtypeStruct((2,), jnp.uint32), start)
    outputs = range(len(closed.jaxpr.outvars))
    reads_key = [partial_eval.dce_jaxpr(closed.jaxpr, [other == one for other in outputs])[1][0] for one in outputs]
    return [path for path, is_read in zip(sorted(shapes), reads_key, strict=True) if not is_read]


def _loaded(init: Init, receiver: Receiver, origin: ReleasedRun | ReleasedFile) -> Leaves:
    """Returns the weights that a run began from. Raises `NotCompared` for others than the origin in its statement describes."""
    value = f"init={init.kind}"
    # A fork declares random parameters.
    if init.is_random or (isinstance(init, FromRun) and init.step is not None):
        raise NotCompared(value, "the run began from a checkpoint of another run, which is not released")
    try:
        leaves = _read(init, receiver)
    except ConfigError as error:
        raise NotCompared(value, "the weights that the run began from cannot be read", str(error)) from error
    if not origin.weights:
        raise NotCompared(value, "the statement holds no checksum of weights of unknown provenance", "Vouch with init.provenance=public")
    if checksum(leaves) != origin.weights:
        raise NotCompared(value, "other weights are now in the place of the run's first ones", "Restore them")
    return leaves


def _read(init: Init, receiver: Receiver) -> Leaves:
    if isinstance(init, FromFile):
        return read_file(Path(init.file))
    if isinstance(init, FromCheckpoint):
        checkpoint = Checkpoint(init.path)
        return checkpoint.leaves(checkpoint.select(receiver.shapes, receiver.model))
    assert isinstance(init, FromRun)
    parent = open_parent(init, f"init.run={init.run}")
    taken = taken_from(parent, receiver)
    return {path: leaf for path, leaf in parameters_of(parent, receiver.train).items() if path in taken or path.startswith(ADAPTERS)}
