"""Converts errors of Hydra and OmegaConf to the error format of this program: value, reason, fix."""

import contextlib
import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from dpx import packages
from dpx.config import node, reference
from dpx.config.node import nearest, unknown_key
from dpx.config.with_hydra import started
from dpx.declaration import ConfigError
from dpx.packages import missing, without_papers

# Errors from a folder or a file of the user; any other error of the operating system is a defect of dpx.
_OF_A_PLACE = {
    getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "ENOENT", "EEXIST", "ENAMETOOLONG", "ELOOP")
}
# Errors from a disk that is full, fails or is gone.
_OF_A_DISK = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "ESTALE", "ENODEV", "ENXIO", "ENOTCONN", "EREMOTEIO")}

# What else the system may refuse, with the fix.
_OF_THE_SYSTEM = {
    errno.ENOLCK: "Name a folder on a file system that has locks",
    errno.EINVAL: "Its file system cannot put it on disk safely (fsync); name a folder on another one",
    errno.EOPNOTSUPP: "Name a folder on a file system that has locks and fsync",
    errno.EMFILE: "Raise the limit of open files, as with ulimit -n 4096, and run the same command",
    errno.ENFILE: "Close other programs, or raise the system's limit of open files, and run the same command",
}

_HYDRAS_KEYS = "Remove it, or set a key that python -m dpx --cfg hydra prints to a value of the same kind"
_ALL_RECIPES = "python -m dpx job=list shows every recipe"


def as_refused(error: BaseException, overrides: Sequence[str] = ()) -> ConfigError | None:
    """Returns the user's mistake that `error` or its cause reports, as a `ConfigError`; `None` for a defect of the program.

    `overrides` are those of the command line; some errors of Hydra do not name the override that caused them.
    """
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
            return ConfigError(link.override, "is not of the form key=value", _meant_by_a_word(link.override or ""))
    for link in chain:
        if isinstance(link, MarkedYAMLError):
            mark = link.problem_mark or link.context_mark
            place = f"{mark.name}:{mark.line + 1}" if mark else "a YAML file"
            return ConfigError(place, f"is not YAML ({' '.join((link.problem or str(link)).split())})", "Correct it")
        if isinstance(link, OSError) and link.errno in _OF_A_DISK:
            place = link.filename if link.filename is not None else "the disk"
            return ConfigError(
                place, (link.strerror or "cannot be used").lower(), "Free space or repair the disk, and run the same command"
            )
        if isinstance(link, OSError) and link.errno in _OF_THE_SYSTEM and (link.filename or link.errno != errno.EINVAL):
            return ConfigError(link.filename or "this machine", (link.strerror or "refused").lower(), _OF_THE_SYSTEM[link.errno])
        if isinstance(link, OSError) and link.filename is not None and link.errno in _OF_A_PLACE:
            return ConfigError(link.filename, (link.strerror or "cannot be used").lower(), "Name a folder that can be made and written to")
    for link in chain:
        ambiguous = re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", _first_line(link))
        if isinstance(link, HydraException) and ambiguous:
            return _several_values(*ambiguous.groups())
        if isinstance(link, ConfigCompositionException):
            return _impossible_override(link)
        if isinstance(link, OmegaConfBaseException):
            return ConfigError(link.full_key or "config", _first_line(link), "Correct the value")
        if isinstance(link, ValueError) and _first_line(link).startswith("Config group override must be a string"):
            return _not_an_option(overrides)
        if isinstance(link, HydraException):
            # Of what it could not make, Hydra says the reason on the second line.
            reason = " ".join(str(link).splitlines()[:2]) if _first_line(link).endswith(":") else _first_line(link)
            return ConfigError("command line", reason, "See python -m dpx --help")
    own, trace = [override for override in overrides if _is_of_hydra(override)], error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    # Hydra raised it, or the logging that it set up as its node says.
    if own and module.partition(".")[0] in ("hydra", "hydra_plugins", "omegaconf", "logging", "os"):
        return ConfigError(" ".join(own), f"Hydra cannot use this ({_first_line(error)})", _HYDRAS_KEYS)
    return None


def _is_of_hydra(override: str) -> bool:
    return re.match(r"[+~]*hydra[./=@]", override) is not None


def _meant_by_a_word(word: str) -> str:
    """Returns the fix for a word without `=`: other programs write the name of a command, or a folder, like this."""
    if word in packages.names_in("job"):
        return f"Write job={word}"
    if re.fullmatch(r"[\w./-]+", word) and (Path(word).is_dir() or any(Path("outputs").glob(f"{Path(word).name}-*"))):
        return f"Write run={word}"
    key, _, value = word.partition("=")
    quoted = f'{key}="{value}"'
    if value and not re.search(r"[\"'\[\]{}]", value):
        with contextlib.suppress(HydraException):
            OverridesParser.create().parse_override(quoted)
            return f"Write '{quoted}', with both quotes"
    return "Quote values that hold other characters than letters, digits and -_./:@%+"


def _unknown_option(error: MissingConfigException) -> ConfigError:
    wanted = error.missing_cfg_file or "config"
    group, _, option = wanted.rpartition("/")
    options = list(error.options or [])
    if group == "hydra/sweeper" and option == "optuna":
        # These options come with the extra.
        return missing("hydra/sweeper=search", "tune")
    if group == "hydra/launcher" and option in ("joblib", "submitit_local", "submitit_slurm"):
        return missing(f"hydra/launcher={option}", "launchers", f"hydra-{option.partition('_')[0]}-launcher")
    for package in packages.listed():
        if package.set_aside and wanted in package.options:
            return ConfigError(
                f"{group}={option}", f"dpx ignores the package {package}: {package.set_aside}", "Uninstall or correct one of them"
            )
    if group == "experiment":
        close = nearest(option, packages.names_in(group)).removeprefix(", such as ")
        return ConfigError(
            f"experiment={option}", "no such recipe", (f"Did you mean +experiment={close}? " if close else "") + _ALL_RECIPES
        )
    if group == "analysis" and not packages.is_group(group):
        return without_papers(f"{group}={option}")
    if not options:
        return ConfigError(wanted, "no such config", "See conf/ for the configs that exist")
    listed = f"The options are {', '.join(options)}"
    listed += "" if group != "job" or any(one.is_own for one in packages.usable()) else f". {without_papers(option).fix}"
    meant = node.of_option(group, option, options)
    if meant is None and (close := nearest(option, options).removeprefix(", such as ")):
        meant = f"Did you mean {group}={close}?"
    # Nobody knows the options of a package that was not found.
    listed += "".join(f". dpx ignores the package {one}: {one.set_aside}" for one in packages.listed() if one.folder is None)
    fix = listed if meant is None else f"{meant}{'' if meant.endswith('?') else '.'} {listed}"
    return ConfigError(f"{group}={option}", "no such option", fix)


def _not_an_option(overrides: Sequence[str]) -> ConfigError:
    """Returns the error for a config group that is set to a number or to null, which Hydra reports without the override."""
    for override in overrides:
        group, _, value = override.partition("=")
        if value.lower() in ("null", "none", "true", "false") or re.fullmatch(r"[\d.e+-]+", value):
            reason = f"{value} is not the name of an option"
            if packages.is_group(group):
                return ConfigError(override, reason, node.of_group_value(group, value))
            if _is_of_hydra(override):
                return ConfigError(override, reason, _HYDRAS_KEYS)
    reason = "a config group is set to a value that is not the name of an option"
    return ConfigError("command line", reason, "Name an option, as in data=text")


def _several_values(key: str, values: str) -> ConfigError:
    """Returns the error for `key=a,b` without `-m`: a list only where the default config does not hold one number."""
    with started():
        default = OmegaConf.select(compose("config"), key)
    if isinstance(default, int | float) or packages.is_group(key):
        return ConfigError(
            f"{key}={values}", "names several values, and this command starts one run", f"Add -m: python -m dpx -m {key}={values}"
        )
    fix = f"Write one list as '{key}=[{values}]', or launch a sweep with -m"
    return ConfigError(f"{key}={values}", "could be one list or several values", fix)


def _impossible_override(error: ConfigCompositionException) -> ConfigError:
    """Returns the error for an override of a key or a group that does not exist."""
    message = str(error)
    cause = error.__cause__ or error
    if _first_line(error).startswith("Error merging override "):
        override = _first_line(error).removeprefix("Error merging override ")
        fix = _HYDRAS_KEYS if _is_of_hydra(override) else "Give a value of its kind"
        return ConfigError(override, _first_line(cause), fix)
    matched = re.search(r"Could not (?:override|append|delete)[^']*'([^']+)'", message)
    key = matched.group(1).partition("@")[0] if matched else "command line"
    if _is_of_hydra(f"{key}="):
        return ConfigError(key, _first_line(cause), _HYDRAS_KEYS)
    append = re.search(r"use (\+\S+)", message)
    if append and "default list" in message:
        group, _, option = append.group(1).removeprefix("+").partition("=")
        if group == "experiment" and option not in packages.names_in(group):
            return _unknown_option(MissingConfigException("", f"{group}/{option}"))
        return ConfigError(key, "is not in the default config", f"Write {append.group(1)}")
    if inside := re.match(r"In '([^']+)': ", message):
        # The reason is on the second line.
        return ConfigError(f"{inside[1]}.yaml", (message.splitlines()[1:] or [_first_line(cause)])[0], "Correct the file")
    if not message:
        return ConfigError(getattr(cause, "full_key", None) or key, _first_line(cause), "Correct the value")
    if matched is None or "not in struct" not in f"{message} {error.__cause__}":
        return ConfigError(key, _first_line(error), "See python -m dpx --help")
    value = re.search(r"use \+[^=\s]+=(.*)", message)
    # The keys of the default config at the level of `key`.
    cfg = reference.default_keys()
    parent = OmegaConf.select(OmegaConf.create(cfg), key.rpartition(".")[0]) if "." in key else cfg
    beside = [str(name) for name in (parent if isinstance(parent, Mapping) else cfg)]
    return unknown_key(key, [name for name in beside if not name.startswith("_")], value.group(1).strip() if value else "...")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
