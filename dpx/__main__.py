"""The command line: compose, run, and answer what cannot stand with one line. Starts no jax."""

import logging
import os
import signal
import sys
import threading

# Until `main` handles it, Ctrl-C ends without a traceback: importing takes a second or two.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# Hydra would otherwise print its own, shortened, traceback and leave with another exit code.
os.environ["HYDRA_FULL_ERROR"] = "1"

try:
    import hydra

    from dpx import config, interruption, packages
    from dpx.config import search_path
    from dpx.config.command_line import as_refused
    from dpx.console import closed_pipe, require_standard_streams, tell, wide_console
    from dpx.launch import resolvers, sweep
    from dpx.launch.launcher import CloseStudy, Launcher
except ModuleNotFoundError as missing:
    # A checkout that was never installed, by an interpreter that has none of what it needs.
    line = f"{missing.name}: is not installed for {sys.executable}. In the checkout run pip install -c requirements.lock -e ."
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Exit code 0; 2 with `error: <value>: <reason>. <fix>` for what the user can correct; 1 for a defect; 130 and 143 for Ctrl-C and
    SIGTERM, with one line that says how to go on."""
    require_standard_streams()
    interruption.install()
    try:
        _run()
    finally:
        interruption.release()


def _run() -> None:
    # A log that cannot be written (a full disk) must not bury the one line below.
    logging.raiseExceptions = False
    config.register_resolvers()
    resolvers.register_resolvers()
    search_path.register()
    launcher = Launcher()
    CloseStudy.failures = launcher.failures

    def run(cfg):
        return launcher(cfg)

    parts = (
        hydra.main(config_path=str(packages.conf_directory()), config_name="config", version_base="1.3")(run),
        lambda: _show_sweep(launcher),
        sys.stdout.flush,
    )
    for part in parts:
        try:
            part()
        except interruption.Interrupted as interrupted:
            tell(str(interrupted))
            sys.exit(interrupted.exit_code)
        except resolvers.NothingLeft as complete:
            CloseStudy().on_multirun_end(complete.config)
        except BrokenPipeError:
            launcher.failures.append(closed_pipe())
        except Exception as error:
            launcher.failures.append(error)
    if launcher.failures:
        # One line for a reason that stopped every point.
        sys.exit(max(_answer(error) for error in {str(error): error for error in launcher.failures}.values()))


def _show_sweep(launcher: Launcher) -> None:
    """A search ends with a table of its own: of all trials, also those of earlier launches."""
    if launcher.is_sweep and launcher.study is None:
        sweep.show(launcher.outcomes, wide_console())


def _answer(error: Exception) -> int:
    """Prints the line for one error; the exit code it asks for."""
    refused = as_refused(error)
    if refused is not None:
        tell(f"error: {refused}")
        return 2
    words = " ".join(str(error).split()) or "no message"
    tell(f"error: {type(error).__name__}: {words}. The traceback is in the run's private/dpx.log.")
    return 1


if __name__ == "__main__":
    main()
