"""Registers with Hydra and OmegaConf what the YAML of dpx needs: its resolvers `${...:}`, and the options of installed packages."""

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import hydra._internal.hydra as hydra_internal
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from dpx import packages
from dpx.config.hydra_node import FOLLOWERS, ClosedLoader
from dpx.config.hydra_version import VERSION_BASE, register_resolver
from dpx.declaration import require

# The names of environment variables, with commas between, that a config may read in addition to DPX_DATA.
LISTED = "DPX_ENV"


class _Options(SearchPathPlugin):
    """Adds the folders of installed packages (`dpx.packages`) to the search path of dpx, after its own folder.

    The search paths of other Hydra programs in this process stay unchanged.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        parts: list[Any] = list(search_path.get_path())
        own = str(packages.conf_directory())
        if any(part.provider == "main" and part.path.removeprefix("file://") == own for part in parts):
            for package in packages.usable():
                search_path.append(package.name, f"file://{package.conf}")


def set_up_hydra() -> None:
    """Adds the options of installed packages to Hydra's, and closes Hydra's own node for recipes (`dpx.config.hydra_node`).

    Call it before Hydra composes a config of dpx; further calls change nothing.
    """
    Plugins.instance().register(_Options)
    # Hydra offers no other place where it makes its loader.
    hydra_internal.ConfigLoaderImpl = ClosedLoader  # pyright: ignore[reportPrivateImportUsage]


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Inside the block Hydra composes configs of dpx, whether or not it had been started."""
    if GlobalHydra.instance().is_initialized():
        yield
        return
    set_up_hydra()
    with initialize_config_dir(str(packages.conf_directory()), **VERSION_BASE):
        yield


def register_resolvers() -> None:
    """Registers the resolvers of dpx's YAML; further calls change nothing.

    `${run_name:}` names Hydra's folders and `${one_minus:x}` is for searches. `${oc.env:NAME}` reads only variables that dpx or the user
    lists. The others are defaults that follow other groups (`dpx.config.identity`). The functions are imported for the first value: to
    compose a config reads none.
    """
    register_resolver("oc.env", _variable)
    register_resolver("run_name", lambda *, _root_: import_module("dpx.config.identity").run_name(_root_))
    for name in FOLLOWERS:
        register_resolver(name, _follower(name))
    # Rounded to twelve digits, as a person would write it: 1 - 0.9 is 0.1 and not 0.09999999999999998.
    register_resolver("one_minus", lambda value: round(1.0 - value, 12))


def _follower(name: str) -> Any:
    def resolver(*arguments: Any, _root_: DictConfig) -> Any:
        return getattr(import_module("dpx.config.identity"), name)(*arguments, _root_=_root_)

    return resolver


def _variable(name: str, default: Any = ...) -> str | None:
    """Returns an environment variable that a config may read, as OmegaConf's own `oc.env` does.

    Raises `ConfigError` for any other: a recipe would write it into the name and the config of a run.
    """
    listed = [one.strip() for one in os.environ.get(LISTED, "").split(",")]
    reason = f"a config may read only DPX_DATA and the environment variables that {LISTED} lists"
    require(name in ("DPX_DATA", *listed), f"${{oc.env:{name}}}", reason, f"If you trust the config with it, export {LISTED}={name}")
    value = os.environ.get(name, default)
    require(value is not ..., f"${{oc.env:{name}}}", "this environment variable is not set", f"Export {name}, or give a default")
    return None if value is None else str(value)
