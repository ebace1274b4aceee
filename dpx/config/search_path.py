"""Adds the options of installed packages (`dpx.packages`) to Hydra's search path when it composes a config of dpx."""

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from dpx.packages import conf_directory, usable


class _Options(SearchPathPlugin):
    """Adds the packages' folders after dpx's own, and to no other search path: other Hydra programs in this process do not see them."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        parts: list[Any] = list(search_path.get_path())
        if any(part.provider == "main" and part.path.removeprefix("file://") == str(conf_directory()) for part in parts):
            for package in usable():
                search_path.append(package.name, f"file://{package.conf}")


def register() -> None:
    """Registers the plugin; call it before Hydra composes for dpx; safe to call twice."""
    Plugins.instance().register(_Options)
