"""The entry point of the command line. Importing it changes nothing in the process; `main` does, before it imports Hydra."""

import os
import signal
import sys
import threading


def main() -> None:
    """Exit code 0; 2 with `error: <value>: <reason>. <fix>` for what the user can correct; 1 for a defect; 130 and 143 for Ctrl-C and
    SIGTERM, with one line that says how to resume."""
    # Until `run` handles it, Ctrl-C ends without a traceback: importing takes a second or two.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Hydra would otherwise print its own, shortened, traceback and leave with another exit code.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        from dpx.launch.command import run
    except ModuleNotFoundError as missing:
        # A checkout that was never installed, by an interpreter that has none of what it needs.
        line = f"{missing.name}: is not installed for {sys.executable}. In the checkout run pip install -c requirements.lock -e ."
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
