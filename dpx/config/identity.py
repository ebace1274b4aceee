"""Defines the identity of a run: the plain values of its config, the part of them that names the run, and the name of its folder.

Defaults that follow other groups are resolvers of the YAML, such as `${of_checkpoint:8192}`; a value that the user gives replaces them.
Each takes the default without that group, and the root of the config. To compose a config and to name its run opens no checkpoint: what
follows the content of one stays as it is written, and `with_checkpoint` puts the values there when the run is opened, planned or checked.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpx.config.experiment import require_name
from dpx.config.node import checked_arguments
from dpx.declaration import ConfigError
from dpx.files.weights import CONFIG, config_of, folder_of
from dpx.models import checkpoint_shape
from dpx.models.model_protocol import COMPUTATION
from dpx.task.declared_task import CausalLanguageModel

# These keys never change the identity of a run (design: how a config becomes a run).
_NOT_IN_THE_NAME = (
    "hydra",
    "job",
    "mesh",
    "clipping_method",
    "schedule",
    "microbatch",
    "length_buckets",
    "profile",
    "logger",
    "callbacks",
    "tags",
    "notes",
    "point",
    "list",
    "plan",
    "report",
    "generate",
)
_NOT_IN_THE_NAME += ("tune", "name", "run")
_OF_THE_END = ("stop_after_evaluations_without_gain", "gain_in", "evaluate_every", "evaluation_rows")


def composed(cfg: DictConfig) -> dict[str, Any]:
    """Returns `cfg` as plain containers, without Hydra's own node; what follows a checkpoint is not read yet.

    Raises `ConfigError` for an interpolation that cannot be resolved.
    """
    try:
        values = {str(key): cfg[key] for key in cfg if key != "hydra"}
        return {key: OmegaConf.to_container(one, resolve=True) if OmegaConf.is_config(one) else one for key, one in values.items()}
    except OmegaConfBaseException as error:
        # A resolver of dpx says itself what is wrong.
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ConfigError):
                raise cause from error
            cause = cause.__cause__ or cause.__context__
        raise ConfigError(error.full_key or "config", str(error).splitlines()[0], "Correct the interpolation") from error


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Returns `cfg` as plain containers, without Hydra's own node and with everything that it takes from a checkpoint.

    Raises `ConfigError` as `composed` does, for a text that would be an interpolation where the config is read again (a stage of a chain,
    another process), and for a checkpoint whose shape cannot be read.
    """
    plain = with_checkpoint(composed(cfg))
    _require_no_interpolation(plain, "")
    return plain


def _require_no_interpolation(node: Any, path: str) -> None:
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _require_no_interpolation(value, f"{path}.{key}".lstrip("."))
            _require_no_interpolation(key, path)
    elif isinstance(node, str) and "${" in node:
        reason = "would be read as an interpolation where this config is read again"
        raise ConfigError(f"{path}={node[:80]}", reason, "Write it without ${")


def run_name(root: DictConfig) -> str:
    """Returns the folder name `<name>-<hash>`: the same config has the same folder, in a run and in a sweep, on one device and on many."""
    job = OmegaConf.select(root, "hydra.runtime.choices.job", default="train")
    # The config of the run does not hold Hydra's node, and no name may read the machine from it.
    try:
        plain = composed(OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"]) if "hydra" in root else root)
        # Before Hydra makes the folder.
        require_name(str(plain["name"]))
    except ConfigError:
        if str(OmegaConf.select(root, "hydra.mode")).rpartition(".")[2] != "MULTIRUN":
            raise
        # A point of a sweep is refused where it is built, so that the other points run.
        return f"jobs/refused-{_short_hash(list(root.hydra.overrides.task))}"
    if plain.get("run") or job in ("list", "report", "generate"):
        about = {"run": plain.get("run"), "list": plain.get("list")}
        return f"jobs/{job}-{_short_hash(about)}"
    if job == "doctor":
        # It examines the machine and not the run that the rest of the config names.
        return f"jobs/{job}-{_short_hash(plain['mesh'])}"
    of_job = plain.get("job")
    if job == "account" and isinstance(of_job, dict) and (ledgers := of_job.get("ledgers")):
        # It accounts for these runs, whatever the rest of the config says, which is usually the default and names another run.
        return f"jobs/{job}-{_short_hash({'ledgers': ledgers})}"
    return f"{plain['name']}-{_short_hash(identity(plain))}"


def identity(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a resolved config that identifies the run, without how and where it is computed."""
    # Some jobs have a key `analysis` that is empty, others do not have the key.
    kept = {key: value for key, value in plain.items() if key not in _NOT_IN_THE_NAME and (key, value) != ("analysis", None)}
    schedule = plain.get("schedule")
    if isinstance(schedule, dict) and schedule.get("stop_after_evaluations_without_gain") is not None:
        # These evaluations decide which weights the run ends with.
        kept["schedule"] = {key: schedule.get(key) for key in _OF_THE_END}
    return _however_computed(kept)


def _however_computed(node: Any) -> Any:
    """Returns a node without the settings that say how its models are computed."""
    if not isinstance(node, dict):
        return node
    return {
        key: {name: leaf for name, leaf in value.items() if name not in COMPUTATION}
        if key == "model" and isinstance(value, dict)
        else _however_computed(value)
        for key, value in node.items()
    }


def _short_hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:10]


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
    labels = _selected(_root_, "data.source.label_names") or _selected(_root_, "data.source.labels")
    return otherwise if not OmegaConf.is_list(labels) else len(labels)


def no_labels_of_completions(*, _root_: DictConfig) -> str | None:
    """Returns null for the labels of prompts with completions, of numbers and of several labels; otherwise they must be given."""
    named = ("prompt_field", "completion_field", "messages_field", "target_field", "label_names")
    fields = (_selected(_root_, f"data.source.{name}") for name in named)
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


def _class_of(node: Any) -> str:
    return str(node.get("_target_")).rpartition(".")[2] if isinstance(node, dict) else ""


_FOLLOWS_CHECKPOINT = re.compile(r"\$\{(of_checkpoint|at_most_positions):(\d+)\}")


def with_checkpoint(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns a composed config with everything that it takes from a checkpoint: the model of `model=hf`, and the defaults that follow it.

    Raises `ConfigError` for a checkpoint whose shape cannot be read.
    """
    model, init = plain.get("model"), plain.get("init")
    path = init.get("path") if isinstance(init, dict) else None
    if isinstance(model, dict) and _is_of_checkpoint(model):
        given = {key: value for key, value in model.items() if key != "_target_"}
        declared = checkpoint_shape.OfCheckpoint(**checked_arguments(checkpoint_shape.OfCheckpoint, given, "model"))
        data = plain.get("data")
        vocabulary = data.get("vocabulary") if isinstance(data, dict) else None
        named = vocabulary.get("path") if isinstance(vocabulary, dict) else None
        is_head_alone = _class_of(plain.get("train")) == "LastLayer" and _class_of(plain.get("task")) != "MaskedLanguageModel"
        model = checkpoint_shape.written_out(declared, None if named == path else named, is_head_alone=is_head_alone)

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
        if isinstance(model, dict) and model.get("new_rows"):
            return model["vocabulary_size"]
        folder = folder_of(str(path))
        return checkpoint_shape.declared_shape(config_of(folder), str(folder / CONFIG))[1]["vocabulary_size"]

    return filled(plain | {"model": model} if "model" in plain else plain)
