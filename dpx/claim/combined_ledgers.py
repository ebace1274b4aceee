"""Combines the charges of several ledgers into one claim: what each source states, and whether all protect the same units.

It reads no data and imports no jax.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpx.claim.caveats import chosen_late, refuted, seeded, unlike_units
from dpx.declaration import ConfigError, require
from dpx.durable import seal
from dpx.privacy import events, origins
from dpx.privacy.declared_privacy import Privacy, UnitFacts, unlike
from dpx.privacy.ledger import Ledger
from dpx.privacy.segments import Segments, join
from dpx.statement import agreement, outside_code, received
from dpx.statement.received import CheckedBy, weakest
from dpx.statement.seals import STATEMENT, read_node, read_statement, statement_of
from dpx.statement.statement_records import PlainStatement, RunStatement

_NAME = "Name the statement of a private run"
_ALONE = "account for each one separately"


class Source(NamedTuple):
    """Holds the charged steps of one source, what they were checked against (`dpx.statement.received`), and its packages.

    `name` is its name in error messages. `before` are the steps of earlier runs whose parameters this run starts from. `delta` and
    `adjacency` are those of its claim, `None` if it does not state them; `units` are what its steps protect, `None` for steps of unknown
    units; `reasons` say why it has no guarantee.
    """

    name: str
    segments: Segments
    checked_by: CheckedBy
    by: tuple[str, ...] = ()
    before: Segments = []
    delta: float | None = None
    adjacency: str | None = None
    units: tuple[UnitFacts | None, ...] = ()
    reasons: tuple[str, ...] = ()


class Together(NamedTuple):
    """Holds what several sources guarantee together: their charges, common steps once, and what these are accounted at.

    `before` are the charges of runs that they start from, `by` the packages that the claim trusts, and `reasons` say, with the name of a
    source, why it has no guarantee.
    """

    checked_by: CheckedBy
    segments: Segments
    before: Segments
    delta: float
    adjacency: str
    by: tuple[str, ...]
    unit: UnitFacts | None
    reasons: tuple[str, ...]


def together(
    sources: Sequence[Source], delta: float | None = None, adjacency: str | None = None, otherwise: Privacy | None = None
) -> Together:
    """Returns what several sources guarantee together, at the smallest delta that one of them states.

    Raises `ConfigError` if nothing is charged, for sources that do not protect the same units, and for an `adjacency` under which charges
    are not proved; `otherwise` is used where no source states delta and relation.
    """
    segments = join(*(one.segments for one in sources))
    named = ", ".join(one.name for one in sources)
    require(bool(segments), named, "its ledger contains no charged step", "Name a private run that has begun")
    first, *others = sources
    # A single source is not compared; its reasons list what is unknown or differs within it.
    for one in sources if others else ():
        differing = unlike(one.units)
        reason = f"cannot be composed with the others: {'; '.join(differing)}"
        require(not differing, f"job.ledgers={one.name}", reason, f"Leave it out, and {_ALONE}")
    for other in others:
        differing = _facts(first, adjacency).differences(_facts(other, adjacency))
        relation = _RELATION if any(one.startswith("privacy.adjacency") for one in differing) else ""
        reason = f"{first.name} and {other.name} protect different units: {'; '.join(differing)}"
        require(not differing, "job.ledgers", reason, f"{_ALONE.capitalize()}{relation}")
    delta, adjacency = stated_at(sources, delta, adjacency, otherwise)
    return Together(
        checked_by=weakest(one.checked_by for one in sources),
        segments=segments,
        before=join(*(list(one.before) for one in sources)),
        delta=delta,
        adjacency=adjacency,
        by=outside_code.joined(outside_code.packages_of_segments(segments), *(one.by for one in sources)),
        # Unknown where a single source does not state it, or holds steps of several units.
        unit=None if unlike(first.units) else _facts(first, adjacency),
        reasons=tuple(f"{Path(one.name).name}: {why}" for one in sources for why in one.reasons),
    )


def read(path: Path) -> Source:
    """Returns the charged steps of a run folder, a ledger file or a statement.

    Raises `ConfigError` without charged steps, or if the parts of a folder disagree.
    """
    if path.is_dir():
        checked = agreement.check(path)
        if checked is not None:
            return _of_ledger(checked, "ledger", path, path)
        path = path / "release" / STATEMENT
    require(path.is_file(), f"ledger={path}", "this path has no ledger", f"Name a run folder, a ledger file or a {STATEMENT}")
    if path.suffix != ".json":
        # A ledger in the private folder of a run is beside the files that follow from it.
        run = path.parents[1] if path.parent.name == "private" else None
        is_checked = run is not None and agreement.check(run) is not None
        return _of_ledger(Ledger(path), "ledger" if is_checked else None, run, path)
    node = read_node(path, _NAME)
    checked_by = _checked_by(path, node)
    statement = statement_of(node, path, _NAME)
    segments = None if isinstance(statement, PlainStatement) else statement.ledger.segments
    if isinstance(statement, PlainStatement) or segments is None:
        raise ConfigError(f"ledger={path}", "is a statement that contains no ledger", _NAME)
    units = statement.units
    return Source(
        name=str(path),
        segments=join(segments),
        checked_by=checked_by,
        by=outside_code.packages_of_guarantee(statement.guarantee) or (),
        before=origins.charged_in(statement.init) if isinstance(statement, RunStatement) else [],
        delta=statement.delta,
        adjacency=statement.adjacency,
        units=tuple(units),
        reasons=tuple(dict.fromkeys([*statement.reasons, *unlike_units(units, bool(segments))])),
    )


def _checked_by(path: Path, document: dict[str, Any]) -> CheckedBy:
    """Returns what a statement by itself was checked against: a run or a study may have charged more since it was written.

    Raises `ConfigError` if it is not one of the folder that holds it, or contradicts the release that it belongs to.
    """
    from dpx.claim.search_record import CHAIN, Record

    for folder in path.absolute().parents[1:3]:
        if (folder / agreement.LEDGER).is_file():
            entered = agreement.check(folder)
            sealed = set() if entered is None else entered.statements
        elif (folder / "private" / CHAIN).is_file():
            record = Record(folder.parents[1], folder)
            record.chain.close()
            sealed = record.sealed
        else:
            continue
        require(
            seal(document) in sealed,
            path,
            f"differs from the statement whose checksum is in {folder.name}",
            f"Restore the file, or name {folder.name} itself",
        )
        return None
    return received.read(path.parent).checked_by


def _of_ledger(entered: Ledger, checked_by: CheckedBy, run: Path | None, path: Path) -> Source:
    """Returns the source of a ledger; `run` is the run folder that holds the ledger, whose statement has further facts about it."""
    declared = None if entered.plan is None else entered.plan.declared
    privacy = {} if declared is None else declared.privacy.values
    places = [] if run is None else [run / place / STATEMENT for place in agreement.RELEASES]
    stated = [read_statement(file) for file in places if file.is_file()]
    known = [reason for one in stated for reason in one.reasons]
    if not stated and entered.statements:
        known = ["the statement of this ledger is missing, so other reasons against its guarantee are not known"]
    known += [*seeded(entered), *chosen_late(entered), *refuted(entered.verdict)]
    known += [*origins.reasons(entered.origins), *unlike_units(entered.units, bool(entered.segments()))]
    return Source(
        name=str(path),
        segments=entered.segments(),
        checked_by=checked_by,
        before=join(*origins.charged(entered.origins)),
        delta=privacy.get("delta", min((one.delta for one in stated if isinstance(one, RunStatement)), default=None)),
        adjacency=privacy.get("adjacency"),
        units=tuple(entered.units),
        reasons=tuple(dict.fromkeys(known)),
    )


_RELATION = ", or set job.adjacency to a relation under which all of them are proved"


def _facts(source: Source, adjacency: str | None) -> UnitFacts:
    facts = source.units[0]
    assert facts is not None
    return facts if adjacency is None else dataclasses.replace(facts, adjacency=adjacency)


def relation_of(source: Source) -> str | None:
    """Returns the neighbouring relation of a source, from its newest steps, else from its plan or statement; `None` if none of them has
    it."""
    newest = source.units[-1] if source.units else None
    return source.adjacency if newest is None else newest.adjacency


def stated_at(sources: Sequence[Source], delta: float | None, adjacency: str | None, otherwise: Privacy | None) -> tuple[float, str]:
    """Returns the delta and the neighbouring relation that `sources` are accounted at.

    They are the given values, else the values that the sources state (the smallest delta), else those of `otherwise`. Raises `ConfigError`
    if their charges are not proved under that relation.
    """
    deltas = [one.delta for one in sources if one.delta is not None]
    relation = adjacency or next((stated for one in sources if (stated := relation_of(one))), otherwise and otherwise.adjacency)
    smallest = delta if delta is not None else min(deltas, default=otherwise and otherwise.delta)
    if relation is None or smallest is None:
        raise ConfigError(sources[0].name, "states neither delta nor the neighbouring relation", "Name job.delta and job.adjacency")
    events.require_relation(f"job.adjacency={relation}", relation)
    for source in sources:
        stated = relation_of(source)
        if stated is not None:
            events.require_proved(source.segments, stated, relation, source.name)
    return smallest, relation
