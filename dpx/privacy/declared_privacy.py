"""Declares what is protected, the neighbouring relation, and the accountant that computes epsilon.

Records the units that a run protects (`UnitFacts`): charges of two ledgers are added up only if these records agree. An event bounds what
one unit changes. Two events are about the same unit only if both runs define it in the same way, cut it into rows in the same way with one
vocabulary, protect it in the same split, and use the same neighbouring relation.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from dpx.declaration import declaration, require
from dpx.files.records import described, record

Adjacency = Literal["zero_out", "zero_out_text", "add_remove", "replace_one"]


@declaration
class Privacy:
    """The unit of privacy, its neighbouring relation and delta.

    Under `group` single rows are drawn and clipped, and the accountant charges for all rows of a unit at once. Under `sample_units` whole
    units are, so the batch size, the divisor and N all count units. Under `one_row` units are as well, but only one row of each is read, a
    function of the unit and the nominal epoch of the step (`dpx.data.store.Store.examples`).

    Attributes:
        delta: Probability with which the bound of epsilon may fail; keep it below one over the number of units.
        adjacency: How two neighbouring corpora differ: one unit's content zeroed out, its text alone zeroed out, one unit more or less,
            or one replaced.
        unit: What is protected: a row, a document, or all documents of an author.
        rows_per_unit_max: Enforced maximum number of prepared rows per unit; surplus rows are dropped at preparation. With
            unit=row it is 1, or the copies of a row (data.repeats).
        unit_mode: What is drawn and clipped: single rows (group), whole units (sample_units), or units of which one row is read
            (one_row).
        allow_large_delta: Whether a delta that is not below one over the number of units is accepted.
        assumed: Config keys whose values are assumptions, such as data.declared_size; with any of them the run has no guarantee.
    """

    delta: float
    adjacency: Adjacency = "zero_out"
    unit: Literal["row", "document", "author"] = "row"
    rows_per_unit_max: int = 1
    unit_mode: Literal["group", "sample_units", "one_row"] = "group"
    allow_large_delta: bool = False
    assumed: tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        require(0 < self.delta < 1, f"privacy.delta={self.delta}", "delta is a probability above 0 and below 1", "Use a value below 1/N")
        require(
            self.rows_per_unit_max >= 1,
            f"privacy.rows_per_unit_max={self.rows_per_unit_max}",
            "a unit has at least one row",
            "Use 1 or more",
        )
        require(
            self.unit != "row" or self.unit_mode == "group",
            f"privacy.unit_mode={self.unit_mode} with privacy.unit=row",
            "with privacy.unit=row each row is already drawn separately",
            "Use privacy.unit=document, or privacy.unit_mode=group",
        )

    @property
    def rows_per_example(self) -> int:
        """Returns the number of rows in one example, padding rows included.

        An example is what is drawn and clipped as one, and what `batch_schedule.size` and `microbatch` count.
        """
        return self.rows_per_unit_max if self.unit_mode == "sample_units" else 1

    @property
    def drawn(self) -> str:
        """Returns the name of the units that the sampler draws, and that the batch size and N count."""
        return "row" if self.unit_mode == "group" else self.unit

    def population(self, manifest: Any) -> int:
        """Returns the number of rows or units from which the sampler draws, for the `manifest` of a prepared store."""
        return manifest.rows["protected"] if self.unit_mode == "group" else manifest.units["protected"]


@declaration
class LossGrid:
    """The grid of privacy loss distributions that an accountant composes, or that are composed beside it (`epsilon/pld`).

    Attributes:
        value_discretization_interval: Largest width of the grid, above 0 and at most 1; null means the default of `dpx.privacy.loss_grid`.
            A wider grid takes less time and can only raise epsilon; a finer one changes nothing.
    """

    value_discretization_interval: float | None = None

    def __post_init__(self) -> None:
        width = self.value_discretization_interval
        require(
            width is None or 0 < width <= 1,
            f"accountant.value_discretization_interval={width}",
            "the width of the grid of privacy losses is above 0 and at most 1",
            "Use 1e-3, or null for the default",
        )


@declaration
class Pld(LossGrid):
    """The accountant that composes privacy loss distributions numerically, rounded pessimistically (dp-accounting)."""

    name: Literal["pld"] = "pld"


@declaration
class Rdp(LossGrid):
    """The accountant that adds up Renyi divergences, with the improved conversion (Canonne et al. 2020).

    Attributes:
        orders: Renyi orders that are tried; null takes dp-accounting's orders.
    """

    orders: tuple[float, ...] | list[float] | None = None
    name: Literal["rdp"] = "rdp"


@declaration
class Deterministic(LossGrid):
    """The accountant of exact Gaussian profiles, without amplification by sampling (Balle and Wang 2018)."""

    name: Literal["deterministic"] = "deterministic"


@declaration
class GdpClt(LossGrid):
    """The central limit of Gaussian DP, an approximation that can be too small. The run's epsilon is then proved by `pld`."""

    name: Literal["gdp_clt"] = "gdp_clt"


Accountant = Pld | Rdp | Deterministic | GdpClt


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
        whole = f"one {rows_in_words(self.unit, self.rows_per_unit_max)}"
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


def rows_in_words(unit: str, most: int) -> str:
    """Returns a unit and how many rows it has as text for people."""
    if unit == "row":
        return unit if most == 1 else f"row with its copies ({most} rows)"
    return f"{unit} of at most {most} rows"


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
