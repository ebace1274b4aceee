"""Registers with Hydra and OmegaConf what the YAML of dpx needs: its resolvers `${...:}`, and the options of installed packages."""

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from dpx import packages
from dpx.config.identity import run_name


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


def register_search_path() -> None:
    """Registers the plugin that adds the options of installed packages.

    Call it before Hydra composes a config of dpx; further calls change nothing.
    """
    Plugins.instance().register(_Options)


def register_resolvers() -> None:
    """Registers the resolvers of dpx's YAML; further calls change nothing.

    `${run_name:}` names Hydra's folders, `${at_most_steps:n}` is a default that a short run must not exceed, `${one_minus:x}` is for
    searches, and `${packages:}` is for the help text.
    """
    OmegaConf.register_new_resolver("packages", packages.described, replace=True)
    OmegaConf.register_new_resolver("run_name", lambda *, _root_: run_name(_root_), replace=True)
    OmegaConf.register_new_resolver("at_most_steps", _at_most_steps, replace=True)
    # Rounded to twelve digits, as a person would write it: 1 - 0.9 is 0.1 and not 0.09999999999999998.
    OmegaConf.register_new_resolver("one_minus", lambda value: round(1.0 - value, 12), replace=True)


def _at_most_steps(number: int, *, _root_: DictConfig) -> int:
    # A value that is not a number of steps is refused later, by its own check.
    return min(number, _root_.steps) if type(_root_.steps) is int else number
