"""Finds packages from outside this tree that add to dpx, by the entry point group `dpx.packages`, without importing them.

An entry point names an importable package: `dpx_pond = "dpx_pond"`. Its options are the YAML files in its folder `conf/`, and a `_target_`
may name what it declares. The same list is used for a command line, for `run=<folder>` and for `dpx.load`. A package whose name or option
also belongs to another one is set aside as a whole, with a reason: nothing of it can be named, and dpx's own jobs run without it.
"""

import dataclasses
import functools
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

from dpx.declaration import ConfigError

GROUP = "dpx.packages"
OWN = "dpx"
# What is installed: the name in pyproject.toml. `dpx` is the distribution of another project.
DISTRIBUTION = "dpx-lm"


@dataclasses.dataclass(frozen=True)
class Package:
    """Describes one listed package.

    `name` is its import name, `folder` the folder of its source; `options` are paths below its `conf/`, such as `mechanism/ripple`;
    `set_aside` is the reason why it is not used, empty if it is used.
    """

    name: str
    distribution: str
    version: str
    folder: Path | None
    options: tuple[str, ...] = ()
    set_aside: str = ""

    @property
    def conf(self) -> Path:
        assert self.folder is not None
        return self.folder / "conf"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def conf_directory() -> Path:
    """Returns the folder of config.yaml: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError("conf/config.yaml", f"dpx found this file neither beside nor inside {package}", "Install dpx again")


def listed() -> tuple[Package, ...]:
    """Returns every listed package by name, including packages that are set aside."""
    # Computed again if the path, or the content of its folders, has changed.
    return _listed(tuple((folder, _changed_at(folder)) for folder in sys.path))


def usable() -> tuple[Package, ...]:
    """Returns the listed packages that are not set aside: their options and declarations may be named."""
    return tuple(package for package in listed() if not package.set_aside)


def named(name: str) -> Package | None:
    """Returns the listed package that is imported by `name`."""
    return next((package for package in listed() if package.name == name), None)


def version_of(name: str) -> str:
    """Returns the version of a listed package, or "unlisted" for code of no package, such as a notebook's."""
    package = named(name)
    return package.version if package else "unlisted"


def require_listed(value: str, name: str) -> None:
    """Raises `ConfigError` unless `name`, which `value` names, is dpx or a package that may be used. Imports nothing."""
    if name == OWN:
        return
    package = named(name)
    if package is None:
        known = ", ".join([OWN, *(one.name for one in usable())])
        raise ConfigError(
            value,
            f"{name} is not an installed package for dpx (installed are: {known})",
            "Install the package that provides it, or name another one",
        )
    if package.set_aside:
        raise ConfigError(value, f"dpx ignores the package {package}: {package.set_aside}", "Uninstall or correct one of them")


def folders() -> list[tuple[str, Path]]:
    """Returns the pairs (package, folder of options), dpx's own first."""
    return [(OWN, conf_directory()), *((package.name, package.conf) for package in usable())]


def is_own(group: str, name: str) -> bool:
    """Returns whether the option `name` of `group` is dpx's own."""
    return (conf_directory() / group / f"{name}.yaml").is_file()


def names_in(group: str) -> list[str]:
    """Returns the options of a group, in alphabetical order; an option in a subfolder is named by its path below the group."""
    options = (path.relative_to(folder / group).with_suffix("") for _, folder in folders() for path in (folder / group).rglob("*.yaml"))
    return sorted(path.as_posix() for path in options)


def described() -> str:
    """Returns the packages for `--help`, one per line; empty if no package is installed."""
    lines = [f"  {package}: {package.set_aside or ', '.join(assignments(package)) or 'no options'}" for package in listed()]
    return "\n".join(["== Packages ==", *lines, ""]) + "\n" if lines else ""


def assignments(package: Package) -> list[str]:
    """Returns options in the form of a command line."""
    return [f"+{_written(option)}" if option.startswith("experiment/") else _written(option) for option in package.options]


def _options(conf: Path) -> tuple[str, ...]:
    return tuple(sorted(path.relative_to(conf).with_suffix("").as_posix() for path in conf.rglob("*.yaml")))


@functools.lru_cache(maxsize=8)
def _listed(path: tuple[tuple[str, int], ...]) -> tuple[Package, ...]:
    del path
    # A distribution that is on the path twice, such as a checkout beside an installation, counts once: the first is imported.
    by_entry = {
        (_distribution(entry).lower(), entry.value): _package(entry) for entry in reversed(list(metadata.entry_points(group=GROUP)))
    }
    return _without_clashes(sorted(by_entry.values(), key=lambda package: (package.name, package.distribution)))


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def _distribution(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.name


def _package(entry: metadata.EntryPoint) -> Package:
    name, version = entry.value, entry.dist.version if entry.dist else "unknown"
    package = Package(name, _distribution(entry), version, None)
    if not name.isidentifier():
        return dataclasses.replace(package, set_aside=f"its entry point names {name!r}, which is not a top-level package")
    if name == OWN or name in sys.stdlib_module_names:
        return dataclasses.replace(package, set_aside=f"its entry point names {name}, which does not belong to this distribution")
    try:
        # For a top-level name this imports nothing.
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is None and spec.submodule_search_locations:
        # Such as the folder of the package's project, which is on the path because the command was started beside it.
        found = f"the folder {next(iter(spec.submodule_search_locations))} without an __init__.py is found first"
        return dataclasses.replace(package, set_aside=f"its entry point names {name}, and {found}; start from another folder")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return dataclasses.replace(
            package, set_aside=f"its entry point names {name}, and no such package (with an __init__.py) is installed"
        )
    folder = Path(spec.origin).parent
    return dataclasses.replace(package, folder=folder, options=_options(folder / "conf"))


def _without_clashes(packages: list[Package]) -> tuple[Package, ...]:
    """Returns `packages`, with every package set aside whose name or option also belongs to another one."""
    checked, own = [], set(_options(conf_directory()))
    for package in packages:
        reason = package.set_aside or _clash(package, [other for other in packages if other is not package and not other.set_aside], own)
        checked.append(dataclasses.replace(package, set_aside=reason))
    return tuple(checked)


def _clash(package: Package, others: list[Package], own: set[str]) -> str:
    for other in others:
        if other.name == package.name:
            return f"{package.distribution} and {other.distribution} both provide {package.name}"
        for option in sorted(set(package.options) & set(other.options)):
            return f"{_written(option)} is an option of {package.name} and of {other.name}"
    for option in sorted(set(package.options) & own):
        return f"{_written(option)} is an option of {package.name} and of {OWN}"
    return ""


def _written(option: str) -> str:
    group, _, name = option.partition("/")
    return f"{group}={name}" if name else group
