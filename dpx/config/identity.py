"""Defines the identity of a run: the plain values of its config, the part of them that names the run, and the name of its folder."""

import hashlib
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpx.config.experiment import require_name
from dpx.config.following import with_checkpoint
from dpx.declaration import ConfigError
from dpx.models.model_protocol import COMPUTATION

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
    "point",
    "list",
    "plan",
    "report",
    "generate",
)
_NOT_IN_THE_NAME += ("tune", "name", "run")
_OF_THE_END = ("stop_after_evaluations_without_gain", "gain_in", "evaluate_every", "evaluation_rows")


def composed(cfg: DictConfig) -> dict[str, Any]:
    """Returns `cfg` as plain containers, without Hydra's own node; what follows a checkpoint is not read yet (`dpx.config.following`).

    Raises `ConfigError` for an interpolation that cannot be resolved.
    """
    try:
        return {str(key): _plain(cfg[key]) for key in cfg if key != "hydra"}
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


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def run_name(root: DictConfig) -> str:
    """Returns the folder name `<name>-<hash>`: the same config has the same folder, in a run and in a sweep, on one device and on many."""
    job = OmegaConf.select(root, "hydra.runtime.choices.job", default="train")
    # The config of the run does not hold Hydra's node, and no name may read the machine from it.
    plain = composed(OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"]) if "hydra" in root else root)
    # Before Hydra makes the folder.
    require_name(str(plain["name"]))
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
