"""Keeps the origins of a run: the runs, files, texts and tables that its starting parameters, vocabulary and settings come from.

They are recorded in the run's ledger and statement, with their charges and with the reasons why they have no guarantee.

A guarantee does not end where a run ends: further training of its weights on the same data costs more. So a run that starts from another
one, by a fork or by `init=run`, inherits the charges of all runs before it. It composes its own charges with them unless the user declares
that their data share no unit with its own (`init.disjoint_from`). A run that starts from one without a guarantee, on data that may be
shared, has no guarantee. A vocabulary is read from a text without noise, so the text that it was learnt from is an origin as well.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dpx.declaration import ConfigError
from dpx.files.records import described, record
from dpx.privacy import events
from dpx.privacy.declared_privacy import PUBLIC_SOURCES, Privacy, UnitFacts, released_checksum
from dpx.privacy.segments import Segment, Segments, join

# Declared, never computed from data: a relation that one row of the data could change would reveal something about that row.
Relation = Literal["unknown", "disjoint"]

WORDS = {
    "unknown": "data that may be this run's",
    "disjoint": "data that the user declares to share no unit with this run's",
}

# Texts for the state of a run's audit (`audit.verdict` of its statement).
VERDICTS = {"pending": "is pending: it has no verdict yet", "passes": "passes", "fails": "fails: its lower bound exceeds the claim"}

MEANING = (
    "epsilon covers this run and every run named here that is composed with it; noise.epsilon, if set, was the target for this run's own "
    "steps alone, whose epsilon is planned.epsilon"
)

# The identity of a file whose weights have not been read: a plan and an explanation do not need them.
UNREAD = ""


@record
class VocabularyFacts:
    """The vocabulary of a run; weights have no meaning with another one."""

    source: str | None = described("Where it is from: a file, the public split, or protected text; null if that is unknown.", default=None)
    sha256: str | None = described(
        "Checksum of its word pieces; null before the data is prepared, and in a released file if it is not public.", default=None
    )

    def as_released(self, tells_words: bool = True) -> "VocabularyFacts":
        """Returns the record for a file that may leave the machine; `tells_words` as in `UnitFacts.as_released`."""
        return dataclasses.replace(self, sha256=released_checksum(self.source, self.sha256) if tells_words else None)


@record
class ParentClaim:
    """The statement and the declarations of a run from which a later one starts."""

    guarantee: str | None = described("Its guarantee; null before it stated any.", default=None)
    epsilon: dict[str, float | None] | None = described("Its epsilon by accountant; null before it stated any.", default=None)
    steps: int | None = described("Its planned number of steps.", default=None)
    unit: str | None = described("What one protected unit of it is.", default=None)
    adjacency: str | None = described("Its neighbouring relation.", default=None)
    delta: float | None = described("Its delta.", default=None)
    audit: str | None = described("State of its audit: pending, passes or fails; null without one.", default=None)
    given_protected: tuple[str, ...] = described("Who was given its metrics without noise.", default=())
    units: UnitFacts | None = described("The record of its units.", default=None)


@record
class CheckpointFacts:
    """The parameters that were taken from a checkpoint that no run of dpx trained."""

    loaded: tuple[str, ...] = described("Paths of the parameters that were loaded.")
    made_new: tuple[str, ...] = described("Paths of the parameters that the checkpoint lacks, drawn at random.")
    left_out: tuple[str, ...] = described("Parameters of the checkpoint that the model has no use for.")
    trained_on: tuple[str, ...] = described("Data that it was trained on, by the user's word and by its model card.")
    names: tuple[str, ...] = described("Its name, and the one in its own config, often that of the weights that it began from.")


Kind = Literal["run", "file", "text", "table"]

# What a run owes to an origin of each kind, for lists of origins.
OWED = {"run": "starts from", "file": "starts from", "text": "vocabulary from", "table": "settings chosen by"}
# The part of a config by which each kind of origin comes into a run.
_KEYS = {"run": "init", "file": "init", "text": "vocabulary", "table": "chosen_by"}


@record
class ReleasedOrigin:
    """What a run's starting parameters, vocabulary or settings come from, directly or through earlier runs, as a statement holds it."""

    kind: Kind = described(
        "A run of dpx, a file of weights, a prepared text that a vocabulary was learnt from, or measured runs that settings were chosen by."
    )
    name: str = described("Its name.")
    identity: str = described(
        "Name of its ledger; of a file, the checksum of its values, empty if it may not be released; of a text and a table, a random name."
    )
    relation: Relation = described("Relation of its data to the data of the run that holds this record.", default="unknown")
    is_fork: bool = described("Whether the run resumes from its state, and so keeps the canaries of its audit.", default=False)
    weights: str = described("Checksum of the weights that were loaded from it; empty where that may not be released.", default="")
    segments: tuple[Segment, ...] = described("Its charges.", default=())
    reasons: tuple[str, ...] = described("Why it has no guarantee.", default=())
    against: tuple[str, ...] = described("Other reasons why the run that holds this record has no guarantee.", default=())
    claim: ParentClaim = described("What it stated.", default=ParentClaim())
    checkpoint: CheckpointFacts | None = described("What was taken from a checkpoint; null of a run and of a plain file.", default=None)
    vocabulary: VocabularyFacts = described("Its vocabulary.", default=VocabularyFacts())
    is_checked: bool = described("Whether its ledger was checked against everything that follows from it.", default=False)
    provenance: str | None = described("The user's word for where a file or a table is from; null of a run.", default=None)

    @property
    def label(self) -> str:
        """Returns its name and identity; for a run the identity is the first 8 digits of the name of its ledger.

        A file of unknown provenance may hold what was learnt from protected text, so its checksum is not among what may be released.
        """
        if self.kind == "file" and self.provenance != "public":
            return self.name
        if self.kind == "file":
            return f"{self.name} ({self.identity if self.identity != UNREAD else 'its checksum is noted when the run starts'})"
        return f"{self.name} ({self.identity[:8]})"

    @property
    def may_share(self) -> bool:
        """Returns whether its data may hold units of the run that holds this record; of a file and a table, the provenance says that."""
        return self.kind in ("run", "text") and self.relation != "disjoint"

    @property
    def is_of_weights(self) -> bool:
        """Returns whether starting parameters come from it."""
        return self.kind in ("run", "file")

    @property
    def is_composed(self) -> bool:
        """Returns whether its charges are composed with those of the run that holds this record."""
        return self.kind == "run" and self.may_share


@record
class Origin(ReleasedOrigin):
    """An origin as a ledger holds it; its further fields never leave private/, and no statement has a place for them."""

    data: tuple[str | None, ...] = described("Checksums of its prepared data, null for unknown data.", default=(None,))
    files: tuple[str, ...] = described("Checksums of the files that its data was read from.", default=())
    step: int | None = described("Steps of the checkpoint that was loaded of a run; null for what it released.", default=None)

    def as_released(self, tells_words: bool = True) -> ReleasedOrigin:
        """Returns the record of the origin for a statement, without checksums of data, and of weights that are neither public nor
        released."""
        units = None if self.claim.units is None else self.claim.units.as_released(tells_words)
        is_of_unknown_file = self.kind == "file" and self.provenance != "public"
        told = dataclasses.replace(
            self,
            identity=UNREAD if is_of_unknown_file else self.identity,
            weights="" if is_of_unknown_file or self.step else self.weights,
            vocabulary=self.vocabulary.as_released(tells_words),
            claim=dataclasses.replace(self.claim, units=units),
        )
        return ReleasedOrigin(**{field.name: getattr(told, field.name) for field in dataclasses.fields(ReleasedOrigin)})


# What a statement says of an origin that holds for any run that starts from it.
_LASTING = ("kind", "name", "identity", "weights", "segments", "reasons", "claim", "checkpoint", "vocabulary", "provenance")


@record
class Beginning:
    """Where the starting parameters come from."""

    kind: Literal["random", "fork", "run", "file"] = described("Random parameters, a fork, the weights of another run, or a file.")
    meaning: str | None = described("What the headline covers then; null for random parameters.")
    origins: tuple[ReleasedOrigin, ...] = described("What they come from, nearest first, and what vocabulary and settings come from.")

    @property
    def of_weights(self) -> tuple[ReleasedOrigin, ...]:
        """Returns the runs and files that the starting parameters come from, nearest first."""
        return tuple(one for one in self.origins if one.is_of_weights)


# As JSON, where a statement says nothing of its parameters.
RANDOM = {"kind": "random", "meaning": None, "origins": []}


def of_released(released: ReleasedOrigin) -> Origin:
    """Returns the origin of a released record, for a run that has no other facts about it: its data counts as unknown."""
    return Origin(**{name: getattr(released, name) for name in _LASTING})


def merged(known: Iterable[Origin], further: Iterable[Origin]) -> list[Origin]:
    """Returns both lists with each identity once: with every charge, every reason and the worse relation of the two records."""
    by_identity: dict[str, Origin] = {}
    for origin in (*known, *further):
        other = by_identity.get(origin.identity)
        if other is not None:
            origin = dataclasses.replace(
                other,
                relation="disjoint" if other.relation == origin.relation == "disjoint" else "unknown",
                is_fork=other.is_fork or origin.is_fork,
                weights=other.weights or origin.weights,
                segments=tuple(join(other.segments, origin.segments)),
                reasons=_all_of(other.reasons, origin.reasons),
                against=_all_of(other.against, origin.against),
                data=_all_of(other.data, origin.data),
                files=_all_of(other.files, origin.files),
                is_checked=other.is_checked and origin.is_checked,
                provenance=other.provenance if other.provenance == origin.provenance else None,
                claim=dataclasses.replace(other.claim, given_protected=_all_of(other.claim.given_protected, origin.claim.given_protected)),
            )
        by_identity[origin.identity] = origin
    return list(by_identity.values())


def _all_of(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys([*one, *other]))


def charged(origins: Iterable[ReleasedOrigin]) -> list[Segments]:
    """Returns the charges of `origins` that are added to the charges of a run that starts from them."""
    return [list(origin.segments) for origin in origins if origin.is_composed]


def reasons(origins: Iterable[Origin]) -> list[str]:
    """Returns the reasons why a run that starts from `origins` has no guarantee, each with the part of its config."""
    return [f"{_KEYS[origin.kind]}: {reason}" for origin in origins for reason in reasons_of(origin)]


def reasons_of(origin: Origin) -> list[str]:
    """Returns the reasons why a run has no guarantee if its release depends on `origin`, or is seen together with one that does."""
    against = []
    if origin.kind in ("file", "table") and origin.provenance != "public":
        against.append(f"{origin.label} is of unknown provenance")
    if origin.may_share and origin.reasons:
        against.append(f"{origin.label} has no guarantee on {WORDS[origin.relation]}: {'; '.join(origin.reasons)}")
    return [*against, *origin.against]


def assumptions(origins: Iterable[Origin]) -> list[str]:
    """Returns, as sentences, the assumptions on which the statement of a run that starts from `origins` depends."""
    premises = []
    for origin in origins:
        if origin.kind == "file":
            premises.append(f"init: the user vouches (init.provenance=public) that no protected data was used to make {origin.label}")
            continue
        if origin.kind == "table":
            premises.append(f"chosen_by: the user vouches (chosen_by.provenance=public) that no protected data was read for {origin.label}")
            continue
        if origin.kind == "text":
            word = "the user vouches (data.vocabulary.disjoint_from) that no unit of this run's protected data is in the text of"
            premises += [] if origin.may_share else [f"vocabulary: {word} {origin.label}"]
            continue
        if origin.is_fork:
            seen = "did not depend on its results, or no further branch will be made"
            premises.append(f"whether and where {origin.label} was forked {seen}")
        elif origin.is_composed:
            premises.append(f"init: sampling, noise and steps of this run did not depend on the results of {origin.label}")
        if not origin.is_composed:
            premises.append(
                f"init: the user vouches (init.disjoint_from) that no unit of this run's protected data is in any data of {origin.label}"
            )
        if not origin.is_checked:
            premises.append(f"init: the statement of {origin.label} is trusted without a check: its folder private/ is missing")
    return premises


WITHOUT_NOISE = "metrics without noise (losses, norms, held-out metrics, times, and how many rows each step drew), which "
_GIVES = {"run": "this run gives to ", "trials": "each trial of this search may give to "}


def given_protected(names: Iterable[str], before: Iterable[ReleasedOrigin] = (), by: Literal["run", "trials"] = "run") -> list[str]:
    """Returns, as sentences, who is given metrics without noise: by the holder of a statement, and by the runs `before` it whose data may
    be its own."""
    told = [(_GIVES[by], tuple(names))]
    told += [(f"{origin.label} gave to ", origin.claim.given_protected) for origin in before if origin.may_share]
    return [f"{WITHOUT_NOISE}{who}{' and '.join(to)}" for who, to in told if to]


def given_by_statement(not_covered: Iterable[str]) -> tuple[str, ...]:
    """Returns whom the run or the search of a statement gives metrics without noise, by what its statement does not cover."""
    starts = [WITHOUT_NOISE + gives for gives in _GIVES.values()]
    return tuple(sentence.removeprefix(start) for sentence in not_covered for start in starts if sentence.startswith(start))


def have_public_words(origins: Iterable[Origin]) -> bool:
    """Returns whether no run and no text among `origins` has a vocabulary that was learnt from protected or unknown text.

    A run that starts from such a run reads the same vocabulary, from a file.
    """
    return all(origin.kind not in ("run", "text") or origin.vocabulary.source in PUBLIC_SOURCES for origin in origins)


def facts(origins: Sequence[Origin]) -> Beginning:
    """Returns the field `init` of a statement and of a plan."""
    tells_words = have_public_words(origins)
    known = tuple(origin.as_released(tells_words) for origin in origins)
    of_weights = [origin for origin in origins if origin.is_of_weights]
    if not of_weights:
        return Beginning(kind="random", meaning=None, origins=known)
    first = of_weights[0]
    kind: Any = "fork" if first.is_fork else first.kind
    return Beginning(kind=kind, meaning=MEANING, origins=known)


def charged_in(beginning: Beginning) -> Segments:
    """Returns the charges of the runs before the run of a statement."""
    return join(*charged(beginning.origins))


def in_words(released: ReleasedOrigin) -> str:
    """Returns one of the `origins` of a statement as text."""
    if released.kind in ("file", "table"):
        vouched = "used to make it" if released.kind == "file" else "read for it"
        word = f"the user vouches that no protected data was {vouched}"
        return f"{released.label}; {word if released.provenance == 'public' else 'its provenance is unknown'}"
    if released.kind == "text":
        return f"{released.label}, {WORDS[released.relation]}: the vocabulary was learnt from its {learnt_from(released)}"
    stated, audit = released.claim.guarantee or "not stated yet", released.claim.audit
    charged_here = (
        "its steps are included in this claim"
        if released.is_composed
        else f"its steps are not included in this claim; its guarantee: {stated}"
    )
    audited = "" if audit is None else f"; its audit {VERDICTS.get(audit, audit)}"
    return f"{released.label}, trained on {WORDS[released.relation]}: {charged_here}{audited}"


def learnt_from(origin: ReleasedOrigin) -> str:
    """Returns the split that a vocabulary was learnt from, as text."""
    split = {"protected": "protected", "public_split": "public"}.get(str(origin.vocabulary.source), "unknown")
    return f"{split} split"


# The relation of charges, and that of a claim which may hold them: a claim for the text of a unit is weaker than one for all of it.
WEAKER = ("zero_out", "zero_out_text")


def require_same_relation(origins: Iterable[Origin], privacy: Privacy) -> None:
    """Raises `ConfigError` if charges under another neighbouring relation would have to be composed.

    Charges under zero_out may become part of a claim for texts alone, where their steps are proved for that too: blanking a unit's text
    moves a clipped sum by no more than zeroing out the unit."""
    for origin in origins:
        theirs, ours = origin.claim.adjacency or privacy.adjacency, privacy.adjacency
        if not origin.is_composed or origin.reasons or theirs == ours:
            continue
        value = f"privacy.adjacency={ours}"
        if (theirs, ours) == WEAKER:
            events.require_proved(list(origin.segments), theirs, ours, f"{origin.name}, which this run starts from,", value)
            continue
        raise ConfigError(
            value, f"{origin.name}, which this run starts from, was charged under {theirs}", f"Use privacy.adjacency={theirs}"
        )
