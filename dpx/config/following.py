"""Defaults that follow other groups: resolvers of the YAML, such as `${of_checkpoint:8192}`. A value that the user gives replaces them.

Each takes the default without that group, and the root of the config.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpx.files.checkpoint_folder import CONFIG, config_of, folder_of
from dpx.models import checkpoint_shape
from dpx.task.declared_task import CausalLanguageModel


def of_checkpoint(otherwise: int, *, _root_: DictConfig) -> int:
    """Returns the number of rows of the checkpoint's word table."""
    values = _checkpoint(_selected(_root_, "init.path"))
    return otherwise if values is None else values["vocabulary_size"]


def without_checkpoint(fraction: float, *, _root_: DictConfig) -> float:
    """Returns 0 for the public fraction with a checkpoint: no text is needed for a vocabulary."""
    return fraction if _selected(_root_, "init.path") is None else 0.0


def at_most_positions(length: int, *, _root_: DictConfig) -> int:
    """Returns a length in tokens that the model has positions for."""
    model = _selected(_root_, "model")
    values = _checkpoint(model.get("path")) if model is not None and model.get("_target_") == checkpoint_shape.TARGET else model
    positions = None if values is None else values.get("positions")
    return min(length, positions) if isinstance(positions, int) and positions > 0 else length


def none_if_causal(pairs: str, *, _root_: DictConfig) -> str:
    """Returns `none` for next words: two segments side by side are not running text."""
    target = f"{CausalLanguageModel.__module__}.{CausalLanguageModel.__qualname__}"
    return "none" if _selected(_root_, "task._target_") == target else pairs


def number_of_labels(otherwise: int, *, _root_: DictConfig) -> int:
    """Returns how many labels the data declares."""
    labels = _selected(_root_, "data.source.labels")
    return otherwise if not OmegaConf.is_list(labels) else len(labels)


def no_labels_of_completions(*, _root_: DictConfig) -> str | None:
    """Returns null for the labels of prompts with completions; otherwise they must be given."""
    fields = (_selected(_root_, f"data.source.{name}") for name in ("prompt_field", "completion_field", "messages_field"))
    return "???" if all(field is None for field in fields) else None


def by_trained(rates: Mapping[str, float], otherwise: float, *, _root_: DictConfig) -> float:
    """Returns the value for what is trained; `rates` has names of classes in `dpx.models.trained`."""
    return rates.get(str(_selected(_root_, "train._target_")).rpartition(".")[2], otherwise)


def _selected(root: DictConfig, key: str) -> Any:
    return OmegaConf.select(root, key, throw_on_missing=False)


def _checkpoint(path: Any) -> dict[str, Any] | None:
    """Returns the declared shape of the checkpoint at `path`; `None` without one."""
    if path is None:
        return None
    folder = folder_of(str(path))
    return checkpoint_shape.declared_shape(config_of(folder), str(folder / CONFIG))[1]
