"""Checks names of units in records: which are missing, in which form they are compared, which may name one person; and hashes them.

Two names are one unit only if they are equal in one form. Nothing is guessed: a wrong guess would make two people one unit, and the rows
beyond the cap of that unit would be left out. Nearly equal names are reported to the person who prepares the data, who may know.

Choices for a unit are made by a keyed hash of its name, so they do not depend on the rest of the corpus.
"""

import hashlib
import json
import os
import random
import re
import unicodedata
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpx.declaration import require

# The exact spellings by which tools write a missing name: "Null" and "Na" are names of people.
MISSING = frozenset(
    "nan NaN NAN -nan -NaN None none NONE null NULL (null) <null> nil NA N/A n/a #N/A #NA <NA> NaT undefined \\N".split(),
)
NEAR_EQUAL = "near_equal_units.jsonl"
_NUMBER = re.compile(r"([+-]?)([0-9]*)\.?([0-9]*)")
# Invisible characters, in addition to Unicode's categories Cc and Cf.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0") | {chr(code) for code in range(0xFE00, 0xFE10)}


def unit_name(place: str, value: Any, field: str, fix: str = "Give every row the name of its unit, or unset data.source.unit_field") -> str:
    """Returns the name of a unit that a record holds under `field`.

    Raises `ConfigError` for a missing name: all records without a name would be one unit, and those beyond its cap would be left out.
    """
    if value is None or value != value:  # noqa: PLR0124 - a missing number does not equal itself
        value = ""
    is_name = isinstance(value, str | int) and not isinstance(value, bool)
    require(
        is_name, place, f"names its unit {str(value)[:40]}, which is not text and not a whole number", "Write the names of units as text"
    )
    name = in_one_form(value)
    require_name(place, name, f" under {field!r}", fix)
    return name


def require_name(place: object, name: str, where: str, fix: str) -> None:
    """Raises `ConfigError` for a name that is blank, or that means a missing name."""
    require(near_form(name) != "", place, f"does not name its unit{where}", fix)
    require(name not in MISSING, place, f"names its unit {name!r}{where}, which usually means a missing name", fix)


def in_one_form(name: str | int) -> str:
    """Returns a unit's name in one form: a number as its digits, an accent in its letter, and no spaces around it.

    If one unit had two names, each would be protected by half.
    """
    return unicodedata.normalize("NFC", str(name).strip())


def near_form(name: str) -> str:
    """Returns a name without case, spaces, unseen characters, compatibility forms (NFKC) and different ways to write a number."""
    seen = name
    if not name.isascii() or not name.isprintable():
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        seen = "".join(one for one in folded if one not in _UNSEEN and unicodedata.category(one) not in ("Cc", "Cf") and not one.isspace())
    seen = seen.casefold().replace(" ", "")
    number = _NUMBER.fullmatch(seen)
    if number is None or not any(number.group(2, 3)):
        return seen
    whole, rest = number[2].lstrip("0") or "0", number[3].rstrip("0")
    written = f"{whole}.{rest}" if rest else whole
    return f"-{written}" if number[1] == "-" and written != "0" else written


def near_equal(names: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Returns groups of (split, name) whose names differ and have one near form, sorted. Memory: 16 bytes a unit in addition to the
    names."""
    units = list(names)
    digests = (int.from_bytes(blake2b(near_form(name).encode("utf-8", "surrogatepass"), digest_size=8).digest()) for _, name in units)
    digest_U = np.fromiter(digests, np.uint64, len(units))
    order_U = np.argsort(digest_U, kind="stable")
    sorted_U = digest_U[order_U]
    is_alike_U = np.zeros(len(units), bool)
    is_alike_U[1:] = sorted_U[1:] == sorted_U[:-1]
    is_alike_U[:-1] |= is_alike_U[1:]
    groups: dict[str, list[tuple[str, str]]] = {}
    for place in order_U[is_alike_U]:
        groups.setdefault(near_form(units[place][1]), []).append(units[place])
    return sorted(sorted(group) for group in groups.values() if len({name for _, name in group}) > 1)


def write_near_equal(folder: Path, groups: list[list[tuple[str, str]]]) -> None:
    """Writes the groups to a file of `folder` that its owner alone may read, one a line; without groups, writes no file."""
    if not groups:
        return
    handle = os.open(folder / NEAR_EQUAL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        for group in groups:
            file.write(json.dumps([{"name": name, "split": split} for split, name in group]) + "\n")
        file.flush()
        os.fsync(file.fileno())


def in_words(folder: Path, groups: list[list[tuple[str, str]]]) -> str:
    """Returns one line of text about the groups that were written to `folder`."""
    count = sum(len({name for _, name in group}) for group in groups)
    several = f"{len(groups)} groups" if len(groups) > 1 else "one group"
    differ = f"{count} names of units in {several} differ only in case, spaces, unseen characters or how a number is written"
    return f"{differ}; each is a separate unit. They are listed in {folder / NEAR_EQUAL}"


Split = Literal["protected", "heldout", "public", "test"]
# The splits that a hash of the unit decides; a test set is a split only if its files are declared.
SPLITS: tuple[Split, ...] = ("protected", "heldout", "public")


class KeyedHash:
    """Computes 128-bit keyed hashes (BLAKE2b) of texts, with a key made from the configuration's salt."""

    def __init__(self, salt: str):
        self._key = hashlib.sha256(salt.encode()).digest()

    def number(self, purpose: str, *parts: str | int) -> int:
        """Returns a number in [0, 2^128) that depends on the salt, the purpose and every part; each part is preceded by its length."""
        state = hashlib.blake2b(digest_size=16, key=self._key)
        for part in (purpose, *parts):
            encoded = str(part).encode("utf-8", "surrogatepass")
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        return int.from_bytes(state.digest(), "little")

    def fraction(self, purpose: str, *parts: str | int) -> float:
        """Returns a number in [0, 1) that depends on the salt, the purpose and every part."""
        return (self.number(purpose, *parts) >> 75) / (1 << 53)

    def draws(self, purpose: str, *parts: str | int) -> random.Random:
        """Returns a separate random generator for these parts.

        Use `.random()` alone, whose stream Python promises to keep between versions.
        """
        return random.Random(self.number(purpose, *parts))

    def split(self, unit_id: str, *, public_fraction: float, heldout_fraction: float) -> Split:
        """Returns the split that holds every document of a unit."""
        place = self.fraction("split", unit_id)
        if place < public_fraction:
            return "public"
        return "heldout" if place < public_fraction + heldout_fraction else "protected"
