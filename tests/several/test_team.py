"""The one exchange of a step: what each process reports reaches all of them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpx import interruption
from dpx.declaration import ConfigError
from dpx.processes.place import Place
from dpx.processes.team import Team

# The signal that the process played by this thread received.
OWN = threading.local()


class Store:
    """The part of the key-value store of `jax.distributed` that messages use."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
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
    return [Team(Place(index, 3, "a:1"), store) for index in range(3)]


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
