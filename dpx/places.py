"""Removes the paths of this machine from a config, so that it may be shared, and from what is printed."""

import os
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_ABSOLUTE = re.compile(r"[/~]|file:|[A-Za-z]:[\\/]|\\\\")


def without_places(config_yaml: str) -> str:
    """Returns `config_yaml` with each path that is absolute, or leads out of the working folder, replaced by its last component.

    Paths are recognised by their form, whatever their key. Relative paths below the working folder stay.
    """
    if not config_yaml.strip():
        return config_yaml
    released = told(OmegaConf.to_container(OmegaConf.create(config_yaml), resolve=False))
    return OmegaConf.to_yaml(OmegaConf.create(released))


def told(node: Any) -> Any:
    """Returns `value`, plain containers or one value, with the paths replaced as in `without_places`."""
    if isinstance(node, dict):
        return {key: told(value) for key, value in node.items()}
    if isinstance(node, list):
        return [told(value) for value in node]
    return _last(node) if isinstance(node, str) and _is_of_the_machine(node) else node


def _is_of_the_machine(value: str) -> bool:
    leads_out = os.path.normpath(value).split(os.sep)[0] == os.pardir
    # The home of a service may be the root folder, which contains every path.
    homes = (str(place) for place in (Path.home(), Path.cwd()) if len(place.parts) > 1)
    return bool(_ABSOLUTE.match(value)) or leads_out or any(home in value for home in homes)


def _last(value: str) -> str:
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] or "."


def as_printed(path: Path) -> str:
    """Returns `path` for the screen: relative if it is below the working folder, so that it can be copied into the next command."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)
