"""Signs the messages between the processes of a job: the store that carries them asks nobody who he is.

The key is a secret of the user, the same in all processes: `DPX_JOB_KEY`, or the file that `DPX_JOB_KEY_FILE` names, by default
`outputs/.job_key` in the working folder, which the first process makes. A signature covers the job's nonce and the name of a message, in
which its number is, so no message can replace another one or be used in another job.

At which addresses the processes of a job listen, and who else can reach them, is decided here too.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.durable import make_folder
from dpx.processes.place import COORDINATOR, UNIX, Place

KEY, KEY_FILE = "DPX_JOB_KEY", "DPX_JOB_KEY_FILE"
DEFAULT_FILE = Path("outputs/.job_key")
SHORTEST = 32
# Of a signature.
_DIGITS = 64
# Read of a key's file.
_MOST_BYTES = 4096


class NotSigned(Exception):
    """A message that nobody with the job's key has written, or not under this name."""


class Signer:
    """Signs and checks the messages of the job with this nonce."""

    def __init__(self, key: bytes, nonce: str = ""):
        self._key, self._nonce = key, nonce

    def signed(self, name: str, value: Any) -> str:
        """Returns the message `name` that says the JSON value `value`: a signature of fixed length, and the value."""
        text = json.dumps(value)
        return self._signature(name, text) + text

    def value(self, name: str, message: str) -> Any:
        """Returns what the message `name` says. Raises `NotSigned`; nothing is parsed that is not signed."""
        signature, text = message[:_DIGITS], message[_DIGITS:]
        if not hmac.compare_digest(self._signature(name, text).encode(), signature.encode(errors="replace")):
            raise NotSigned(name)
        return json.loads(text)

    def _signature(self, name: str, text: str) -> str:
        covered = json.dumps([self._nonce, name]) + text
        return hmac.new(self._key, covered.encode(errors="replace"), hashlib.sha256).hexdigest()


def job_key(environment: Mapping[str, str] | None = None) -> bytes:
    """Returns the key of the job. Raises `ConfigError` for one that is too short, or that others than this user may know."""
    variables = os.environ if environment is None else environment
    fix = f"Set {KEY} in all processes to {SHORTEST} or more random characters, or {KEY_FILE} to a file of mode 600 that holds them"
    if given := variables.get(KEY, ""):
        require(len(given) >= SHORTEST, KEY, f"has fewer than {SHORTEST} characters", fix)
        return given.encode()
    path = Path(variables.get(KEY_FILE) or DEFAULT_FILE)
    try:
        if KEY_FILE not in variables:
            _make(path)
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise ConfigError(path, f"cannot be read as the key of this job ({error.strerror})", fix) from error
    require(found.st_uid == os.geteuid(), path, "is the key of this job, and belongs to another user", fix)
    require(not found.st_mode & 0o077, path, "is the key of this job, and others than its owner may read or write it", f"chmod 600 {path}")
    require(len(key) >= SHORTEST, path, f"is the key of this job, and has fewer than {SHORTEST} characters", fix)
    return key


def _make(path: Path) -> None:
    """Makes a key, unless another process has made one."""
    if path.exists():
        return
    make_folder(path.parent)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    draft.touch(0o600)
    try:
        draft.write_text(secrets.token_hex(32))
        # Fails where there is one, also on a network's disk.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


# jax's own variable: where process 0 listens, if not at the coordinator's address.
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_ANY = ("0.0.0.0", "[::]")
_THIS_MACHINE = "127.0.0.1"
_PAGE = "dpx/docs/processes.md"


def coordinator(own: Place) -> tuple[str, str]:
    """Returns where this process finds the store of its job, and where process 0 listens, which jax alone would do on all interfaces."""
    assert own.coordinator is not None
    listens = os.environ.get(BIND) or own.coordinator
    # The name of its host may lead process 0 to loopback, where it does not listen then.
    return listens if own.is_owner and _host(listens) not in _ANY else own.coordinator, listens


def require_own_folder(own: Place) -> None:
    """Raises `ConfigError` for a Unix socket in a folder that others than this user can reach."""
    if own.coordinator is None or not own.coordinator.startswith(UNIX):
        return
    folder = Path(own.coordinator.removeprefix(UNIX)).parent
    fix = f"Name a socket in a folder that is yours alone: mkdir -m 700 <folder>, {COORDINATOR}={UNIX}<folder>/store"
    try:
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(folder, f"cannot hold the socket of this job ({error.strerror})", fix) from error
    require(stat.S_ISDIR(found.st_mode), folder, "is not a folder, in which the socket of this job could be", fix)
    require(found.st_uid == os.geteuid(), folder, "holds the socket of this job, and belongs to another user", fix)
    require(not found.st_mode & 0o077, folder, "holds the socket of this job, and others than its owner can reach it", fix)


def warning(own: Place) -> str | None:
    """Returns what process 0 says before the others come, if the name of its host leads to loopback, as on Debian; else `None`."""
    address = own.coordinator
    if not own.is_owner or address is None or address.startswith(UNIX) or os.environ.get(BIND):
        return None
    host = _host(address)
    # The number that the host has; none if its name leads nowhere.
    try:
        found = str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return None
    if host == "localhost" or found == host or not found.startswith("127."):
        return None
    port = address.rpartition(":")[2]
    fix = f"If some run on other hosts, set {BIND}=<address of this host>:{port} here"
    return f"{host} leads to {found} on this host, so that processes on this host alone can meet here. {fix} ({_PAGE})"


def meeting(address: str, count: int) -> str:
    """Returns the line that says where the processes meet, and who else could."""
    if address.startswith(UNIX):
        return f"{count} processes meet at a Unix socket that this user alone can open; their devices exchange on loopback ({_PAGE})"
    opened = f"{count} processes meet at {address}: dpx signs its messages, but jax's store, barriers and Gloo know no authentication"
    return f"{opened}. Let a firewall close all ports between these hosts to others ({_PAGE})"


def keep_collectives_at(address: str, client: Any) -> None:
    """Lets the collectives of processors listen where this host reaches `address`; alone they listen where its own name leads."""
    from jax._src import config, xla_bridge
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    host = _THIS_MACHINE if address.startswith(UNIX) else _own_side(address)
    if host is None or config.cpu_collectives_implementation.value != "gloo":
        return

    def made() -> Any:
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host))

    xla_bridge.register_backend_factory("cpu", made, priority=0, fail_quietly=False)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _own_side(address: str) -> str | None:
    """Returns the number of this host on the way to `address`, `None` if there is no way. Nothing is sent."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, number = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(number)
            return str(way.getsockname()[0])
    except (OSError, ValueError):
        return None
