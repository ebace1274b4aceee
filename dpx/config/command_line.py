"""Converts errors of Hydra and OmegaConf to the error format of this program: value, reason, fix."""

import errno
import re

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from dpx import packages
from dpx.config.node import nearest, unknown_key
from dpx.config.with_hydra import register_search_path
from dpx.declaration import ConfigError
from dpx.extras import missing
from dpx.packages import conf_directory

# Errors from a folder or a file of the user; any other error of the operating system is a defect of dpx.
_OF_A_PLACE = {
    getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "ENOENT", "EEXIST", "ENAMETOOLONG", "ELOOP")
}
# Errors from a disk that is full or fails.
_OF_A_DISK = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "ESTALE")}


def as_refused(error: BaseException) -> ConfigError | None:
    """Returns the user's mistake that `error` or its cause reports, as a `ConfigError`; `None` for a defect of the program."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        if isinstance(cause, ConfigError):
            return cause
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for link in chain:
        if isinstance(link, MissingConfigException):
            return _unknown_option(link)
        if isinstance(link, OverrideParseException):
            return ConfigError(link.override, "is not of the form key=value", "Quote values that hold commas, spaces or brackets")
    for link in chain:
        if isinstance(link, MarkedYAMLError):
            return _broken_yaml(link)
        if isinstance(link, OSError) and link.errno in _OF_A_DISK:
            place = link.filename if link.filename is not None else "the disk"
            return ConfigError(
                place, (link.strerror or "cannot be used").lower(), "Free space or repair the disk, and run the same command"
            )
        if isinstance(link, OSError) and link.filename is not None and link.errno in _OF_A_PLACE:
            return ConfigError(link.filename, (link.strerror or "cannot be used").lower(), "Name a folder that can be made and written to")
    for link in chain:
        if isinstance(link, ConfigCompositionException):
            return _impossible_override(link)
        if isinstance(link, OmegaConfBaseException):
            return ConfigError(link.full_key or "config", _first_line(link), "Correct the value")
        if isinstance(link, ValueError) and _first_line(link).startswith("Config group override must be a string"):
            return ConfigError(
                "command line", "a config group is set to a value that is not the name of an option", "Name an option, as in data=text"
            )
        ambiguous = re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", _first_line(link))
        if isinstance(link, HydraException) and ambiguous:
            key, values = ambiguous.groups()
            fix = f"Write one list as '{key}=[{values}]', or launch a sweep with -m"
            return ConfigError(f"{key}={values}", "could be one list or several values", fix)
        if isinstance(link, HydraException):
            return ConfigError("command line", _first_line(link), "See python -m dpx --help")
    return None


def _broken_yaml(error: MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    place = f"{mark.name}:{mark.line + 1}" if mark else "a YAML file"
    return ConfigError(place, f"is not YAML ({' '.join((error.problem or str(error)).split())})", "Correct it")


def _unknown_option(error: MissingConfigException) -> ConfigError:
    wanted = error.missing_cfg_file or "config"
    group, _, option = wanted.rpartition("/")
    options = list(error.options or [])
    if group == "hydra/sweeper" and option == "optuna":
        # These options come with the extra.
        return missing("hydra/sweeper=search", "tune")
    for package in packages.listed():
        if package.set_aside and wanted in package.options:
            return ConfigError(
                f"{group}={option}", f"dpx ignores the package {package}: {package.set_aside}", "Uninstall or correct one of them"
            )
    if not options:
        return ConfigError(wanted, "no such config", "See conf/ for the configs that exist")
    return ConfigError(f"{group}={option}", "no such option", f"Use one of {', '.join(_closest_first(option, options))}")


def _closest_first(option: str, options: list[str]) -> list[str]:
    close = nearest(option, options).removeprefix(", such as ")
    return [close, *(name for name in options if name != close)] if close else options


def _impossible_override(error: ConfigCompositionException) -> ConfigError:
    """Returns the error for an override of a key or a group that does not exist."""
    message = str(error)
    matched = re.search(r"Could not (?:override|append|delete)[^']*'([^']+)'", message)
    key = matched.group(1).partition("@")[0] if matched else "command line"
    append = re.search(r"use (\+\S+)", message)
    if append and "default list" in message:
        return ConfigError(key, "is not in the default config", f"Write {append.group(1)}")
    if matched is None or "not in struct" not in f"{message} {error.__cause__}":
        return ConfigError(key, _first_line(error), "See python -m dpx --help")
    return unknown_key(key, _siblings(key))


def _siblings(key: str) -> list[str]:
    """Returns the keys of the default config at the level of `key`."""
    if not GlobalHydra.instance().is_initialized():
        register_search_path()
        with initialize_config_dir(str(conf_directory()), version_base="1.3"):
            cfg = compose("config")
    else:
        cfg = compose("config")
    parent = OmegaConf.select(cfg, key.rpartition(".")[0]) if "." in key else cfg
    beside = parent if isinstance(parent, DictConfig) else cfg
    return [str(name) for name in beside if not str(name).startswith("_")]


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
