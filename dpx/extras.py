"""Checks for optional packages: which extra installs each, with one error message for every missing package."""

import importlib
import importlib.util
from typing import Any

from dpx import packages
from dpx.declaration import ConfigError

# Extra -> the package that must be importable for it.
PACKAGES = {
    "hub": "datasets",
    "chat": "jinja2",
    "tune": "optuna",
    "plots": "matplotlib",
    "papers": "pandas",
    "correlated": "jax_privacy",
    "launchers": "submitit",
}


def missing(value: object, extra: str, package: str | None = None) -> ConfigError:
    """Returns the error for `value`, which needs `package` (by default the one in `PACKAGES`) from `extra`."""
    package = package or PACKAGES[extra]
    fix = f"Install the extra {extra}: pip install '{packages.DISTRIBUTION}[{extra}]', in a checkout '.[{extra}]'"
    return ConfigError(value, f"needs {package}, which is not installed", fix)


def is_installed(package: str) -> bool:
    """Returns whether `package` could be imported; imports nothing."""
    return importlib.util.find_spec(package) is not None


def require_extra(value: object, extra: str, package: str | None = None) -> None:
    """Raises `ConfigError` if `value` needs an extra that is not installed."""
    if not is_installed(package or PACKAGES[extra]):
        raise missing(value, extra, package)


def without_papers(value: object) -> ConfigError:
    """Returns the error for `value`, which needs dpx's own package of the papers where it is not installed."""
    return missing(value, "papers", "the package of the papers")


def supplied(name: str, value: object) -> Any:
    """Returns the function `name` of the module `supplied` of dpx's own package of the papers, for `value`, which asks for it."""
    found = supplied_if_there(name)
    if found is None:
        raise without_papers(value)
    return found


def supplied_if_there(name: str) -> Any | None:
    """Returns the same as `supplied`, or `None` without the package of the papers."""
    for package in packages.usable():
        if package.is_own:
            return getattr(importlib.import_module(f"{package.name}.supplied"), name)
    return None
