"""Runs the command line: it composes, runs, and reports an invalid config with one line. Starts no jax."""

import logging
import os
import sys

import hydra
from hydra._internal.utils import get_args_parser

from dpx import config, packages
from dpx.config.command_line import as_refused
from dpx.config.with_hydra import set_up_hydra
from dpx.console import Console, answers_alone, closed_pipe, require_standard_streams, set_form, tell, wide_console
from dpx.declaration import ConfigError, require
from dpx.launch.late import LateLauncher, NothingLeft, register_resolvers
from dpx.launch.launchers import register_launchers
from dpx.launch.refused import log_uncaught, remove_sweep_if_new
from dpx.processes import Place, interruption, place, team
from dpx.processes.team import LOST, PeerLost, as_lost, disconnect, join, leave

# Hydra's flags; `_without_form` takes away dpx's own.
FLAGS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--shell-completion"),
    *("--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info"),
)


def run() -> None:
    """Runs the command line of this process; its exit codes are those of `dpx.__main__.main`."""
    require_standard_streams()
    log_uncaught()
    sys.argv[1:] = _without_form(sys.argv[1:])
    try:
        _require_flags(sys.argv[1:])
        _require_own_config(sys.argv[1:])
        _require_plain_place()
        own = place()
    except ConfigError as refused:
        tell(f"error: {refused}")
        sys.exit(2)
    if own.count > 1:
        from dpx.processes import supervisor

        sys.exit(supervisor.supervise(lambda: _as_one_of_several(own)))
    if _asks_for_help(sys.argv[1:]):
        from dpx.config.reference import help_text

        Console(soft_wrap=True, markup=False, highlight=False).print(help_text(), end="")
        return
    interruption.install()
    try:
        with answers_alone():
            _run()
    finally:
        interruption.release()


def _without_form(arguments: list[str]) -> list[str]:
    """Returns the arguments without `--json` and `--quiet`, which decide what is printed; Hydra knows neither."""
    asked = {"--json": "json", "--quiet": "quiet"}
    forms = [form for flag, form in asked.items() if flag in arguments]
    set_form("json" if "json" in forms else "quiet" if forms else "text")
    return [argument for argument in arguments if argument not in asked]


def _require_flags(arguments: list[str]) -> None:
    """Raises `ConfigError` for a key that is written as a flag, which Hydra would answer with its own usage."""
    for number, argument in enumerate(arguments, 1):
        flag, _, value = argument.partition("=")
        # Hydra accepts a flag that is cut short.
        if not flag.startswith("--") or any(known.startswith(flag) for known in FLAGS):
            continue
        after = arguments[number] if number < len(arguments) else ""
        value = value or (after if after and "=" not in after and not after.startswith("-") else "...")
        raise ConfigError(flag, "is not a flag", f"Write {flag.strip('-').replace('-', '_')}={value}")


def _require_plain_place() -> None:
    """Raises `ConfigError` for a working folder that was removed, or whose name Hydra would read as an interpolation."""
    try:
        place = os.getcwd()
    except OSError:
        raise ConfigError("the working folder", "does not exist any more", "Start from another folder") from None
    require("${" not in place, place, "the name of this folder holds ${, which is read as an interpolation", "Start from another folder")


def _require_own_config(arguments: list[str]) -> None:
    """Raises `ConfigError` for Hydra's flags that would run what a file says instead of dpx: another main config, or a pickle."""
    given, _ = get_args_parser().parse_known_args(arguments)
    fix = "Use --config-dir for a folder with your own options and recipes"
    require(given.config_path is None, "--config-path", "would take the place of dpx's own config", fix)
    require(given.experimental_rerun is None, "--experimental-rerun", "runs code from the file that it names", "Run the same command again")


def _asks_for_help(arguments: list[str]) -> bool:
    """Returns whether `--help` is among the arguments. It is answered without Hydra, which would first list every group of the config."""
    return any(one == "-h" or (len(one) > 3 and "--help".startswith(one)) for one in arguments)


def _as_one_of_several(own: Place) -> int:
    """Runs this process of a job of several. Process 0 runs the command line, the others do what it tells; returns the exit code."""
    from dpx.processes import supervisor

    interruption.install()
    code = 1
    try:
        joined = join(own, sys.argv[1:])
    except ConfigError as refused:
        tell(f"error: {refused}")
        # The processes of before may not all have ended yet; and jax's exit handlers would wait for processes that never came.
        leave(LOST if supervisor.restart() or isinstance(refused, PeerLost) else 2)
    try:
        if own.is_owner:
            with answers_alone():
                _run()
            code = 0
        else:
            from dpx.training.follower import follow

            with interruption.deferred():
                code = follow(joined)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception as error:
        known = as_refused(error) or as_lost(error, joined)
        if known is None:
            logging.getLogger("dpx").exception("process %d stopped", own.index)
        line = str(known or f"{type(error).__name__}: {' '.join(str(error).split())}")
        joined.fail(line)
        tell(f"error: process {own.index}: {line}")
        leave(2 if isinstance(known, ConfigError) and not isinstance(known, PeerLost) else LOST)
    if own.is_owner:
        joined.dismiss(code)
    else:
        joined.say_ended()
    disconnect(code)
    return code


def _run() -> None:
    # A log that cannot be written (a full disk) must not hide the one line below.
    logging.raiseExceptions = False
    config.register_resolvers()
    register_resolvers()
    set_up_hydra()
    launcher = LateLauncher()
    register_launchers(launcher)

    def one_job(cfg):
        return launcher(cfg)

    parts = (
        hydra.main(config_path=str(packages.conf_directory()), config_name="config", version_base="1.3")(one_job),
        lambda: _show_sweep(launcher),
        sys.stdout.flush,
    )
    for part in parts:
        try:
            part()
        except interruption.Interrupted as interrupted:
            launcher.get().gather()
            tell(str(interrupted))
            sys.exit(interrupted.exit_code)
        except NothingLeft as complete:
            from dpx.launch.launcher import CloseStudy

            launcher.get()
            CloseStudy().on_multirun_end(complete.config)
        except BrokenPipeError:
            launcher.failures.append(closed_pipe())
        except Exception as error:
            launcher.failures.append(error)
    if launcher.failures:
        # Prints a reason that stopped every point once.
        code = max(_answer(error) for error in {str(error): error for error in launcher.failures}.values())
        interruption.end_in_time(code)
        sys.exit(code)


def _show_sweep(launched: LateLauncher) -> None:
    """Prints the points of a sweep that is not a search; a search ends with a table of all trials, including those of earlier launches.

    A sweep that was refused at every point leaves no file.
    """
    launcher = launched.made
    if launcher is None:
        remove_sweep_if_new()
        return
    from dpx.launch import sweep

    launcher.gather()
    if not any(outcome.folder.exists() for outcome in launcher.outcomes):
        remove_sweep_if_new()
    if launcher.is_sweep and not launcher.is_search:
        sweep.show_plans(launcher.outcomes, Console(soft_wrap=True))
        sweep.show(launcher.outcomes, wide_console())
        sweep.write_table(launcher.outcomes, wide_console())
        sweep.show_together(launcher.outcomes, wide_console())


def _answer(error: Exception) -> int:
    """Prints the line for one error and returns its exit code."""
    refused = as_refused(error, sys.argv[1:])
    refused = refused or as_lost(error, team())
    if refused is not None:
        tell(f"error: {refused}")
        return LOST if isinstance(refused, PeerLost) else 2
    words = " ".join(str(error).split()) or "no message"
    from dpx.launch.elsewhere import PointFailed, PointLost

    if isinstance(error, PointLost):
        tell(f"error: {words}. The same command resumes it; if memory ran out, let fewer points run at once")
        return 1
    name = "" if isinstance(error, PointFailed) else f"{type(error).__name__}: "
    tell(f"error: {name}{words}. The traceback is in the run's private/dpx.log.")
    return 1
