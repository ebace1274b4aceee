"""The privacy cost of a run's starting parameters: the runs and files that they come from, as recorded in its ledger and its statement.

A guarantee does not end where a run ends: further training of its weights on the same data costs more. So a run that starts from another
one, by a fork or by `init=run`, inherits the charges of all runs before it. It composes its own charges with them unless the user declares
that their data share no unit with its own (`init.disjoint_from`). A run that starts from one without a guarantee, on data that may be
shared, has no guarantee.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dpx.data.declarations import Data
from dpx.declaration import declaration, require
from dpx.privacy.declarations import Privacy
from dpx.privacy.segments import join
from dpx.privacy.unit_facts import UnitFacts

# Declared, never computed from data: a relation that one row of the data could change would reveal something about that row.
Relation = Literal["unknown", "disjoint"]

WORDS = {
    "unknown": "data that may be this run's",
    "disjoint": "data that the user declares to share no unit with this run's",
}

# Texts for the state of a run's audit (`audit.verdict` of its statement).
VERDICTS = {"pending": "is pending: it has no verdict yet", "passes": "passes", "fails": "fails: it proves more than was claimed"}

MEANING = (
    "epsilon covers this run and every run named here that is composed with it; noise.epsilon, if set, was the target for this run's own "
    "steps alone, whose epsilon is planned.epsilon"
)

# The identity of a file whose weights have not been read: a plan and an explanation do not need them.
UNREAD = ""


@declaration
class Origin:
    """A run or a file that a run's starting parameters come from, however many runs ago.

    `identity` is the name of its ledger; of a file, the checksum of its values. `relation` is that of its data to the data of the run that
    holds this record. `is_fork` says that this run resumes from its state, and so keeps the canaries of its audit. `segments` are its
    charges, `reasons` say why it has no guarantee, `against` lists other reasons why the run that holds this record has no guarantee.
    `claim` is what it stated; of a checkpoint, what was loaded, made new and left out. `data` holds checksums of its prepared data, `None`
    for unknown data; they never leave private/. `weights` is the checksum of the weights that were loaded from it, empty for an earlier
    origin.
    """

    kind: Literal["run", "file"]
    name: str
    identity: str
    relation: Relation = "unknown"
    is_fork: bool = False
    weights: str = ""
    segments: Sequence[dict[str, Any]] = ()
    reasons: Sequence[str] = ()
    against: Sequence[str] = ()
    claim: dict[str, Any] = dataclasses.field(default_factory=dict)
    vocabulary: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: Sequence[str | None] = (None,)
    is_checked: bool = False
    provenance: str | None = None

    @property
    def label(self) -> str:
        """Its name and identity; for a run the first 8 digits of the name of its ledger, which tell it from other runs."""
        if self.kind == "file":
            return f"{self.name} ({self.identity if self.identity != UNREAD else 'its checksum is noted when the run starts'})"
        return f"{self.name} ({self.identity[:8]})"

    @property
    def is_composed(self) -> bool:
        return self.kind == "run" and self.relation != "disjoint"

    def as_line(self) -> dict[str, Any]:
        """As a ledger holds it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def as_released(self) -> dict[str, Any]:
        """As a statement holds it, without checksums of the data."""
        line = self.as_line()
        if self.kind == "file":
            word = "the user vouches that no protected data was used to make it" if self.provenance == "public" else None
            told = {"claim": line["claim"]} if line["claim"] else {}
            return {name: line[name] for name in ("kind", "name", "identity", "weights", "provenance")} | {"word": word} | told
        return {name: value for name, value in line.items() if name not in ("data", "provenance")} | {"composed": self.is_composed}


def of_released(node: dict[str, Any]) -> Origin:
    """The origin that `as_released` wrote, for a run that has no other facts about it: its data counts as unknown."""
    names = {field.name for field in dataclasses.fields(Origin)} - {"relation", "is_fork", "against", "data", "is_checked"}
    return Origin(**{name: value for name, value in node.items() if name in names})


def merged(known: Iterable[Origin], further: Iterable[Origin]) -> list[Origin]:
    """Both lists, each identity once: with every charge, every reason and the worst relation of either record."""
    by_identity: dict[str, Origin] = {}
    for origin in (*known, *further):
        other = by_identity.get(origin.identity)
        if other is not None:
            origin = dataclasses.replace(
                other,
                relation="disjoint" if other.relation == origin.relation == "disjoint" else "unknown",
                is_fork=other.is_fork or origin.is_fork,
                weights=other.weights or origin.weights,
                segments=join(list(other.segments), list(origin.segments)),
                reasons=_all_of(other.reasons, origin.reasons),
                against=_all_of(other.against, origin.against),
                data=_all_of(other.data, origin.data),
                is_checked=other.is_checked and origin.is_checked,
                provenance=other.provenance if other.provenance == origin.provenance else None,
            )
        by_identity[origin.identity] = origin
    return list(by_identity.values())


def _all_of(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys([*one, *other]))


def charged(origins: Iterable[Origin]) -> list[list[dict[str, Any]]]:
    """The charges of `origins` that are added to those of a run that starts from them."""
    return [list(origin.segments) for origin in origins if origin.is_composed]


def reasons(origins: Iterable[Origin]) -> list[str]:
    """Why a run that starts from `origins` has no guarantee."""
    against = []
    for origin in origins:
        if origin.kind == "file" and origin.provenance != "public":
            against.append(f"init: {origin.label} is of unknown provenance")
        if origin.is_composed and origin.reasons:
            against.append(f"init: {origin.label} has no guarantee on {WORDS[origin.relation]}: {'; '.join(origin.reasons)}")
        against += [f"init: {reason}" for reason in origin.against]
    return against


def assumptions(origins: Iterable[Origin]) -> list[str]:
    """What must be true for the claim of a run that starts from `origins` to hold, in sentences."""
    premises = []
    for origin in origins:
        if origin.kind == "file":
            premises.append(f"init: the user vouches (init.provenance=public) that no protected data was used to make {origin.label}")
            continue
        if origin.is_fork:
            seen = "did not follow from what was seen, or no further branch will be made"
            premises.append(f"whether and where {origin.label} was forked {seen}")
        elif origin.is_composed:
            premises.append(f"init: sampling, noise and steps of this run did not follow from what was seen of {origin.label}")
        if not origin.is_composed:
            premises.append(
                f"init: the user vouches (init.disjoint_from) that no unit of this run's protected data is in any data of {origin.label}"
            )
        if not origin.is_checked:
            premises.append(f"init: the statement of {origin.label} is trusted without a check: its private/ was not at hand")
    return premises


def facts(origins: Sequence[Origin]) -> dict[str, Any]:
    """`init` of a statement and of a plan."""
    if not origins:
        return {"kind": "random", "origins": []}
    kind = "fork" if origins[0].is_fork else origins[0].kind
    return {"kind": kind, "meaning": MEANING, "origins": [origin.as_released() for origin in origins]}


def charged_in(statement: dict[str, Any]) -> list[dict[str, Any]]:
    """The charges in a statement of the runs before its own run."""
    return join(*charged(of_released(node) for node in statement.get("init", {}).get("origins", []) if node.get("composed")))


def in_words(released: dict[str, Any]) -> str:
    """One of the `origins` of a statement, as text."""
    if released["kind"] == "file":
        return f"{of_released(released).label}; {released['word'] or 'its provenance is unknown'}"
    stated, audit = released["claim"].get("guarantee", "not stated yet"), released["claim"].get("audit")
    charged_here = "its steps are charged here too" if released["composed"] else f"its steps are not charged here; its guarantee: {stated}"
    audited = "" if audit is None else f"; its audit {VERDICTS.get(audit, audit)}"
    return f"{of_released(released).label}, trained on {WORDS[released['relation']]}: {charged_here}{audited}"


def unit_mismatch(origin: Origin, data: Data, privacy: Privacy, is_same_data: bool) -> str | None:
    """The reason, as text, why the charges of `origin` cannot be added to those of a run on `data`; `None` if they can be or need not be.

    Events of two runs compose for one unit: both runs must define it, cut it into rows and protect it in a split in the same way. The
    maximum number of rows per unit may differ, and so may what a step draws: each event is valid for the part of the unit that its run
    kept.
    """
    if not origin.is_composed or origin.reasons:
        return None
    ours = UnitFacts.from_data(data, privacy)
    node = origin.claim.get("units")
    if node is None:
        return f"what {origin.name} protects is not recorded"
    theirs = UnitFacts.from_json(node, origin.name)
    # Reading the weights checks that the vocabularies are the same; another check excludes one learnt from protected text.
    alike = {name: getattr(ours, name) for name in ("unit_mode", "rows_per_unit_max", "vocabulary_source")} | {"vocabulary_sha256": ""}
    differing = dataclasses.replace(theirs, **alike).differences(dataclasses.replace(ours, vocabulary_sha256=""))
    if differing:
        return f"what {origin.name} protects is not what this run protects: {'; '.join(differing)} differ"
    if privacy.unit == "row" and data.pairs == "cross_document" and not is_same_data:
        return f"a row of this run holds text of two documents, which {origin.name} may have paired otherwise"
    return None


def require_same_relation(origins: Iterable[Origin], privacy: Privacy) -> None:
    """Raises `ConfigError` if charges under another neighbouring relation would have to be composed."""
    for origin in origins:
        theirs = origin.claim.get("adjacency", privacy.adjacency)
        require(
            not origin.is_composed or bool(origin.reasons) or theirs == privacy.adjacency,
            f"privacy.adjacency={privacy.adjacency}",
            f"{origin.name}, which this run starts from, was charged under {theirs}",
            f"Use privacy.adjacency={theirs}",
        )
