"""Runs the command line: it composes, runs, and reports an invalid config with one line. Starts no jax.

As a program (`python -m dpx.launch.command`) it runs one point of a sweep, for a command in another process (`dpx.launch.side_by_side`).
"""

import logging
import os
import pickle
import sys
import threading

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import run_job
from hydra.types import HydraContext

from dpx import config, packages
from dpx.config.command_line import as_refused
from dpx.config.hydra_version import VERSION_BASE, user_may_run_anything
from dpx.config.with_hydra import set_up_hydra
from dpx.console import Console, answers_alone, closed_pipe, require_standard_streams, set_form, tell
from dpx.declaration import ConfigError, require
from dpx.launch.late import LateSweep, register_launchers, register_resolvers
from dpx.launch.refused import NothingLeft, log_uncaught
from dpx.processes import Place, interruption, place, team
from dpx.processes.team import LOST, PeerLost, as_lost, disconnect, join, leave

# Hydra's flags; `run` takes away dpx's own.
FLAGS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--shell-completion"),
    *("--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info"),
)


def run() -> None:
    """Runs the command line of this process; its exit codes are those of `dpx.__main__.main`."""
    require_standard_streams()
    log_uncaught()
    # They decide what is printed; Hydra knows neither.
    given = sys.argv[1:]
    set_form("json" if "--json" in given else "quiet" if "--quiet" in given else "text")
    sys.argv[1:] = [argument for argument in given if argument not in ("--json", "--quiet")]
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
    # Answered without Hydra, which would first list every group of the config.
    if any(one == "-h" or (len(one) > 3 and "--help".startswith(one)) for one in sys.argv[1:]):
        from dpx.config.reference import help_text

        Console(soft_wrap=True, markup=False, highlight=False).print(help_text(), end="")
        return
    interruption.install()
    try:
        with answers_alone():
            _run()
    finally:
        interruption.release()


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
    sweep = LateSweep()
    register_launchers(sweep)

    def one_job(cfg):
        return sweep(cfg)

    parts = (
        hydra.main(config_path=str(packages.conf_directory()), config_name="config", **VERSION_BASE)(one_job),
        sweep.show,
        sys.stdout.flush,
    )
    for part in parts:
        try:
            with user_may_run_anything():
                part()
        except interruption.Interrupted as interrupted:
            sweep.get().gather()
            tell(str(interrupted))
            sys.exit(interrupted.exit_code)
        except NothingLeft as complete:
            from dpx.launch.search import CloseStudy

            sweep.get()
            CloseStudy().on_multirun_end(complete.config)
        except BrokenPipeError:
            sweep.failures.append(closed_pipe())
        except Exception as error:
            sweep.failures.append(error)
    if sweep.failures:
        # Prints a reason that stopped every point once.
        code = max(_answer(error) for error in {str(error): error for error in sweep.failures}.values())
        interruption.end_in_time(code)
        sys.exit(code)


def _answer(error: Exception) -> int:
    """Prints the line for one error and returns its exit code."""
    refused = as_refused(error, sys.argv[1:])
    refused = refused or as_lost(error, team())
    if refused is not None:
        tell(f"error: {refused}")
        return LOST if isinstance(refused, PeerLost) else 2
    words = " ".join(str(error).split()) or "no message"
    from dpx.launch.sweep import PointFailed, PointLost

    if isinstance(error, PointLost):
        tell(f"error: {words}. The same command resumes it; if memory ran out, let fewer points run at once")
        return 1
    name = "" if isinstance(error, PointFailed) else f"{type(error).__name__}: "
    tell(f"error: {name}{words}. The traceback is in the run's private/dpx.log.")
    return 1


def run_point() -> None:
    """Runs the point that the command writes to standard input, and ends when the command is gone."""
    from dpx.processes.supervisor import end_with

    logging.raiseExceptions = False
    log_uncaught()
    interruption.install()
    try:
        config.register_resolvers()
        register_resolvers()
        set_up_hydra()
        name, loader, callbacks, sweep, point = pickle.load(sys.stdin.buffer)
        lifeline = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        threading.Thread(target=end_with, args=(lifeline,), daemon=True, name="lifeline").start()
        GlobalHydra.instance().initialize(Hydra(name, loader))
        with user_may_run_anything():
            run_job(sweep, point, "hydra.sweep.dir", "hydra.sweep.subdir", HydraContext(config_loader=loader, callbacks=callbacks))
    except interruption.Interrupted as interrupted:
        sys.exit(interrupted.exit_code)
    finally:
        interruption.release()


if __name__ == "__main__":
    run_point()
