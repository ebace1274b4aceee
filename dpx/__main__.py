"""Starts the command line. Importing this module changes nothing in the process; `main` does, before it imports Hydra."""

import os
import signal
import sys
import threading


def main() -> None:
    """Runs the command line and returns its exit code.

    0: success. 2: `error: <value>: <reason>. <fix>` for a mistake that the user can correct. 1: a defect of the program. 130 and 143:
    Ctrl-C and SIGTERM, with one line that says how to resume.
    """
    # Until `run` handles it, Ctrl-C ends without a traceback: importing takes a second or two.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Hydra would otherwise print its own, shortened, traceback and leave with another exit code.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        from dpx.launch.command import run
    except ModuleNotFoundError as missing:
        # A checkout that was never installed, run by an interpreter without its dependencies.
        line = f"{missing.name}: is not installed for {sys.executable}. In the checkout run pip install -c requirements.lock -e ."
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
