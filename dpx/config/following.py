"""Defaults that follow other groups: resolvers of the YAML, such as `${of_checkpoint:8192}`. A value that the user gives replaces them.

Each takes the default without that group, and the root of the config. To compose a config and to name its run opens no checkpoint: what
follows the content of one stays as it is written, and `with_checkpoint` puts the values there when the run is opened, planned or checked.
"""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpx.config.node import checked_arguments
from dpx.files.checkpoint_folder import CONFIG, config_of, folder_of
from dpx.models import checkpoint_shape
from dpx.task.declared_task import CausalLanguageModel


def of_checkpoint(otherwise: int, *, _root_: DictConfig) -> int | str:
    """Returns the number of rows of the checkpoint's word table, as text until `with_checkpoint` reads it."""
    return otherwise if _selected(_root_, "init.path") is None else f"${{of_checkpoint:{otherwise}}}"


def without_checkpoint(fraction: float, *, _root_: DictConfig) -> float:
    """Returns 0 for the public fraction with a checkpoint: no text is needed for a vocabulary."""
    return fraction if _selected(_root_, "init.path") is None else 0.0


def at_most_positions(length: int, *, _root_: DictConfig) -> int | str:
    """Returns a length in tokens that the model has positions for, as text until `with_checkpoint` reads it from a checkpoint."""
    model = _selected(_root_, "model")
    return f"${{at_most_positions:{length}}}" if _is_of_checkpoint(model) else _within(model, length)


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


def _is_of_checkpoint(model: Any) -> bool:
    return model is not None and model.get("_target_") == checkpoint_shape.TARGET


def _within(model: Any, length: int) -> int:
    positions = None if model is None else model.get("positions")
    return min(length, positions) if isinstance(positions, int) and positions > 0 else length


_FOLLOWS_CHECKPOINT = re.compile(r"\$\{(of_checkpoint|at_most_positions):(\d+)\}")


def with_checkpoint(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns a composed config with everything that it takes from a checkpoint: the model of `model=hf`, and the defaults that follow it.

    Raises `ConfigError` for a checkpoint whose shape cannot be read.
    """
    model, path = plain.get("model"), (plain.get("init") or {}).get("path")
    if isinstance(model, dict) and _is_of_checkpoint(model):
        given = {key: value for key, value in model.items() if key != "_target_"}
        model = checkpoint_shape.written_out(
            checkpoint_shape.OfCheckpoint(**checked_arguments(checkpoint_shape.OfCheckpoint, given, "model"))
        )

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled(value) for key, value in node.items()}
        if isinstance(node, list):
            return [filled(value) for value in node]
        found = _FOLLOWS_CHECKPOINT.fullmatch(node) if isinstance(node, str) else None
        if found is None:
            return node
        if found[1] == "at_most_positions":
            return _within(model, int(found[2]))
        folder = folder_of(str(path))
        return checkpoint_shape.declared_shape(config_of(folder), str(folder / CONFIG))[1]["vocabulary_size"]

    return filled(plain | {"model": model} if "model" in plain else plain)
