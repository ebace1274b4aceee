"""Converts a composed config to frozen declarations: only this module turns `_target_` into objects; after `build` no DictConfig exists.

Hydra's own `instantiate` would call any importable function and check no types; this one makes declarations only, and imports nothing but
dpx and the packages that are listed (`dpx.packages`).
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpx import packages
from dpx.config.experiment import Experiment
from dpx.config.identity import resolved
from dpx.config.node import checked_arguments, unknown_key
from dpx.declaration import MAY_BE_INFINITE, ConfigError, is_declaration, require
from dpx.files.run_folder import RunFolder

# The function that a command runs with the experiment, in the folder of its run.
Job = Callable[[Experiment, RunFolder], Any]

# The nodes, in addition to `job`, that hold the values of some jobs' options.
NODES_OF_JOBS = ("list", "plan", "report", "benchmark", "design", "generate")
# Read by jobs and recipes, not by the experiment: `point` holds values that a sweep changes together.
_BESIDE_THE_EXPERIMENT = ("job", "analysis", "chain", "fork", "run", "point", *NODES_OF_JOBS, "hydra")


def build(cfg: DictConfig) -> tuple[Experiment, Job]:
    """Returns the experiment and the job that `cfg` declares.

    Raises `ConfigError`, naming the config key, for missing values, unknown keys, wrong types and contradictions.
    """
    _require_values(OmegaConf.to_container(cfg, resolve=False))
    plain = resolved(cfg)
    _require_values(plain)  # a default that follows other groups may be missing too
    fields = Experiment.__dataclass_fields__
    for key in plain:
        if key not in fields and key not in _BESIDE_THE_EXPERIMENT:
            raise unknown_key(key, [*fields, *_BESIDE_THE_EXPERIMENT])
    fork = plain.get("fork")
    require(
        fork is None or isinstance(fork, str), f"fork={fork}", "is not of the form <run folder>@<step>", "Write fork=outputs/<run>@<step>"
    )
    job = make(plain.get("job"), "job")
    # A key in a job's own node, such as `plan.compile`, that the job does not read.
    name = type(job).__module__.rpartition(".")[2]
    node: Any = plain.get(name) if name in NODES_OF_JOBS else None
    for key in node if isinstance(node, dict) else ():
        if key not in type(job).__dataclass_fields__:
            raise unknown_key(f"{name}.{key}", node.keys() - {key})
    require(
        plain.get("chain") is None or "chain" in getattr(type(job), "__dataclass_fields__", {}),
        "job",
        "this config declares a chain of runs, and the chosen job works on one run",
        "Use job=chain, plan or explain, or name a stage's folder with run=",
    )
    experiment = _construct(Experiment, {key: plain[key] for key in plain if key in fields}, "")
    # Last, since a declaration can say better what an infinity would mean there.
    _require_finite(experiment, "")
    return experiment, job


def _require_finite(declared: Any, path: str) -> None:
    """Raises `ConfigError` for a number below `declared` that is infinite or not a number."""
    if isinstance(declared, float):
        require(math.isfinite(declared), f"{path}={declared}", "is not a finite number", "Give a finite number")
    elif dataclasses.is_dataclass(declared):
        for field in dataclasses.fields(declared):
            value = getattr(declared, field.name)
            is_meant = bool(field.metadata.keys() & MAY_BE_INFINITE.keys()) and value == math.inf
            if not is_meant:
                _require_finite(value, f"{path}.{field.name}".lstrip("."))
    elif isinstance(declared, dict | list | tuple):
        for key, value in declared.items() if isinstance(declared, dict) else enumerate(declared):
            _require_finite(value, f"{path}.{key}".lstrip("."))


def _require_values(node: Any) -> None:
    missing = sorted(_missing(node, ""))
    if missing:
        joined = " ".join(f"{key}=..." for key in missing)
        raise ConfigError(", ".join(missing), "this key has no value", f"Add {joined}")


def _missing(node: Any, path: str) -> list[str]:
    """Returns the dotted keys with the value `???` below `node`, without Hydra's own."""
    if node == "???":
        return [path]
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [inner for key, value in items if path or key != "hydra" for inner in _missing(value, f"{path}.{key}".lstrip("."))]


def make(node: Any, path: str) -> Any:
    """Returns `node` with every inner `_target_` replaced by the object that it declares, innermost first."""
    if isinstance(node, list):
        return [make(item, f"{path}.{number}") for number, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: make(value, f"{path}.{key}") for key, value in node.items()}
    declared = _declared(f"{path}._target_={node['_target_']}", node["_target_"])
    return _construct(declared, {key: value for key, value in node.items() if key != "_target_"}, path)


def _declared(value: str, target: Any) -> Any:
    """Returns the declaration that `target` names; `value` is the assignment as the user sees it.

    It imports only modules of dpx and of listed packages, and raises `ConfigError` for any other before an import.
    """
    module, _, name = str(target).rpartition(".")
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or not module:
        raise ConfigError(value, "is not a name of a declaration", "Write <package>.<module>.<class>")
    package = module.partition(".")[0]
    packages.require_listed(value, package)
    try:
        declared = getattr(importlib.import_module(module), name)
    # A package may call `sys.exit` while it is imported; dpx still reports it with one line.
    except (Exception, SystemExit) as error:
        words = f"cannot be loaded ({_first_line(error)})"
        if package == packages.OWN:
            raise ConfigError(value, words, "Name a declaration of dpx") from error
        raise ConfigError(value, f"{packages.named(package)} {words}", f"Correct or uninstall {package}") from error
    if not is_declaration(declared):
        raise ConfigError(value, "is not a declaration", "Name a class made by dpx.declaration.declaration")
    packages.require_listed(value, declared.__module__.partition(".")[0])
    return declared


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _construct(declared: Any, arguments: dict[str, Any], path: str) -> Any:
    made = {key: make(value, f"{path}.{key}".lstrip(".")) for key, value in arguments.items()}
    package = packages.named(declared.__module__.partition(".")[0])
    try:
        return declared(**checked_arguments(declared, made, path))
    except Exception as error:
        # An error in dpx is a defect of dpx, shown with its traceback; an error in a package is a defect of the package.
        if package is None or isinstance(error, ConfigError):
            raise
        name = f"{declared.__module__}.{declared.__qualname__}"
        raise ConfigError(path, f"{package} cannot make {name} ({_first_line(error)})", f"Correct or uninstall {package.name}") from error


def declare(path: Path, key: str) -> Any:
    """Returns the declaration in the file of one option, without the rest of a config; `key` is its name in error messages."""
    return make(OmegaConf.to_container(OmegaConf.load(path), resolve=True), key)
