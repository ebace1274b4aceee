"""Passes messages between the processes of a job, beside the devices: process 0 tells what is done next, the others hear and do it.

Messages are JSON in the key-value store of `jax.distributed`, one round trip of about a millisecond. No device takes part in them, so
they do not wait for a step that is still being computed. A process that fails leaves one line there, which the others report. Whoever
reaches the store may write there, so each message is signed (`dpx.processes.signing`), and one that is not is never obeyed.
"""

import contextlib
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dpx import __version__
from dpx.console import stage
from dpx.declaration import ConfigError, require
from dpx.processes import interruption, signing
from dpx.processes.place import ALONE, Part, Place, place
from dpx.processes.signing import NotSigned, Signer

HEARTBEAT_SECONDS = 20
# How long a process waits for one message before it looks for failures.
_WAIT_MS = 1000
# How long process 0 waits at the end for the others to have heard it.
_FAREWELL_SECONDS = 10
# Messages are deleted after this many newer ones: each step gathers from all processes, so none is that far behind.
_KEPT = 256
_PREFIX = "dpx"
LOST = 75


_ALONE = "each process of one job would draw its own noise for the same rows"
_JOIN = "Start the processes by dpx-launch or another launcher of python -m dpx, which connects them"


_FIX = "Run the same command: it resumes from the last checkpoint"
_PAGE = "dpx/docs/processes.md"


class PeerLost(ConfigError):
    """Says that another process of the job has ended; the run can be resumed by the same command."""


class Forged(PeerLost):
    """Says that a message of the job was written by somebody without its key."""

    def __init__(self, name: str, how: str = "does not bear the signature of this job"):
        reason = f"{how}: another program writes into the job's store"
        super().__init__(f"message {name}", reason, f"Close the job's port to strangers ({_PAGE}). {_FIX}")


class Command(NamedTuple):
    """What process 0 told the others to do."""

    name: str
    facts: dict[str, Any]


class Team:
    """The processes of one job. For one process every method is local: `tell` says nothing and `gather` returns its own value."""

    def __init__(self, own: Place = ALONE, client: Any = None, signer: Signer | None = None):
        self.place, self._client, self._signer = own, client, signer
        self._told, self._gathered = 0, 0
        self._storage_fault: str | None = None
        # When this process stops waiting for a message.
        self._until = math.inf
        # How often this process made progress (`dpx.processes.supervisor`).
        self.progress = 0

    def meet(self, key: bytes, arguments: Sequence[str] = ()) -> None:
        """Agrees with all processes on the nonce that the signatures of this job cover; every process calls it first.

        Each other process asks with its own random number, so that messages of an earlier job do not answer it. Raises `ConfigError`, in
        every process, if one uses another key, runs another version of dpx, or was started with other `arguments` of its command line.
        """
        self._signer, own = Signer(key), secrets.token_hex(16)
        try:
            if self.is_owner:
                nonce, heard = secrets.token_hex(16), [self._await(f"hello/{index}") for index in range(1, self.count)]
                refused = next(filter(None, (_refused(index, one, arguments) for index, one in enumerate(heard, 1))), None)
                asked = [one.get("asked") if isinstance(one, dict) else one for one in heard]
                self._put("welcome", {"nonce": nonce, "asked": asked, "refused": refused})
            else:
                self._put(f"hello/{self.place.index}", {"asked": own, "arguments": list(arguments), "dpx": __version__})
                answer = self._await("welcome")
                if "refused" not in answer:
                    raise ConfigError("process 0", _OTHER_VERSION, _SAME_VERSION)
                nonce, refused = answer["nonce"], answer["refused"]
                if answer["asked"][self.place.index - 1] != own:
                    raise Forged("welcome")
        except Forged as forged:
            fix = f"Give all processes the same {signing.KEY} or {signing.KEY_FILE}, or start them in one folder"
            raise ConfigError("the key of this job", "is not the same in all processes, or a stranger answers", fix) from forged
        self._signer = Signer(key, nonce)
        if refused is not None:
            # The others read it from process 0, which ends last.
            self._have_all_ended() if self.is_owner else self.say_ended()
            raise ConfigError(*refused)

    @property
    def count(self) -> int:
        return self.place.count

    @property
    def is_owner(self) -> bool:
        return self.place.is_owner

    @property
    def is_alone(self) -> bool:
        return self.place.count == 1

    @property
    def part(self) -> Part:
        return Part(self.place.index, self.place.count)

    def require_joined(self) -> None:
        """Raises `ConfigError` if a launcher started other processes than these, or a program connected them by itself."""
        found = place()
        require(found.count == self.count, f"this process is one of {found.count}", _ALONE, _JOIN)
        # The devices of several are found by all of them at once, later.
        if self.is_alone and (jax := sys.modules.get("jax")) is not None and jax.distributed.is_initialized():
            self.require_jax()

    def require_jax(self) -> None:
        """Raises `ConfigError` if jax runs in several processes that are not these; starts jax."""
        import jax

        require(
            jax.process_count() == self.count,
            f"jax.process_count()={jax.process_count()}",
            _ALONE,
            _JOIN,
        )

    def note_progress(self) -> None:
        """Notes that this process did a part of its work, other than to wait."""
        self.progress += 1

    def tell(self, name: str, **facts: Any) -> None:
        """Tells all other processes to do `name`, before this process does it too."""
        if self.is_alone:
            return
        self._told += 1
        self._put(f"told/{self._told}", {"name": name, "facts": facts})
        self._forget(f"told/{self._told - _KEPT}")

    def hear(self) -> Command:
        """Waits for the next command of process 0."""
        self._told += 1
        node = self._await(f"told/{self._told}")
        self.note_progress()
        return Command(node["name"], node["facts"])

    def gather(self, value: Any) -> list[Any]:
        """Returns the JSON values of all processes, by their number; every process calls it at the same point."""
        if self.is_alone:
            return [value]
        self._gathered += 1
        self.note_progress()
        topic, all_of = f"of/{self._gathered}", f"all/{self._gathered}"
        if self.is_owner:
            values = [value, *(self._await(f"{topic}/{index}") for index in range(1, self.count))]
            self._put(all_of, values)
            for index in range(1, self.count):
                self._forget(f"{topic}/{index}")
            self._forget(f"all/{self._gathered - _KEPT}")
            return values
        self._put(f"{topic}/{self.place.index}", value)
        return self._await(all_of)

    def meet_within(self, seconds: float) -> None:
        """Waits until all processes have come here. Raises `PeerLost` if that takes longer than `seconds`."""
        self._until = time.monotonic() + seconds
        try:
            self.gather(None)
        finally:
            self._until = math.inf

    def agree(self, sums: Iterable[str]) -> set[str]:
        """Does the one small all-reduce of a step, before its noise: joins the checksums `sums` that the processes hold of the step's sum,
        whether one of them was asked to stop, and whether one of them could not write its part of a checkpoint.

        Returns the checksums of all. Process 0 takes note of a signal that another process received. Raises `ConfigError` in every process
        if one could not write.
        """
        if self.is_alone:
            return set(sums)
        found = self.gather({"sums": sorted(sums), "stop": interruption.received(), "fault": self._storage_fault})
        for index, one in enumerate(found):
            require(one["fault"] is None, f"process {index}", f"{one['fault']}", "Correct this and run the same command")
            if self.is_owner and one["stop"] is not None and not interruption.is_requested():
                interruption.note(one["stop"])
        return set().union(*(one["sums"] for one in found))

    def note_storage_fault(self, line: str) -> None:
        """Notes that this process could not write, for the next `agree`."""
        self._storage_fault = line

    def fail(self, line: str) -> None:
        """Leaves the line for which this process ends."""
        with contextlib.suppress(Exception):
            self._put(f"failed/{self.place.index}", line)

    def failure(self, wait_s: float = 0.0) -> str | None:
        """Returns the line that another process left when it failed, if there is one within `wait_s` seconds."""
        until = time.monotonic() + wait_s
        while True:
            with contextlib.suppress(Exception):
                for index, line in self._listed("failed").items():
                    return f"process {index} ended: {line}"
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)

    def dismiss(self, code: int) -> None:
        """Tells all others to end with exit code `code`, and ends at once if one of them does not answer, since it waits for a device, or
        is lost: jax would abort this process as soon as it misses the heartbeat."""
        self.tell("end", code=code)
        if not self._have_all_ended(except_for=int(code == LOST)) or code == LOST:
            leave(code)

    def _have_all_ended(self, except_for: int = 0) -> bool:
        """Waits some seconds until all others, except for so many, say that they end; returns whether they did."""
        until = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(Exception):
                if len(self._listed("ended")) >= self.count - 1 - except_for:
                    return True
            time.sleep(0.02)
        return False

    def say_compiling(self, is_so: bool) -> None:
        """Says to all processes whether this one compiles, so that they are patient."""
        with contextlib.suppress(Exception):
            if is_so:
                self._put(f"compiling/{self.place.index}", True)
            else:
                self._client.key_value_delete(f"{_PREFIX}/compiling/{self.place.index}")

    def is_compiling(self) -> bool:
        """Returns whether some process of the job compiles."""
        with contextlib.suppress(Exception):
            return bool(self._listed("compiling"))
        return False

    def say_ended(self) -> None:
        self._put(f"ended/{self.place.index}", True)

    def _put(self, key: str, value: Any) -> None:
        assert self._signer is not None
        try:
            self._client.key_value_set(f"{_PREFIX}/{key}", self._signer.signed(key, value))
        except Exception as error:
            raise (Forged(key, "is there already") if "ALREADY_EXISTS" in str(error) else lost(self)) from error

    def _listed(self, topic: str) -> dict[str, Any]:
        """Returns the messages of a topic, by the number of the process that left each; those that are not signed are left out."""
        assert self._signer is not None
        found = {}
        for path, message in self._client.key_value_dir_get(f"{_PREFIX}/{topic}/"):
            index = path.rpartition("/")[2]
            with contextlib.suppress(NotSigned):
                found[index] = self._signer.value(f"{topic}/{index}", message)
        return found

    def _forget(self, key: str) -> None:
        with contextlib.suppress(Exception):
            self._client.key_value_delete(f"{_PREFIX}/{key}")

    def _await(self, key: str) -> Any:
        while True:
            try:
                assert self._signer is not None
                return self._signer.value(key, self._client.blocking_key_value_get(f"{_PREFIX}/{key}", _WAIT_MS))
            except NotSigned as error:
                raise Forged(key) from error
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise lost(self) from error
            line = self.failure()
            if line is None and time.monotonic() > self._until:
                line = "not all processes were ready to connect their devices in time (mesh.deadline_s, by default 600 s)"
            if line is not None:
                raise PeerLost("process lost", line, _FIX)


_OTHER_VERSION = "runs another version of dpx than the others"
_SAME_VERSION = "Install the same version for every process of a job"


def _refused(index: int, hello: Any, own: Sequence[str]) -> tuple[str, str, str] | None:
    """Returns why process `index`, which said `hello`, may not work with process 0 and its arguments; `None` if it may."""
    # An older version says less, or a text alone.
    if not isinstance(hello, dict) or hello.get("dpx") != __version__:
        return f"process {index}", _OTHER_VERSION, _SAME_VERSION
    theirs = hello["arguments"]
    if theirs == list(own):
        return None
    more, less = (" ".join(one for one in left if one not in right) for left, right in ((theirs, own), (own, theirs)))
    if more and less:
        how = f"with {more} where process 0 has {less}"
    elif more:
        how = f"with {more}, and process 0 was not"
    else:
        how = f"without {less}, which process 0 has" if less else "with the arguments of process 0 in another order"
    return f"process {index}", f"was started {how}", "Start all processes of a job with the same command line"


# Words in the errors of jax for a process that does not answer any more.
_OF_A_LOST_PEER = ("gloo", "coordination", "unavailable", "connection", "nccl", "barrier", "deadline_exceeded", "heartbeat")
# Those of them that nothing else says: Orbax, TensorStore and Python raise what they hear from jax as errors of their own.
_OF_ANY_CLASS = ("gloo", "coordination service", "barrier", "deadline_exceeded", "heartbeat")


def as_lost(error: BaseException, team: Team) -> PeerLost | None:
    """Returns the error for a lost process if `error`, or one that caused it, says that a process does not answer; else `None`."""
    return lost(team) if not team.is_alone and tells_of_a_loss(error) else None


def tells_of_a_loss(error: BaseException) -> bool:
    """Returns whether `error`, or one that caused it, says that another process does not answer."""
    chain = [error]
    for one in chain:
        words = _OF_A_LOST_PEER if type(one).__name__ in ("JaxRuntimeError", "XlaRuntimeError") else _OF_ANY_CLASS
        if isinstance(one, PeerLost) or any(word in str(one).lower() for word in words):
            return True
        more = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
        chain += [found for found in more if found is not None and found not in chain]
    return False


def is_not_of_a_loss(record: logging.LogRecord) -> bool:
    """Returns whether a record of a log is to be shown: Orbax's threads log the traceback of a lost process, which has a line."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not tells_of_a_loss(error)


def lost(team: Team) -> PeerLost:
    """Returns the error for a process of `team` that no longer answers, with the line that it left, if any."""
    return PeerLost("process lost", team.failure(wait_s=2.0) or "another process of this job does not answer any more", _FIX)


_current = Team()


def team() -> Team:
    """Returns the processes of this job; one alone before `join`."""
    return _current


def join(own: Place, arguments: Sequence[str]) -> Team:
    """Connects this process with the others of its job, which may start up to five minutes later. Imports jax, but starts no device.

    Raises `ConfigError` if they do not meet, or were started with other `arguments`.
    """
    global _current
    if own.count == 1:
        return _current
    import jax
    from absl import logging as absl_logging

    absl_logging.get_absl_logger().addFilter(is_not_of_a_loss)
    # Its service would take SIGTERM from `dpx.processes.interruption`.
    jax.config.update("jax_enable_preemption_service", False)
    signing.require_own_folder(own)
    found, listens = signing.coordinator(own)
    key = signing.job_key()
    if (warning := signing.warning(own)) is not None:
        stage(warning)
    try:
        jax.distributed.initialize(
            found,
            own.count,
            own.index,
            coordinator_bind_address=listens,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        is_unbound = "Failed to start RPC server" in str(error)
        reason = "is no free address of this host" if is_unbound else f"not all {own.count} processes have met there within five minutes"
        fix = f"Start all of them, check that the address can be reached, and set {signing.BIND} where this host has another one"
        raise ConfigError(f"coordinator={own.coordinator}", reason, fix) from error
    # jax has no public name for the store that its processes share.
    from jax._src.distributed import global_state

    signing.keep_collectives_at(found, global_state.client)
    joined = Team(own, global_state.client)
    joined.meet(key, arguments)
    _current = joined
    if own.is_owner:
        stage(signing.meeting(found, own.count))
    return _current


def disconnect(code: int) -> None:
    """Leaves `jax.distributed` after every process has heard that the job ends; ends the process if that takes too long."""
    import jax

    timer = threading.Timer(_FAREWELL_SECONDS, leave, (code,))
    timer.daemon = True
    timer.start()
    with contextlib.suppress(Exception):
        jax.distributed.shutdown()
    timer.cancel()


def leave(code: int) -> None:
    """Ends this process at once, so that its peers hear it; exit handlers of jax would wait for them."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
