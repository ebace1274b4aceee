"""From a composed config to frozen declarations: the only place that turns `_target_` into objects; after `build` no DictConfig exists.

Hydra's own `instantiate` would call any importable function and check no types; this one makes declarations only, and imports nothing
but dpx and the packages that are listed (`dpx.packages`).
"""

import hashlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpx import packages
from dpx.declaration import Refused, is_declaration, require
from dpx.experiment import Experiment
from dpx.node import checked_arguments, nearest, unknown_key
from dpx.packages import conf_directory as conf_directory
from dpx.run_folder import RunFolder

# What a command does with the experiment, in the folder of its run.
Job = Callable[[Experiment, RunFolder], Any]

# Read by jobs and recipes, not by the experiment: `point` holds values that a sweep moves together.
_BESIDE_THE_EXPERIMENT = ("job", "analysis", "fork", "run", "point", "list", "plan", "report", "benchmark", "hydra")
# These never change which run it is (design: how a config becomes a run).
_NOT_IN_THE_NAME = ("hydra", "job", "mesh", "clipping", "schedule", "microbatch", "length_buckets", "point", "list", "plan", "report")
_NOT_IN_THE_NAME += ("tune", "name", "run")


def build(cfg: DictConfig) -> tuple[Experiment, Job]:
    """The experiment and the job that `cfg` declares.

    Raises `Refused`, naming the config key, for missing values, unknown keys, wrong types and contradictions.
    """
    missing = sorted(_missing(OmegaConf.to_container(cfg, resolve=False), ""))
    if missing:
        joined = " ".join(f"{key}=..." for key in missing)
        raise Refused(", ".join(missing), "no value given", f"Add {joined}")
    plain = resolved(cfg)
    fields = Experiment.__dataclass_fields__
    for key in plain:
        if key not in fields and key not in _BESIDE_THE_EXPERIMENT:
            raise unknown_key(key, [*fields, *_BESIDE_THE_EXPERIMENT])
    job = _instantiate(plain.get("job"), "job")
    experiment = _construct(Experiment, {key: plain[key] for key in plain if key in fields}, "")
    return experiment, job


def _missing(node: Any, path: str) -> list[str]:
    """Dotted keys of `???` below `node`, Hydra's own left out."""
    if node == "???":
        return [path]
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, value in items if path or key != "hydra" for found in _missing(value, f"{path}.{key}".lstrip("."))]


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Plain containers without Hydra's own node; raises `Refused` for an interpolation that leads nowhere."""
    try:
        return {str(key): _plain(cfg[key]) for key in cfg if key != "hydra"}
    except OmegaConfBaseException as error:
        raise Refused(error.full_key or "config", str(error).splitlines()[0], "Correct the interpolation") from error


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _instantiate(node: Any, path: str) -> Any:
    """`node` with every inner `_target_` replaced by what it declares, innermost first."""
    if isinstance(node, list):
        return [_instantiate(item, f"{path}.{number}") for number, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: _instantiate(value, f"{path}.{key}") for key, value in node.items()}
    declared = _declared(f"{path}._target_={node['_target_']}", node["_target_"])
    return _construct(declared, {key: value for key, value in node.items() if key != "_target_"}, path)


def _declared(value: str, target: Any) -> Any:
    """The declaration that `target` names, `value` being the assignment as the user sees it. Only modules of dpx and of listed packages are
    imported; raises `Refused` for anything else before it is."""
    module, _, name = str(target).rpartition(".")
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or not module:
        raise Refused(value, "is no name of a declaration", "Write <package>.<module>.<class>")
    package = module.partition(".")[0]
    packages.require_listed(value, package)
    try:
        declared = getattr(importlib.import_module(module), name)
    # A package may leave the interpreter while it is imported; dpx answers with its one line all the same.
    except (Exception, SystemExit) as error:
        words = f"cannot be loaded ({_first_line(error)})"
        if package == packages.OWN:
            raise Refused(value, words, "Name a declaration of dpx") from error
        raise Refused(value, f"{packages.named(package)} {words}", f"Mend or uninstall {package}") from error
    if not is_declaration(declared):
        raise Refused(value, "not a declaration", "Name a class made by dpx.declaration.declaration")
    packages.require_listed(value, declared.__module__.partition(".")[0])
    return declared


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _construct(declared: Any, arguments: dict[str, Any], path: str) -> Any:
    made = {key: _instantiate(value, f"{path}.{key}".lstrip(".")) for key, value in arguments.items()}
    package = packages.named(declared.__module__.partition(".")[0])
    try:
        return declared(**checked_arguments(declared, made, path))
    except Exception as error:
        # What breaks in dpx is a defect of dpx, with its traceback; what breaks in a package is the package's.
        if package is None or isinstance(error, Refused):
            raise
        name = f"{declared.__module__}.{declared.__qualname__}"
        raise Refused(path, f"{package} cannot make {name} ({_first_line(error)})", f"Mend or uninstall {package.name}") from error


def declare(path: Path, key: str) -> Any:
    """What one option's file declares by itself, without the rest of a config; `key` is what a refusal calls it."""
    return _instantiate(OmegaConf.to_container(OmegaConf.load(path), resolve=True), key)


def run_name(root: DictConfig) -> str:
    """`<name>-<hash>`: the same config has the same folder, in a run and in a sweep, on one device and on many."""
    job = OmegaConf.select(root, "hydra.runtime.choices.job", default="train")
    plain = resolved(root)
    if plain.get("run") or job in ("list", "report"):
        about = {"run": plain.get("run"), "list": plain.get("list")}
        return f"jobs/{job}-{_short_hash(about)}"
    return f"{plain['name']}-{_short_hash(identity(plain))}"


def identity(plain: dict[str, Any]) -> dict[str, Any]:
    """The part of a resolved config that says which run it is; how and where it is computed, and groups that do nothing, are left out."""
    return {key: value for key, value in plain.items() if key not in _NOT_IN_THE_NAME and not _does_nothing(key, value)}


def _does_nothing(key: str, value: Any) -> bool:
    default = {"telemetry": ".SecretTelemetry", "train": ".Everything", "init": ".RandomStart"}.get(key, "")
    target = str(value["_target_"]) if default else ""
    # A package's class of the same name may do something.
    return (key == "analysis" and value is None) or (bool(default) and target.startswith("dpx.") and target.endswith(default))


def _short_hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:10]


def register_resolvers() -> None:
    """`${run_name:}` and `${hydra_files:}` for Hydra's folders, `${at_most_steps:n}` for a default that a short run must not exceed, for a
    search `${one_minus:x}` and `${trials_left:}`, and `${packages:}` for the help; safe to call twice."""
    OmegaConf.register_new_resolver("packages", packages.described, replace=True)
    OmegaConf.register_new_resolver("run_name", lambda *, _root_: run_name(_root_), replace=True)
    OmegaConf.register_new_resolver("at_most_steps", _at_most_steps, replace=True)
    # Twelve digits are what a person writes: 1 - 0.9 is 0.1 and not 0.09999999999999998.
    OmegaConf.register_new_resolver("one_minus", lambda value: round(1.0 - value, 12), replace=True)
    OmegaConf.register_new_resolver("hydra_files", lambda *, _root_: _hydra_files(_root_), replace=True)
    OmegaConf.register_new_resolver("trials_left", lambda *, _root_: _trials_left(_root_), replace=True)


def _at_most_steps(number: int, *, _root_: DictConfig) -> int:
    # What is no number of steps is refused as such.
    return min(number, _root_.steps) if type(_root_.steps) is int else number


def _hydra_files(root: DictConfig) -> str | None:
    """Where Hydra keeps what it composed, below the run's folder; nowhere for a run that has finished, which nothing may touch."""
    from dpx.finished import JOBS, has_finished

    place = OmegaConf.select(root, "hydra.runtime.output_dir", throw_on_missing=False)
    if place is None or OmegaConf.select(root, "hydra.runtime.choices.job", default="train") not in JOBS:
        return "private/hydra"
    try:
        return None if has_finished(Path(place), resolved(root)) else "private/hydra"
    except Refused:
        return "private/hydra"


def _trials_left(root: DictConfig) -> int:
    """What the recipe's study still has to begin: a search launched again goes on to its number, not past it."""
    from dpx.tuning.study import Study, check_charge

    node = resolved(OmegaConf.create({"tune": root.get("tune")}))["tune"]
    require(node is not None, "hydra/sweeper=search", "no search is declared", "Add tune=search")
    tune = _instantiate(node, "tune")
    # Before the first trial, not at each.
    check_charge(root.hydra.sweeper, tune)
    return Study(Path(root.hydra.sweep.dir), root.name).left(tune)


def load(run: str) -> tuple[DictConfig, Path]:
    """The resolved config of a finished or running run, and its folder.

    `run` is a run folder, or the name of an experiment that has exactly one run under `outputs/`.
    """
    folder = Path(run)
    if not (folder / "release" / "config.yaml").is_file():
        found = sorted(path.parent.parent for path in Path("outputs").glob(f"{run}-*/release/config.yaml"))
        if len(found) != 1:
            everything = [path.parent.parent.name for path in Path("outputs").glob("*/release/config.yaml")]
            hint = f"Name one of {', '.join(map(str, found))}" if found else f"Name a run folder{nearest(run, everything)}"
            raise Refused(f"run={run}", f"{len(found) or 'no'} runs have that name" if found else "no such run", hint)
        folder = found[0]
    loaded = OmegaConf.load(folder / "release" / "config.yaml")
    assert isinstance(loaded, DictConfig)
    return loaded, folder
