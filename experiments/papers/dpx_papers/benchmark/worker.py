"""Runs programs in a separate process: one process has one device count and one framework, and waits while others are timed."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from dpx.declaration import ConfigError
from dpx.processes.mesh import simulate_devices
from dpx_papers.benchmark.setting import Setting

# Threads that spin while they wait would slow whoever is timed meanwhile.
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


class Worker:
    """The parent's handle of one benchmark process. `facts` describes its programs, in order."""

    def __init__(self, connection: Connection, process: Any):
        self._connection, self._process = connection, process
        self.facts: list[dict[str, Any]] = self._answer()

    def seconds(self, index: int) -> float:
        """Returns the seconds that one call of program `index` takes."""
        self._connection.send(index)
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a benchmark process died with exit code {self._process.exitcode} (out of memory?)") from None
        if kind == "refused":
            raise ConfigError(*value)
        if kind == "failed":
            raise RuntimeError(f"a benchmark process failed: {value}")
        return value


@contextlib.contextmanager
def worker(module: str, setting: Setting) -> Iterator[Worker]:
    """Starts a process that imports `module` and serves `module.programs(setting)`, and ends it when the context ends."""
    spawned = multiprocessing.get_context("spawn")
    here, there = spawned.Pipe()
    process = spawned.Process(target=serve, args=(there, module, setting), daemon=True)
    process.start()
    there.close()
    try:
        yield Worker(here, process)
        here.send(None)
        process.join(timeout=10)
    finally:
        process.kill()
        process.join()


def serve(connection: Connection, module: str, setting: Setting) -> None:
    """Runs in the child: builds the programs, then times a program whenever its index arrives, until None arrives."""
    # Ctrl-C reaches the parent's children too; only the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _prepare(setting)
        programs = importlib.import_module(module).programs(setting)
        connection.send(("facts", [program.facts for program in programs]))
        while (index := connection.recv()) is not None:
            began = time.perf_counter()
            programs[index].call()
            connection.send(("seconds", time.perf_counter() - began))
    except ConfigError as refused:
        connection.send(("refused", (refused.value, refused.reason, refused.fix)))
    except Exception:
        connection.send(("failed", traceback.format_exc()))


def _prepare(setting: Setting) -> None:
    """Sets this process's device count and waiting policy, before any framework is imported."""
    for name, value in _PATIENT.items():
        os.environ.setdefault(name, value)
    if setting.experiment.mesh.simulated_devices is None:
        # The parent's own mesh may have left its count here.
        flags = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if "xla_force_host_platform_device_count" not in flag)
    simulate_devices(setting.experiment.mesh, setting.experiment.mesh.simulated_devices)
