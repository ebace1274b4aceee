"""Divides the parameters of a run into trained and frozen ones, and says by which arrays its loss is differentiated.

Frozen parameters are drawn with the others, written once under `private/`, and placed on the devices once. Checkpoints hold only trained
parameters. Frozen parameters cannot be drawn again when a run resumes: a new noise epoch has a new secret.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dpx.audit.canaries import CANARIES
from dpx.clipping.groups import LAYERS
from dpx.cost.memory import Trains
from dpx.declaration import require
from dpx.durable import draft_of
from dpx.files.orbax_checkpoints import on_host
from dpx.files.weights import FROZEN
from dpx.mechanism.mechanism_protocol import Mechanism, Reparametrisation, Reparametrised
from dpx.models.trainable import split
from dpx.models.trained import Trained
from dpx.randomness import RootSecret, path_name

# Folded into the key of adapters, so that they are drawn separately from the model's own parameters.
ADAPTERS = 1


def draw(train: Trained, objective: Any, key: Any, start: Any = None) -> tuple[Any, Any]:
    """Draws the parameters of an objective with `key`, and returns two trees (trained, frozen); an audit's canaries are always trained.

    `start`, if given, replaces the drawn model parameters (`dpx.init`); adapters in it are kept.
    """
    params = objective.init(key) | (start or {})
    if train.is_all:
        return params, {}
    canaries = {CANARIES: params[CANARIES]} if CANARIES in params else {}
    own = {name: leaf for name, leaf in params.items() if name != CANARIES}
    own = own if "lora" in own.get("layers", {}) else train.prepared(own, jax.random.fold_in(key, ADAPTERS))
    trained, frozen = split(own, train.selection())
    return trained | canaries, frozen


def shapes(train: Trained, objective: Any) -> tuple[Any, Any]:
    """Returns the shapes of an objective's parameters as two trees (trained, frozen). Allocates nothing."""
    return jax.eval_shape(lambda key: draw(train, objective, key), jax.ShapeDtypeStruct((2,), jnp.uint32))


def trains(train: Trained, objective: Any, mechanism: Mechanism) -> Trains:
    """Returns the numbers of an objective's trained and frozen parameters and of the sums of `mechanism`, from shapes alone."""
    trained, frozen = shapes(train, objective)
    layers = jax.tree_util.tree_leaves_with_path(trained.get(LAYERS, {}))
    depth = None if "embeddings" in trained else layers[0][1].shape[0] if layers else 0
    kernels = any(path_name(path).endswith("/kernel") for path, _ in layers)
    trained_numbers, frozen_numbers = (sum(leaf.size for leaf in jax.tree.leaves(part)) for part in (trained, frozen))
    by_path = {path_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(trained)}
    found = Trains(trained_numbers, frozen_numbers, depth, kernels)
    return found.differentiated_by(by_path, mechanism.summed_shapes(by_path) if isinstance(mechanism, Reparametrisation) else by_path)


def differentiated_by(mechanism: Mechanism, params: Any) -> Reparametrised:
    """Returns the arrays by which the loss of a first step is differentiated, for shapes and measurements. Runs under jit.

    Keys come from a fixed seed.
    """
    if not isinstance(mechanism, Reparametrisation):
        return Reparametrised(params, {}, {})
    drawn = mechanism.draw_first(RootSecret.from_seed(0), 0, params)
    return mechanism.reparametrised(params, mechanism.kept_from_start(params), drawn)


def inherit(private: Path, parent: Path, step: Any) -> None:
    """Copies the frozen parameters of a fork from its parent, completely or not at all, unless that was done before.

    Raises `ConfigError` if the parent's file is missing."""
    path = private / FROZEN
    if step.has_frozen and not path.exists():
        require(
            (parent / FROZEN).is_dir(), parent / FROZEN, "the parent's frozen parameters are missing", "Restore it, or fork with train=all"
        )
        with draft_of(path) as draft:
            shutil.copytree(parent / FROZEN, draft)


def placed(private: Path, step: Any) -> Any:
    """Returns the frozen parameters on the devices, in their compute type; empty if all are trained.

    Raises `ConfigError` if they are lost.
    """
    return step.place_frozen(loaded(private)) if step.has_frozen else {}


def loaded(private: Path) -> Any:
    """Returns the frozen parameters as NumPy arrays, unchanged since they were drawn, so that they may be placed on any devices.

    Raises `ConfigError` if they are lost or damaged.
    """
    path = private / FROZEN
    require(
        path.is_dir(), path, "this run's frozen parameters are missing, and cannot be drawn again", "Restore the folder, or begin a new run"
    )
    return on_host(path)
