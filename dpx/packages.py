"""Finds packages from outside this tree that add to dpx, by the entry point group `dpx.packages`, without importing them.

An entry point names an importable package: `dpx_pond = "dpx_pond"`. Its options are the YAML files in its folder `conf/`, and a `_target_`
may name what it declares. The same list is used for a command line, for `run=<folder>` and for `dpx.load`. A package whose name or option
also belongs to another one is set aside as a whole, with a reason: nothing of it can be named, and dpx's own jobs run without it.

dpx's own distribution lists a package too, the one with the analyses and the pages of papers. It is dpx's own code, by the metadata of its
distribution and not by its name.

Optional packages are checked here too: which extra installs each, with one error message for every missing package.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dpx.declaration import ConfigError

GROUP = "dpx.packages"
OWN = "dpx"
# What a statement names in place of a package for a training loop of the user's own (`dpx.Ledger`); no package may have this name.
USER_LOOP = "user_loop"
# What is installed: the name in pyproject.toml. `dpx` is the distribution of another project.
DISTRIBUTION = "dpx-lm"


@dataclasses.dataclass(frozen=True)
class Package:
    """Describes one listed package.

    `name` is its import name, `folder` the folder of its source; `options` are paths below its `conf/`, such as `mechanism/ripple`;
    `set_aside` is the reason why it is not used, empty if it is used. `is_own` says that dpx's own distribution installed this folder.
    """

    name: str
    distribution: str
    version: str
    folder: Path | None
    options: tuple[str, ...] = ()
    set_aside: str = ""
    is_own: bool = False

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
    changed = []
    for folder in sys.path:
        try:
            changed.append((folder, os.stat(folder or ".").st_mtime_ns))
        except OSError:
            changed.append((folder, 0))
    return _listed(tuple(changed))


def usable() -> tuple[Package, ...]:
    """Returns the listed packages that are not set aside: their options and declarations may be named."""
    return tuple(package for package in listed() if not package.set_aside)


def outside() -> tuple[Package, ...]:
    """Returns the listed packages that are not dpx's own."""
    return tuple(package for package in listed() if not package.is_own)


def named(name: str) -> Package | None:
    """Returns the listed package that is imported by `name`, dpx's own where another distribution lists the name too."""
    return next((package for package in listed() if package.name == name), None)


def is_of_dpx(name: str) -> bool:
    """Returns whether `name` is dpx, or a package that dpx's own distribution installed and that nothing else is imported for."""
    if name == OWN:
        return True
    folders = [package.folder for package in listed() if package.name == name and package.is_own]
    if not folders or folders[0] is None:
        return False
    place = getattr(sys.modules[name], "__file__", None) or "" if name in sys.modules else folders[0] / "__init__.py"
    return Path(place).resolve().parent == folders[0].resolve()


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


def own_folders() -> list[Path]:
    """Returns the folders of dpx's own options."""
    return [conf_directory(), *(package.conf for package in usable() if package.is_own)]


def is_own(group: str, name: str) -> bool:
    """Returns whether the option `name` of `group` is dpx's own."""
    return any((folder / group / f"{name}.yaml").is_file() for folder in own_folders())


def is_group(name: str) -> bool:
    """Returns whether dpx has a group of options of this name."""
    return any((folder / name).is_dir() for folder in own_folders())


def option_file(group: str, name: str) -> Path:
    """Returns the file of the option `name` of `group`, dpx's own first."""
    return next(path for _, conf in folders() if (path := conf / group / f"{name}.yaml").is_file())


def names_in(group: str) -> list[str]:
    """Returns the options of a group, in alphabetical order; an option in a subfolder is named by its path below the group."""
    options = (path.relative_to(folder / group).with_suffix("") for _, folder in folders() for path in (folder / group).rglob("*.yaml"))
    return sorted(path.as_posix() for path in options)


def described() -> str:
    """Returns the packages of others for `--help`, one per line; empty if none is installed."""
    lines = [f"  {package}: {package.set_aside or ', '.join(assignments(package)) or 'no options'}" for package in outside()]
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
    packages = sorted(by_entry.values(), key=lambda package: (package.name, not package.is_own, package.distribution))
    # dpx itself counts once too where two records of it are left, such as those before and after its distribution was renamed.
    own = {package.name: package for package in packages if package.is_own}
    packages = [package for package in packages if not package.is_own or package is own[package.name]]
    # A package is set aside if its name or an option also belongs to another one, or to dpx's own, which stays.
    of_dpx = [package for package in packages if package.is_own]
    taken = {option: OWN for option in _options(conf_directory())}
    taken |= {option: package.name for package in of_dpx for option in package.options}
    checked = []
    for package in packages:
        others = of_dpx if package.is_own else [other for other in packages if not other.set_aside]
        reason = package.set_aside or _clash(package, [other for other in others if other is not package], taken)
        checked.append(dataclasses.replace(package, set_aside=reason))
    return tuple(checked)


def _distribution(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.name


def _package(entry: metadata.EntryPoint) -> Package:
    name, version = entry.value, entry.dist.version if entry.dist else "unknown"
    package = Package(name, _distribution(entry), version, None)
    if not name.isidentifier():
        return dataclasses.replace(package, set_aside=f"its entry point names {name!r}, which is not a top-level package")
    if name in (OWN, USER_LOOP) or name in sys.stdlib_module_names:
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
    is_own = entry.dist is not None and _is_installed_with_dpx(entry.dist, folder)
    return dataclasses.replace(package, folder=folder, options=_options(folder / "conf"), is_own=is_own)


def _is_installed_with_dpx(distribution: metadata.Distribution, folder: Path) -> bool:
    """Returns whether one distribution installed the running dpx and the package in `folder`.

    A wheel's record lists the files of both. An editable installation's record names the checkout that both are read from.
    """
    dpx, folder = Path(__file__).resolve().parent, folder.resolve()
    files = {str(file) for file in distribution.files or ()}
    if f"{OWN}/__init__.py" in files:
        return all(
            f"{one.name}/__init__.py" in files and Path(str(distribution.locate_file(one.name))).resolve() == one for one in (dpx, folder)
        )
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    address = urlsplit(origin.get("url", ""))
    if address.scheme != "file" or not origin.get("dir_info", {}).get("editable"):
        return False
    checkout = Path(unquote(address.path)).resolve()
    return dpx.parent == checkout and folder.is_relative_to(checkout)


def _clash(package: Package, others: list[Package], own: dict[str, str]) -> str:
    for other in others:
        if other.name == package.name:
            return f"{package.distribution} and {other.distribution} both provide {package.name}"
        for option in sorted(set(package.options) & set(other.options)):
            return f"{_written(option)} is an option of {package.name} and of {other.name}"
    for option in sorted(option for option in package.options if own.get(option, package.name) != package.name):
        return f"{_written(option)} is an option of {package.name} and of {own[option]}"
    return ""


def _written(option: str) -> str:
    group, _, name = option.partition("/")
    return f"{group}={name}" if name else group


# Extra -> the package that must be importable for it.
PACKAGES = {
    "hub": "datasets",
    "chat": "jinja2",
    "tune": "optuna",
    "plots": "matplotlib",
    "papers": "pandas",
    "correlated": "jax_privacy",
    "launchers": "submitit",
    "wandb": "wandb",
    "mlflow": "mlflow",
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
    for package in usable():
        if package.is_own:
            return getattr(importlib.import_module(f"{package.name}.supplied"), name)
    return None
