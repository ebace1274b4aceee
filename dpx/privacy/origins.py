"""What a run's starting parameters cost: the runs and files they come from, as its ledger and its statement carry them.

A guarantee does not end where a run ends: whoever trains on with its weights on the same data spends once more. So a run that starts from
another one, by a fork or by `init=run`, takes over the charges of all runs before it. It composes with them unless the user declares that
their data share no unit with its own (`init.disjoint_from`). A run without a guarantee on data that may be shared leaves none.
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

# Declared, never found: a relation that one row of the data could change would tell of that row.
Relation = Literal["unknown", "disjoint"]

WORDS = {
    "unknown": "data that may be this run's",
    "disjoint": "data that the user declares to share no unit with this run's",
}

# Of the audit that travels with a run (`audit.verdict` of its statement).
VERDICTS = {"pending": "is pending: it has no verdict yet", "passes": "passes", "fails": "fails: it proves more than was claimed"}

MEANING = (
    "epsilon is that of this run and of every run named here that is composed with it; noise.epsilon, where it was given, was the target "
    "for this run's own steps alone, which planned.epsilon is of"
)


@declaration
class Origin:
    """A run or a file that a run's starting parameters come from, however many runs ago.

    `identity` is the name of its ledger; of a file, the checksum of its values. `relation` is that of its data to the data of the run that
    holds this record. `is_fork` says that this run goes on from its state, and so with its audit's canaries. `segments` are its charges,
    `reasons` why it has no guarantee, `against` what else takes the guarantee from the run that holds this record. `claim` is what it
    stated; of a checkpoint, what was loaded, made new and left out. `data` holds checksums of its prepared data, `None` for some that
    nobody knows; they never leave private/. `weights` is the checksum of what was taken from it, empty for one further back.
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
        """Its name; a run's is told from those of other runs by its ledger's."""
        return f"{self.name} ({self.identity if self.kind == 'file' else self.identity[:8]})"

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
            word = "the user's word that nothing of the protected data went into it" if self.provenance == "public" else None
            told = {"claim": line["claim"]} if line["claim"] else {}
            return {name: line[name] for name in ("kind", "name", "identity", "weights", "provenance")} | {"word": word} | told
        return {name: value for name, value in line.items() if name not in ("data", "provenance")} | {"composed": self.is_composed}


def of_released(node: dict[str, Any]) -> Origin:
    """The origin that `as_released` wrote, for a run that knows nothing else about it: its data counts as unknown."""
    names = {field.name for field in dataclasses.fields(Origin)} - {"relation", "is_fork", "against", "data", "is_checked"}
    return Origin(**{name: value for name, value in node.items() if name in names})


def merged(known: Iterable[Origin], further: Iterable[Origin]) -> list[Origin]:
    """Both, each identity once: with every charge, every reason and the worst relation that either holds."""
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
    """The charges that join those of a run that starts from `origins`."""
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
            premises.append(
                f"init: the user's word (init.provenance=public) that nothing of the protected data went into {origin.identity}"
            )
            continue
        if origin.is_fork:
            seen = "did not follow from what was seen, or no further branch will be made"
            premises.append(f"whether and where {origin.label} was forked {seen}")
        elif origin.is_composed:
            premises.append(f"init: sampling, noise and steps of this run did not follow from what was seen of {origin.label}")
        if not origin.is_composed:
            premises.append(
                f"init: the user's word (init.disjoint_from) that no unit of this run's protected data is in any data of {origin.label}"
            )
        if not origin.is_checked:
            premises.append(f"init: the statement of {origin.label} is taken at its word: its private/ was not at hand")
    return premises


def facts(origins: Sequence[Origin]) -> dict[str, Any]:
    """`init` of a statement and of a plan."""
    if not origins:
        return {"kind": "random", "origins": []}
    kind = "fork" if origins[0].is_fork else origins[0].kind
    return {"kind": kind, "meaning": MEANING, "origins": [origin.as_released() for origin in origins]}


def charged_in(statement: dict[str, Any]) -> list[dict[str, Any]]:
    """The charges that a statement holds of runs before the one it is of."""
    return join(*charged(of_released(node) for node in statement.get("init", {}).get("origins", []) if node.get("composed")))


def in_words(released: dict[str, Any]) -> str:
    """One of the `origins` of a statement, in words."""
    if released["kind"] == "file":
        return f"{released['name']} ({released['identity']}), {released['word'] or 'of unknown provenance'}"
    stated, audit = released["claim"].get("guarantee", "none stated yet"), released["claim"].get("audit")
    charged_here = "its steps are charged here too" if released["composed"] else f"not charged here; its own guarantee there: {stated}"
    audited = "" if audit is None else f"; its audit {VERDICTS.get(audit, audit)}"
    return f"{of_released(released).label}, trained on {WORDS[released['relation']]}: {charged_here}{audited}"


def unit_mismatch(origin: Origin, data: Data, privacy: Privacy, is_same_data: bool) -> str | None:
    """Why the charges of `origin` cannot be added to those of a run on `data`, in words; `None` where they can or need not be.

    Events of two runs compose for one unit: both runs must define it alike, cut it alike and protect it in the same split. A cap on a
    unit's rows may differ, and so may what a step draws: each event holds for whatever its run kept of the unit.
    """
    if not origin.is_composed or origin.reasons:
        return None
    ours = UnitFacts.of(data, privacy)
    node = origin.claim.get("units")
    if node is None:
        return f"what {origin.name} protects is not recorded"
    theirs = UnitFacts.of_json(node, origin.name)
    # That the vocabularies are one is checked where weights are read, and that it was not learnt from protected text beside this.
    alike = {name: getattr(ours, name) for name in ("unit_mode", "rows_per_unit_max", "vocabulary_source")} | {"vocabulary_sha256": ""}
    differing = dataclasses.replace(theirs, **alike).differences(dataclasses.replace(ours, vocabulary_sha256=""))
    if differing:
        return f"what {origin.name} protects is not what this run protects: {'; '.join(differing)} differ"
    if privacy.unit == "row" and data.pairs == "cross_document" and not is_same_data:
        return f"a row of this run holds text of two documents, which {origin.name} may have paired otherwise"
    return None


def require_same_relation(origins: Iterable[Origin], privacy: Privacy) -> None:
    """Raises `ConfigError` where charges under another neighbouring relation would have to be composed."""
    for origin in origins:
        theirs = origin.claim.get("adjacency", privacy.adjacency)
        require(
            not origin.is_composed or bool(origin.reasons) or theirs == privacy.adjacency,
            f"privacy.adjacency={privacy.adjacency}",
            f"{origin.name}, which this run starts from, was charged under {theirs}",
            f"Use privacy.adjacency={theirs}",
        )
