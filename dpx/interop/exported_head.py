"""Puts into an exported classifier what the trained one leaves out: an identity before its output, and the units of a number.

The classes of transformers always have a dense map before the output of an encoder's classifier. A head that was trained without one
(`model.classifier=linear_tanh`, `linear_relu`) is exported with the identity there: what transformers computes is what was measured.
"""

import dataclasses
from typing import Any

import numpy as np

from dpx.declaration import require
from dpx.files.weights import Leaves
from dpx.models.shape import AnyModel, Bert
from dpx.task.declared_targets import Regression
from dpx.task.declared_task import MultipleChoice


def in_units_of_target(task: Any, leaves: Leaves) -> Leaves:
    """Returns the parameters with the mean and the scale of a number in the last map, whose output is then the number itself.

    Raises `ConfigError` for a mean that a map without a bias cannot hold, a decoder's.
    """
    if not isinstance(task, Regression):
        return leaves
    place = next(f"{name}/" for name in ("classifier/out", "classifier") if f"{name}/kernel" in leaves)
    kernel, bias = leaves[f"{place}kernel"], leaves.get(f"{place}bias")
    reason = "the classifier of a decoder has no bias, which would hold the mean of the target"
    require(
        bias is not None or task.mean == 0,
        f"task.mean={task.mean}",
        reason,
        "Subtract the mean from the targets, and train with task.mean=0",
    )
    held = {} if bias is None else {f"{place}bias": np.asarray(bias * task.scale + task.mean, np.float32)}
    return leaves | held | {f"{place}kernel": np.asarray(kernel * task.scale, np.float32)}


def with_identity(model: AnyModel, task: Any, leaves: Leaves) -> tuple[AnyModel, Leaves]:
    """Returns the model and the parameters with the head of its own family, which computes the same function."""
    if not isinstance(model, Bert) or model.classifier not in ("linear_tanh", "linear_relu") or "classifier/kernel" not in leaves:
        return model, leaves
    fits = "relu" if not model.segments and not model.position_offset else "tanh"
    reason = f"transformers' classifier of this family has {fits} before its output"
    require(
        model.classifier == f"linear_{fits}", f"model.classifier={model.classifier}", reason, f"Train with model.classifier=linear_{fits}"
    )
    # RobertaForMultipleChoice reads the encoder's pooler, as BERT's heads do.
    is_pooler = fits == "tanh" and (not model.position_offset or isinstance(task, MultipleChoice))
    identity = {"kernel": np.eye(model.width, dtype=np.float32), "bias": np.zeros(model.width, np.float32)}
    if is_pooler:
        return dataclasses.replace(model, classifier="pooler"), leaves | {f"pooler/{name}": leaf for name, leaf in identity.items()}
    rest = {path: leaf for path, leaf in leaves.items() if not path.startswith("classifier/")}
    head = {f"classifier/out/{name}": leaves[f"classifier/{name}"] for name in ("kernel", "bias")}
    head |= {f"classifier/dense/{name}": leaf for name, leaf in identity.items()}
    return dataclasses.replace(model, classifier="relu" if fits == "relu" else "dense"), rest | head
