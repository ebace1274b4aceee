"""Checks for optional packages: which extra installs each, with one error message for every missing package."""

import importlib.util

from dpx.declaration import ConfigError
from dpx.packages import DISTRIBUTION

# Extra -> the package that must be importable for it.
PACKAGES = {
    "hub": "datasets",
    "chat": "jinja2",
    "tune": "optuna",
    "plots": "matplotlib",
    "correlated": "jax_privacy",
    "launchers": "submitit",
}


def missing(value: object, extra: str, package: str | None = None) -> ConfigError:
    """Returns the error for `value`, which needs `package` (by default the one in `PACKAGES`) from `extra`."""
    package = package or PACKAGES[extra]
    fix = f"Install the extra {extra}: pip install '{DISTRIBUTION}[{extra}]', in a checkout '.[{extra}]'"
    return ConfigError(value, f"needs {package}, which is not installed", fix)


def is_installed(package: str) -> bool:
    """Returns whether `package` could be imported; imports nothing."""
    return importlib.util.find_spec(package) is not None


def require_extra(value: object, extra: str, package: str | None = None) -> None:
    """Raises `ConfigError` if `value` needs an extra that is not installed."""
    if not is_installed(package or PACKAGES[extra]):
        raise missing(value, extra, package)
