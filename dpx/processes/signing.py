"""Signs the messages between the processes of a job: the store that carries them asks nobody who he is.

The key is a secret of the user, the same in all processes: `DPX_JOB_KEY`, or the file that `DPX_JOB_KEY_FILE` names, by default
`outputs/.job_key` in the working folder, which the first process makes. A signature covers the job's nonce and the name of a message, in
which its number is, so no message can replace another one or be used in another job.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.durable import make_folder

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
