"""Closes Hydra's own node for recipes: Hydra runs what this node names, so a YAML file may set only the keys of `KEYS`, with plain values.

`ClosedLoader` composes every config of dpx: for a run, a sweep and each of its points, `--cfg`, `--info`, `--help`, and for dpx's own use.
It checks each file when it is loaded, before Hydra sets up logging, makes callbacks or resolves a value. The command line is not checked:
who types it could run code anyway.
"""

import contextlib
import copy
import itertools
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse

from dpx.config.hydra_version import IS_NEXT
from dpx.config.interpolations import MOST_INTERPOLATIONS, require_bounded, require_few_points
from dpx.declaration import ConfigError, require
from dpx.packages import conf_directory

PAGE = "dpx/docs/received_files.md"

# What a recipe may set, by the key below `hydra`; * is any name.
KEYS = {
    "mode": ("RUN", "MULTIRUN"),
    "sweeper.params.*": (str, int, float, bool),
    "sweeper.max_batch_size": (int,),
    "sweeper.n_trials": (int,),
    "sweeper.direction": ("minimize", "maximize"),
    "sweeper.max_failure_rate": (int, float),
    "sweeper.sampler.*": (int, float, bool),
    # Of Slurm and of processes of this machine; numbers alone, since texts become lines of a shell script.
    **{
        f"launcher.{name}": (int,)
        for name in ("n_jobs", "timeout_min", "nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "mem_gb", "array_parallelism")
    },
}
# The groups of Hydra whose option a recipe may choose; the options are those of Hydra, of its plugins and of dpx, never of the recipe's
# folder.
GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/sweeper/sampler", "hydra/callbacks")
# What leaves the machine, and to whom, is chosen on the user's own command line or in conf/local/default.yaml.
OF_THE_USER = ("logger", "callbacks")
# The class of the node `logger`; another one could send as it likes.
LOGGERS = "dpx.config.declared_loggers.Loggers"
# The functions of `dpx.config.identity` that YAML calls.
FOLLOWERS = (
    *("of_checkpoint", "without_checkpoint", "at_most_positions", "none_if_causal", "number_of_labels", "no_labels_of_completions"),
    "by_trained",
)
# The resolvers that a recipe may use: each reads the config alone, except that `oc.env` reads variables that the user has listed.
RESOLVERS = ("oc.select", "oc.dict.keys", "oc.dict.values", "oc.env", "one_minus", *FOLLOWERS)

NOTE_FOLDERS = "dpx.launch.refused.NoteFolders"

_OF_HYDRA_AND_PLUGINS = ("structured://", "pkg://hydra.conf", "pkg://hydra_plugins.")
_PARAMS = ("sweeper", "params")
_WORDS: dict[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_FIX = f"Remove it, or set it on your own command line ({PAGE} lists what a recipe may set)"


class ClosedLoader(ConfigLoaderImpl):
    """Hydra's loader, which refuses what a YAML file may not set. Other Hydra programs of this process load as before."""

    def __init__(self, config_search_path: ConfigSearchPath):
        super().__init__(config_search_path)
        self._computed: list[str] = []
        self._has_received = False
        # Of points that were composed once, by their overrides.
        self._points: dict[tuple[str, ...], bytes] = {}
        self.repository = _Files(config_search_path)
        self._own = f"file://{conf_directory()}"
        main = [part.path for part in config_search_path.get_path() if part.provider == "main"]
        self._is_of_dpx = [path if "://" in path else f"file://{path}" for path in main] == [self._own]

    def __getstate__(self) -> dict[str, Any]:
        # Launchers pickle it for the process of each point.
        return self.__dict__ | {"_points": {}}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
        **more: Any,
    ) -> DictConfig:
        """Returns the composed config; `more` is what Hydra 1.4 adds for its help.

        Raises `ConfigError`, which names the key, for what a recipe may not set.
        """
        if self._is_of_dpx:
            overrides = _presets_last(overrides)
        for one in overrides if self._is_of_dpx else ():
            _require_parsable(one, "the command")
        self._computed = [one for one in overrides if "${" in one]
        self._has_received = bool(self._computed)
        try:
            cfg = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides, **more)
        except RecursionError as error:
            reason = "a list of defaults leads to itself, or a value is nested too deeply"
            raise ConfigError("config", reason, "Remove one of them") from error
        if self._is_of_dpx:
            self._require_allowed(cfg, config_name, overrides)
        return cfg

    def _require_allowed(self, cfg: DictConfig, config_name: str | None, overrides: Sequence[str]) -> None:
        """Raises `ConfigError` for what a composed config has by a recipe, and only the user may choose."""
        # Options of Hydra's other groups that no override chose, but a recipe.
        own = {override.partition("=")[0].lstrip("+~") for override in overrides}
        for group, option in cfg.hydra.runtime.choices.items():
            if group.startswith("hydra/") and group not in (*GROUPS, *own) and option != "default":
                raise ConfigError(f"{group}={option}", "a recipe may not choose an option of this group of Hydra", _FIX)
        callback = OmegaConf.select(cfg, "hydra.callbacks.note_folders._target_", throw_on_missing=False)
        reason = "dpx needs this callback, which notes the folders that a command makes"
        # Hydra's own help has no config.
        require(config_name is None or callback == NOTE_FOLDERS, "hydra.callbacks.note_folders", reason, "Remove what sets it")
        # Hydra refuses another one for a sweep, and does not read it otherwise.
        if isinstance(cfg.hydra.sweeper, DictConfig):
            sweeper: Any = OmegaConf.to_container(cfg.hydra.sweeper, resolve=False)
            params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
            task: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
            axes = OverridesParser.create(self).parse_overrides([*params, *task])
            require_few_points(axes, is_grid=sweeper.get("_target_") == BasicSweeperConf._target_)
        if self._has_received:
            require_bounded(cfg)
        if config_name is not None and (chosen := _of_the_user(cfg)):
            mine = [one for one in overrides if _root_of(one) in (*OF_THE_USER, "hydra")]
            again = super().load_configuration(config_name, mine, RunMode.RUN)
            own = _of_the_user(again)
            reason = "a recipe may not choose what leaves this machine, or who gets it"
            changed = [key for key, node in chosen.items() if node != own.get(key)]
            require(not changed, " and ".join(changed), reason, f"Set it on your own command line ({PAGE})")

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Returns the config of one point; the recipe's `hydra.sweeper.params` may have given its overrides.

        Hydra asks for it twice, to find mistakes before the first point and for the point itself, and gets what was composed first.
        """
        if not self._is_of_dpx:
            return super().load_sweep_config(master_config, sweep_overrides)
        given: Any = OmegaConf.to_container(master_config.hydra.overrides.hydra)
        asked = (*given, *sweep_overrides)
        if (kept := self._points.pop(asked, None)) is not None:
            return pickle.loads(zlib.decompress(kept))
        require_no_hydra(sweep_overrides)
        found = super().load_sweep_config(master_config, sweep_overrides)
        if IS_NEXT:
            # Hydra 1.4 composes a point without `load_configuration`.
            self._require_allowed(found, master_config.hydra.job.config_name, asked)
        # As bytes, which take a hundredth of the memory.
        self._points[asked] = zlib.compress(pickle.dumps(found), 1)
        return found

    def _process_config_searchpath(self, config_name: Any, parsed_overrides: Any, repo: Any) -> None:
        # Hydra imports the packages that it names, before any other file is loaded.
        primary = repo.load_config(config_path=config_name) if self._is_of_dpx and config_name not in (None, "config") else None
        if primary is not None:
            _require_keys(_node_of(primary.config), f"{config_name}.yaml")
        super()._process_config_searchpath(config_name, parsed_overrides, repo)
        if self._is_of_dpx:
            load, numbers = repo.load_config, itertools.count(1)

            def counted(config_path: str) -> Any:
                # Files that name each other so often that composing them would never end.
                reason = f"this command loads more than {_MOST_FILES:,} files, as lists of defaults name each other"
                require(next(numbers) <= _MOST_FILES, config_path, reason, "Remove defaults")
                return load(config_path)

            repo.load_config = counted

    def _load_single_config(self, default: Any, repo: Any) -> Any:
        if not self._is_of_dpx:
            return super()._load_single_config(default, repo)
        path = str(default.config_path)
        # Hydra would find any file of this machine below one of its folders.
        if path.startswith("/") or ".." in path.split("/"):
            raise ConfigError(path, "is outside the folders of configs", "Name an option of a group")
        file = repo.load_config(config_path=path)
        is_shipped = file.path.startswith(_OF_HYDRA_AND_PLUGINS) or file.path == self._own
        if not is_shipped:
            self._has_received = True
            place = f"{path}.yaml in {file.path.removeprefix('file://')}"
            reason = "options of Hydra's own groups come from Hydra, its plugins and dpx alone"
            require(not path.startswith("hydra/"), place, reason, f"Remove the file ({PAGE})")
            for key, value in _leaves(OmegaConf.to_container(file.config, resolve=False), (), in_lists=True):
                if isinstance(value, str):
                    _require_resolvers(value, f"{'.'.join(key)}={value}", place)
        # An option of Hydra's groups belongs where its folder says, or at `hydra` itself; a recipe could place it elsewhere.
        is_in_place = path.startswith("hydra/") and default.package in ("hydra", path.rpartition("/")[0].replace("/", "."))
        # conf/config.yaml, and the user's own defaults beside it.
        if is_shipped and (is_in_place or path in ("config", "local/default")):
            return super()._load_single_config(default, repo)
        _require_keys(_node_of(file.config), f"{path}.yaml")
        loaded = super()._load_single_config(default, repo)
        # A package may have placed the file within Hydra's node.
        _require_keys(_node_of(loaded.config), f"{path}.yaml")
        return loaded

    def _compose_config_from_defaults_list(self, defaults: Any, repo: Any) -> DictConfig:
        cfg = super()._compose_config_from_defaults_list(defaults, repo)
        if self._is_of_dpx and self._has_received:
            require_bounded(cfg)
            # Hydra resolves values where it applies overrides, so each is looked at before.
            tried = copy.deepcopy(cfg)
            for override in OverridesParser.create().parse_overrides(self._computed):
                # Hydra says why it cannot be set.
                with contextlib.suppress(OmegaConfBaseException, TypeError, ValueError, AssertionError):
                    OmegaConf.update(tried, override.key_or_group, override.value(), merge=False, force_add=True)
                require_bounded(tried)
        return cfg


class _Files(ConfigRepository):
    """Hydra's configs. A file from outside of dpx is looked at before it becomes a config, for which an alias is a copy."""

    def load_config(self, config_path: str) -> Any:
        source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        if source is not None and source.scheme() == "file" and source.path != str(conf_directory()):
            _require_small(Path(source.path, source._normalize_file_name(config_path)))
        return super().load_config(config_path)


# A composition loads some hundred files.
_MOST_FILES = 2_000


# A recipe has some hundred values.
_MOST_BYTES, _MOST_VALUES, _MOST_LEVELS, _MOST_DIGITS = 2**20, 100_000, 50, 400


def _require_small(file: Path) -> None:
    """Raises `ConfigError` for a file that is not text or not a config, or that would become a config too large to be meant."""
    text = file.read_bytes()[: _MOST_BYTES + 1]
    require(len(text) <= _MOST_BYTES, file, f"has more than {_MOST_BYTES:,} bytes", "Write a config that is shorter")
    reason = f"holds more than {MOST_INTERPOLATIONS:,} interpolations"
    require(text.count(b"${") <= MOST_INTERPOLATIONS, file, reason, "Write the values themselves")
    try:
        root = yaml.compose(text.decode(), yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(file, f"byte {error.start + 1} is not UTF-8", "Convert the file to UTF-8") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(file, f"is not YAML ({error.reason})", "Correct it") from None
    except RecursionError:
        raise ConfigError(file, "is nested too deeply", "Write a config that is flatter") from None
    except yaml.YAMLError:
        # Hydra finds the same, and says the line.
        return
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return
    _values_in(root, file, {}, _MOST_LEVELS)
    # A list of defaults that Hydra could not read.
    require(isinstance(root, yaml.MappingNode), file, "is not a mapping of keys to values", "Write <key>: <value>")
    for defaults in (value for key, value in root.value if key.value == "defaults"):
        fix = "Write defaults: [<name>, {<group>: <option>}, _self_]"
        require(isinstance(defaults, yaml.SequenceNode), file, "has defaults that are not a list", fix)
        for item in defaults.value:
            is_pair = isinstance(item, yaml.MappingNode) and len(item.value) == 1
            option = item.value[0][1] if is_pair else item
            options = option.value if is_pair and isinstance(option, yaml.SequenceNode) else [option]
            is_default = all(isinstance(one, yaml.ScalarNode) for one in options)
            require(is_default, f"{file}:{item.start_mark.line + 1}", "is not a default", fix)


def _values_in(node: Any, file: Path, known: dict[int, int], levels: int) -> int:
    """Returns the number of values that a node of YAML becomes; `known` holds the nodes that were counted, by identity."""
    if levels == 0:
        raise ConfigError(file, "is nested too deeply, or an alias in it leads to itself", "Write a config that is flatter")
    if id(node) in known:
        return known[id(node)]
    is_read = isinstance(node, yaml.ScalarNode) and (node.tag == "tag:yaml.org,2002:int" or "${" in node.value)
    if is_read:
        _require_parsable(node.value, file)
    parts = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
    found = 1 + sum(_values_in(one, file, known, levels - 1) for one in parts) if isinstance(node, yaml.CollectionNode) else 1
    require(found <= _MOST_VALUES, file, f"becomes more than {_MOST_VALUES:,} values, as its aliases are copied", "Remove aliases")
    known[id(node)] = found
    return found


def _require_parsable(text: str, place: Any) -> None:
    """Raises `ConfigError` for a value whose number, or whose depth of brackets, Python would refuse to read."""
    shown = f"{text[:40]}... in {place}"
    require(re.search(rf"\d{{{_MOST_DIGITS}}}", text) is None, shown, "holds a number with too many digits", "Shorten it")
    depth = max(itertools.accumulate((one in "[{(") - (one in ")}]") for one in text), default=0)
    require(depth <= _MOST_LEVELS, shown, "is nested too deeply", "Write a value that is flatter")


def _root_of(override: str) -> str:
    return re.split(r"[=./@:]", override.lstrip("+~"))[0]


def _presets_last(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of a command with `debug=...` appended, after the recipe whose values it changes."""
    presets = [one for one in overrides if re.match(r"\+?debug=", one)]
    # Unquoted, `nan` is a number to Hydra.
    appended = ["+debug='nan'" if one.endswith("=nan") else f"+{one.lstrip('+')}" for one in presets]
    return [one for one in overrides if one not in presets] + appended


def _of_the_user(cfg: DictConfig) -> dict[str, Any]:
    """Returns the nodes that send to another machine or run callbacks, as they are written; empty if none does."""
    nodes: Any = {key: OmegaConf.to_container(cfg[key], resolve=False) for key in OF_THE_USER if OmegaConf.is_config(cfg.get(key))}

    def stays(key: str, name: str, value: Any) -> bool:
        return not value or (key == "logger" and (name in ("tensorboard", "csv") or (name, value) == ("_target_", LOGGERS)))

    return {key: one for key, one in nodes.items() if not all(stays(key, str(name), value) for name, value in one.items())}


def require_none_of_the_user(keys: Iterable[str], place: str) -> None:
    """Raises `ConfigError` for a key, of a setting that a file gave, that says what leaves the machine."""
    for key in keys:
        reason = "only your own command line says what leaves this machine, or who gets it"
        require(_root_of(key) not in OF_THE_USER, f"{key} in {place}", reason, f"Remove it ({PAGE})")


def require_no_hydra(overrides: Sequence[str], place: str = "a recipe") -> None:
    """Raises `ConfigError` for an override of Hydra's node, except the choice of an option, among overrides that a file gave."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        is_hydras = "hydra" in (re.split(r"[./]", one or "")[0] for one in (override.key_or_group, override.package))
        if is_hydras and (override.key_or_group not in GROUPS or override.package is not None):
            raise ConfigError(f"{override.get_key_element().lstrip('+~')} in {place}", "a recipe may not set this key of Hydra", _FIX)


def require_own_resolvers(overrides: Sequence[str], place: str = "a recipe") -> None:
    """Raises `ConfigError` for an interpolation with a resolver that a recipe may not use, among overrides that a file gave."""
    for override in overrides:
        _require_resolvers(override.partition("=")[2].strip("'\""), override, place)


def _require_resolvers(text: str, shown: str, place: str) -> None:
    try:
        nodes: list[Any] = [parse(text)] if "${" in text else []
    except GrammarParseError:
        # OmegaConf refuses it where it is read.
        return
    while nodes:
        node = nodes.pop()
        # Also of an interpolation within another one; a name that is computed stands here as written.
        if type(node).__name__ == "ResolverNameContext":
            name = node.getText()
            reason = f"a recipe may not use the resolver {name}, only {', '.join(RESOLVERS)}"
            require(name in RESOLVERS, f"{shown} in {place}", reason, "Write the value itself")
        nodes.extend(node.getChildren() if hasattr(node, "getChildren") else ())


def _node_of(config: Any) -> Any:
    """Returns Hydra's node of a loaded file as plain containers, in which nothing is resolved; empty without one."""
    if not isinstance(config, DictConfig) or "hydra" not in config.keys():
        return {}
    plain: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, "hydra"), resolve=False)
    return plain["hydra"]


def _leaves(node: Any, key: tuple[str, ...], *, in_lists: bool = False) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every value below `node` with the names that lead to it, which begin with `key`; a list is one value, or `in_lists` many."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if in_lists and isinstance(node, list) else None
    if items is None:
        yield key, node
    for name, value in items or ():
        yield from _leaves(value, (*key, str(name)), in_lists=in_lists)


def _require_keys(node: Any, place: str) -> None:
    """Raises `ConfigError` unless a recipe, the file `place`, may set every key of Hydra's `node`."""
    for key, value in _leaves(node, ()):
        shown = ".".join(("hydra", *key))
        known = ".".join(key) if ".".join(key) in KEYS else ".".join((*key[:-1], "*"))
        if known not in KEYS or (key[-1].startswith("_") and key[:-1] != _PARAMS):
            raise ConfigError(f"{shown} in {place}", "a recipe may not set this key of Hydra", _FIX)
        if isinstance(value, str) and "${" in value:
            raise ConfigError(f"{shown}={value} in {place}", "a recipe may not compute a value of Hydra", "Write the value itself")
        if not any(type(value) is one if isinstance(one, type) else value == one for one in KEYS[known]):
            words = " or ".join(_WORDS.get(one, str(one)) for one in KEYS[known])
            raise ConfigError(f"{shown}={value} in {place}", f"a recipe may set it to {words} only", _FIX)
        if key[:-1] == _PARAMS:
            # The sweeper makes an override of it.
            _require_parsable(str(value), place)
            require_no_hydra([f"{key[-1]}={value}"], place)
            require_none_of_the_user([key[-1]], place)
