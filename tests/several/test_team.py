"""The one exchange of a step: what each process reports reaches all of them."""

import logging
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dpx.declaration import ConfigError
from dpx.files import orbax_checkpoints
from dpx.processes import interruption, supervisor
from dpx.processes.place import Place
from dpx.processes.signing import SHORTEST, Signer
from dpx.processes.team import LOST, PeerLost, Team, as_lost, is_not_of_a_loss, tells_of_a_loss

KEY = b"k" * SHORTEST
# The signal that the process played by this thread received.
OWN = threading.local()


class Store:
    """The part of the key-value store of `jax.distributed` that messages use."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            if key in self._values:
                raise RuntimeError(f"ALREADY_EXISTS: Config key {key} already exists.")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, wait_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, wait_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self._values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self._values.items() if key.startswith(prefix)]

    def key_value_delete(self, key: str) -> None:
        self._values.pop(key, None)


@pytest.fixture
def teams() -> list[Team]:
    store = Store()
    return [Team(Place(index, 3, "a:1"), store, Signer(KEY, "nonce")) for index in range(3)]


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals are received by threads here, each of which plays a process."""
    noted: list[int] = []
    monkeypatch.setattr(interruption, "received", lambda: getattr(OWN, "number", None))
    monkeypatch.setattr(interruption, "is_requested", lambda: bool(noted))
    monkeypatch.setattr(interruption, "note", noted.append)
    return noted


def together(teams: list[Team], sums: list[set[str]], stopped: int | None = None) -> list[set[str]]:
    """The answer that each process has, when process `stopped` received SIGTERM."""

    def one(index: int) -> set[str]:
        OWN.number = 15 if index == stopped else None
        return teams[index].agree(sums[index])

    with ThreadPoolExecutor(3) as pool:
        return [answer.result() for answer in [pool.submit(one, index) for index in range(3)]]


def test_all_processes_know_the_sums_of_all(teams, received):
    assert together(teams, [{"a"}, {"a"}, {"a", "b"}]) == [{"a", "b"}] * 3
    assert together(teams, [{"a"}, {"a"}, {"a"}]) == [{"a"}] * 3 and not received


def test_process_0_takes_note_of_a_signal_that_another_received(teams, received):
    together(teams, [{"a"}] * 3, stopped=2)
    assert received == [15]


def test_a_process_that_could_not_write_ends_all_of_them(teams, received):
    teams[1].note_storage_fault("could not save its part of a checkpoint in run (No space left on device)")
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(own.agree, {"a"}) for own in teams]
    for answer in answers:
        with pytest.raises(ConfigError, match="process 1: could not save its part of a checkpoint in run .No space left on device"):
            answer.result()


def test_one_process_alone_exchanges_nothing():
    assert Team().agree({"a"}) == {"a"}


class JaxRuntimeError(RuntimeError):
    """As jax names its own."""


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


# As jax and Orbax word them where a process is gone.
LOSSES = [
    JaxRuntimeError("UNAVAILABLE: Connection reset by peer"),
    JaxRuntimeError("DEADLINE_EXCEEDED: Gloo context initialization failed: Connect timeout"),
    ValueError("INTERNAL: Barrier failed because tasks are unhealthy: /job:jax_worker/replica:0/task:1"),
    TimeoutError("DEADLINE_EXCEEDED: Barrier timed out. Id: orbax_save::3"),
    _caused(ValueError("Errors occurred during the save"), JaxRuntimeError("ABORTED: coordination service has stopped")),
    ExceptionGroup("save", [OSError("no"), JaxRuntimeError("UNAVAILABLE: failed to connect")]),
]
OTHERS = [ValueError("operands could not be broadcast"), JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), OSError(28, "No space left")]


@pytest.mark.parametrize("error", [*LOSSES, *OTHERS], ids=str)
def test_a_lost_process_is_one_wherever_it_is_noticed(teams, error):
    assert tells_of_a_loss(error) == (error in LOSSES)
    assert isinstance(as_lost(error, teams[0]), PeerLost) == (error in LOSSES)
    assert as_lost(error, Team()) is None
    # As `logging.exception` of a thread of Orbax makes it.
    record = logging.LogRecord("absl", logging.ERROR, "thread.py", 1, "the thread failed", (), (type(error), error, None))
    assert is_not_of_a_loss(record) == (error in OTHERS)


def test_a_failed_save_is_told_to_the_others_unless_one_of_them_is_lost(teams, monkeypatch, tmp_path):
    noted = []
    monkeypatch.setattr(orbax_checkpoints, "team", lambda: teams[1])
    monkeypatch.setattr(teams[1], "note_storage_fault", noted.append)
    for error in (*LOSSES, OSError(28, "No space left on device")):
        ended = Future()
        ended.set_exception(error)
        orbax_checkpoints.Checkpoints(tmp_path, 1)._note_fault(ended)
    assert len(noted) == 1 and "No space left on device" in noted[0]


def test_processes_wait_for_each_other_until_a_deadline(teams):
    with ThreadPoolExecutor(3) as pool:
        assert [end.result() for end in [pool.submit(own.meet_within, 60.0) for own in teams]] == [None] * 3
    with pytest.raises(PeerLost, match="not all processes were ready to connect their devices in time"):
        teams[1].meet_within(0.5)


@pytest.mark.parametrize("code", ["os.abort()", "os._exit(134)", "os.kill(os.getpid(), 9)", "os._exit(75)"])
def test_a_worker_that_jax_aborts_is_a_lost_process(monkeypatch, capsys, code):
    monkeypatch.setattr(supervisor, "_as_started", lambda: ["-I", "-S", "-c", f"import os; {code}"])
    monkeypatch.setattr(supervisor.sys, "argv", ["dpx"])
    before = [signal.getsignal(one) for one in interruption.SIGNALS]
    try:
        assert supervisor._watch() == LOST
    finally:
        for one, handler in zip(interruption.SIGNALS, before, strict=True):
            signal.signal(one, handler)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (code != "os._exit(75)") and all(line.startswith("error: process lost: ") for line in said)


# As jax writes them: a record may have several lines.
REPORT = """E1127 07:46:28.806373   26730 coordination_service_agent.cc:289] Polled an error from coordination service.
1
The tasks have crashed.
F1127 07:46:28.806551   26730 client.h:80] Terminating process because the JAX distributed service detected fatal errors.
*** Check failure stack trace: ***
    @     0x7f4779440634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
"""
OTHER = "W1127 07:46:29.000001   26730 cpu_client.cc:12] another warning\nof two lines\n"


@pytest.mark.parametrize(("ends", "is_shown"), [("os.abort()", False), ("os._exit(75)", False), ("os._exit(1)", True)])
def test_reports_of_compiled_code_are_shown_unless_they_are_those_of_a_lost_process(monkeypatch, capfd, ends, is_shown):
    writes = f"os.write(2, {REPORT.encode()!r}); os.write(2, {OTHER.encode()!r}); os.write(int(os.environ[{supervisor.ERRORS!r}]), b'own')"
    monkeypatch.setattr(supervisor, "_as_started", lambda: ["-I", "-S", "-c", f"import os; {writes}; {ends}"])
    monkeypatch.setattr(supervisor.sys, "argv", ["dpx"])
    supervisor._run(0, [])
    said = capfd.readouterr().err
    assert OTHER in said and "own" in said and (REPORT in said) == is_shown and ("stack trace" in said) == is_shown


def test_a_process_whose_peer_is_lost_leaves_before_jax_aborts_it(teams, monkeypatch):
    # The package has a function of the module's name.
    module, left = sys.modules["dpx.processes.team"], []
    monkeypatch.setattr(module, "leave", left.append)
    monkeypatch.setattr(module, "_FAREWELL_SECONDS", float("inf"))
    # Of three, process 2 says no more.
    teams[1].say_ended()
    teams[0].dismiss(LOST)
    assert left == [LOST]
    monkeypatch.setattr(module, "_FAREWELL_SECONDS", 0.0)
    teams[0].dismiss(0)
    assert left == [LOST, 0]
    monkeypatch.setattr(module, "_FAREWELL_SECONDS", float("inf"))
    teams[2].say_ended()
    teams[0].dismiss(0)
    assert left == [LOST, 0]
