"""Records the units that a run protects: charges of two ledgers are added up only if these records agree.

An event bounds what one unit changes. Two events are about the same unit only if both runs define it in the same way, cut it into rows in
the same way with one vocabulary, protect it in the same split, and use the same neighbouring relation.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from dpx.files.records import described, record

# Fields that are declared under `privacy`, and those under `data`.
OF_PRIVACY = ("unit", "unit_mode", "rows_per_unit_max", "adjacency")
OF_SPLITS = ("split_salt", "public_fraction", "heldout_fraction", "heldout_by", "test_split")
_VOCABULARY = "data.vocabulary"
# Sources of a vocabulary that is public. The checksum of any other is that of words counted in protected text without noise: whoever
# guesses the text could test the guess by it.
PUBLIC_SOURCES = ("file", "public_split")


@record
class UnitFacts:
    """The units that a run protects.

    `definition` says what one unit is (`dpx.data.protected_units`); `unit_mode` and `rows_per_unit_max` how much of it a step can hold. A
    unit is protected in one split only, so the fields that decide the splits belong to it. `vocabulary_sha256` is `None` if the data is not
    prepared; an unknown checksum agrees with no other.
    """

    unit: str = described("What one protected unit is: a row, a document or an author.")
    unit_mode: str = described(
        'Whether steps draw rows ("group"), whole units ("sample_units") or units of which one row is read ("one_row").'
    )
    rows_per_unit_max: int = described("The most rows that one unit has; further rows are dropped.")
    adjacency: str = described("The neighbouring relation: how two data sets differ that the claim compares.")
    definition: dict[str, Any] = described("How a unit is named, found in the data and cut into rows.")
    vocabulary_source: str = described("Where the vocabulary is from: a file, the public split, or protected text.")
    vocabulary_sha256: str | None = described(
        "Checksum of the vocabulary; null before the data is prepared, and in a released file if it is not public."
    )
    split_salt: str = described("Salt of the hash that puts a unit into a split.")
    public_fraction: float = described("Fraction of units in the public split.")
    heldout_fraction: float = described("Fraction of units in the held-out split.")
    heldout_by: str = described(
        'How held-out units are picked: by a hash of the unit ("hash"), or the first ones in the order of the files ("first").',
        default="hash",
    )
    test_split: str | None = described("Which split a separate test set is; null without one.")

    def as_released(self, tells_words: bool = True) -> "UnitFacts":
        """Returns the record for a file that may leave the machine: without the checksum of a vocabulary that is not public.

        `tells_words` is false where an origin of the run says that the vocabulary of its file is not public either.
        """
        checksum = released_checksum(self.vocabulary_source, self.vocabulary_sha256) if tells_words else None
        return dataclasses.replace(self, vocabulary_sha256=checksum)

    def in_words(self) -> str:
        """Returns the unit and its neighbouring relation as text for people."""
        most = f" of at most {self.rows_per_unit_max} rows" if self.unit != "row" else ""
        whole = f"one {self.unit}{most}"
        what = f"the text of {whole}, not its label or that it is there" if self.adjacency == "zero_out_text" else whole
        return f"{what}, under {self.adjacency}"

    def differences(self, other: "UnitFacts") -> list[str]:
        """Returns the facts that differ or are unknown, each as its config key with both values.

        It is empty if the charges of both may be added up. The text may be released.
        """
        ours, theirs = self._by_key(), other._by_key()
        differing = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
        ours, theirs = self.as_released()._by_key(), other.as_released()._by_key()
        found = [f"{key} ({ours.get(key, 'nothing')} and {theirs.get(key, 'nothing')})" for key in differing]
        if self.vocabulary_sha256 is None or other.vocabulary_sha256 is None:
            return [*(one for one in found if not one.startswith(_VOCABULARY)), f"{_VOCABULARY} (the checksum of one of them is not known)"]
        return found

    def _by_key(self) -> dict[str, str]:
        """Returns every fact, as text, by the config key that decides it; a key that is recorded twice with two values holds both."""
        facts: dict[str, str] = {}
        keyed = [(f"privacy.{name}", getattr(self, name)) for name in OF_PRIVACY]
        keyed.append((_VOCABULARY, f"{self.vocabulary_source} {self.vocabulary_sha256 or 'with other words'}"))
        keyed += [(f"data.{name}", getattr(self, name)) for name in OF_SPLITS]
        for key, value in [*keyed, *_flat("", self.definition)]:
            facts[key] = str(value) if facts.get(key, str(value)) == str(value) else f"{facts[key]}, {value}"
        return facts


def released_checksum(source: str | None, checksum: str | None) -> str | None:
    """Returns the checksum of a vocabulary from `source` as a released file may hold it: `None` unless the vocabulary is public."""
    return checksum if source in PUBLIC_SOURCES else None


def unlike(units: Sequence[UnitFacts | None]) -> list[str]:
    """Returns the reasons why steps with these records are not known to protect one unit; empty if they do."""
    known = [facts for facts in units if facts is not None]
    if not known or len(known) < len(units):
        return ["for some steps the protected unit is not recorded"]
    return list(dict.fromkeys(difference for other in known[1:] for difference in known[0].differences(other)))


_CONFIG_KEYS = {"unit": "privacy.unit", "documents": "data.source", "rows": "data"}


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a unit's definition by config key."""
    if not isinstance(value, dict):
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(f"{key}.{name}" if key else _CONFIG_KEYS.get(str(name), str(name)), item)
