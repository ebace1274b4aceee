"""Derives every key and generator of a run from one root secret, by its purpose and never by device or order.

The derivation is keyed BLAKE2b over an unambiguous encoding of `(purpose, *parts)`, so distinct tuples of any length give independent keys.
Noise uses the parts (step, parameter path, slice); sampling uses (step, virtual shard).
"""

import hashlib
import os
import secrets
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpx.declaration import ConfigError
from dpx.durable import draft_of, sync

SECRET_BYTES = 32


def _encode(parts: tuple[str | int, ...]) -> bytes:
    """Encodes the parts injectively, each with its type and its length."""
    pieces = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | np.integer):
            raise TypeError(f"a key part is a str or an int, not {type(part).__name__}")
        tag, payload = (b"s", part.encode()) if isinstance(part, str) else (b"i", str(int(part)).encode())
        pieces.append(tag + struct.pack(">Q", len(payload)) + payload)
    return b"".join(pieces)


class RootSecret:
    """Holds a run's only secret: 256 bits from the operating system, or, for tests, a seed.

    `strength_bits` is the number of bits that an adversary must guess to reproduce the noise: 0 for a seed, else the 64 bits of one derived
    key (two uint32 words, as in the threefry keys of `jax.random`).
    """

    __slots__ = ("_secret", "strength_bits")

    def __init__(self, secret: bytes, strength_bits: int = 64):
        if len(secret) != SECRET_BYTES:
            raise ConfigError("root secret", f"has {len(secret)} bytes instead of {SECRET_BYTES}", "Start a new run folder")
        self._secret = secret
        self.strength_bits = strength_bits

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> "RootSecret":
        """Draws a secret and writes it durably to `path` (mode 0600); raises `ConfigError` if `path` exists."""
        path = Path(path)
        secret = secrets.token_bytes(SECRET_BYTES)
        try:
            # A link, unlike a rename, fails when another process came first, so a secret is never replaced.
            with draft_of(path, os.link) as draft, open(draft, "xb", opener=partial(os.open, mode=0o600)) as file:
                file.write(secret)
        except FileExistsError:
            raise ConfigError(path.name, "this folder already has a root secret", "Load that secret, or use another folder") from None
        sync(path.parent)
        return cls(secret)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RootSecret":
        """Reads the secret of an earlier `create`; raises `ConfigError` if it is missing or cut short."""
        try:
            return cls(Path(path).read_bytes())
        except FileNotFoundError:
            raise ConfigError(Path(path).name, "this folder has no root secret", "Start a new run folder") from None

    @classmethod
    def from_seed(cls, seed: int) -> "RootSecret":
        """Returns a reproducible secret for tests; a run that uses it has no guarantee (`fixed_seed`)."""
        return cls(hashlib.blake2b(_encode(("seed", seed)), digest_size=SECRET_BYTES).digest(), strength_bits=0)

    def _derive(self, use: str, purpose: str, parts: tuple[str | int, ...], size: int) -> bytes:
        return hashlib.blake2b(_encode((use, purpose, *parts)), key=self._secret, digest_size=size).digest()

    def key(self, purpose: str, *parts: str | int) -> np.ndarray:
        """Returns the data of one jax threefry key, `uint32[2]`."""
        return np.frombuffer(self._derive("key", purpose, parts, 8), dtype=">u4").astype(np.uint32)

    def generator(self, purpose: str, *parts: str | int) -> np.random.Generator:
        """Returns a Philox generator with a 128-bit key, for draws on the host."""
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._derive("generator", purpose, parts, 16), "big")))

    def stream(self, purpose: str, *parts: str | int) -> "BitStream":
        """Returns a stream of words with a 256-bit key, for draws whose generator must be as strong as a cipher."""
        return BitStream(self._derive("stream", purpose, parts, SECRET_BYTES))

    @property
    def tag(self) -> str:
        """An identifier of this secret, 16 hexadecimal digits, which reveals nothing else about it."""
        return self._derive("tag", "which secret this is", (), 8).hex()

    def __repr__(self) -> str:
        return "RootSecret(hidden)"

    def __reduce__(self):
        raise TypeError("a root secret is not pickled: it lives in one file of the private tree")


class BitStream:
    """Produces uniform 64-bit words of SHAKE-256 under a key: request number n is the output for (key, n)."""

    __slots__ = ("_key", "_requests")

    def __init__(self, key: bytes):
        self._key, self._requests = key, 0

    def words(self, count: int) -> np.ndarray:
        """Returns the next `count` words, uint64."""
        data = hashlib.shake_256(self._key + struct.pack(">Q", self._requests)).digest(8 * count)
        self._requests += 1
        return np.frombuffer(data, ">u8").astype(np.uint64)


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the name of jax's key path, such as `layers/qkv/kernel`, through dictionaries, sequences and records."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
