"""The console script `dpx-launch -n 4 <overrides>`: starts several processes of one job on this machine.

A scheduler does the same on several machines (`dpx/docs/processes.md`). It is for a machine with several GPUs, and for tests. The processes
meet at a Unix socket, in a folder that this user alone can open, where the key of the job lies too.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dpx.processes.interruption import SIGNALS
from dpx.processes.place import COORDINATOR, UNIX
from dpx.processes.signing import BIND, KEY, KEY_FILE


def main() -> None:
    """Runs `python -m dpx <overrides>` in each process; ends with the largest of their exit codes."""
    parser = argparse.ArgumentParser(prog="dpx-launch", description="Starts several processes of one job on this machine.")
    parser.add_argument("-n", "--processes", type=int, required=True, help="number of processes")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="what `python -m dpx` takes")
    given = parser.parse_args()
    if given.processes < 1:
        print(f"error: -n {given.processes}: a job has at least one process. Use 1 or more", file=sys.stderr)
        sys.exit(2)
    sys.exit(launch(given.processes, given.overrides))


def launch(processes: int, overrides: list[str], module: str = "dpx") -> int:
    """Starts the processes, each with `module` as its program, and waits for them; signals are handed on to all."""
    # A socket's path has about a hundred characters, and the folder for temporary files may have a long one.
    with tempfile.TemporaryDirectory(prefix="dpx-", dir="/tmp") as folder:
        key = Path(folder) / "key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        shared = os.environ | {COORDINATOR: f"{UNIX}{folder}/store", "JAX_NUM_PROCESSES": str(processes), KEY_FILE: str(key)}
        for name in (KEY, BIND):
            shared.pop(name, None)
        started = [
            subprocess.Popen([sys.executable, "-m", module, *overrides], env=shared | {"JAX_PROCESS_ID": str(index)}, process_group=0)
            for index in range(processes)
        ]
        for number in SIGNALS:
            signal.signal(number, lambda received, _: [one.send_signal(received) for one in started if one.poll() is None])
        return max(one.wait() for one in started)


if __name__ == "__main__":
    main()
