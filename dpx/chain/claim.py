"""What a chain protects: the charges and the reasons of its stages, joined where stages share units or may share them.

Whoever sees the last stage's weights may see those of every other stage too. So the claim about one stage's text covers all stages that
may hold the same units: private ones are composed, and one without privacy leaves nothing to claim. Only the user's word separates two
stages (`disjoint_from`, `provenance=public`).
"""

import dataclasses
from collections.abc import Iterator, Sequence

from dpx.chain.declarations import Chain
from dpx.chain.document import ChainClaim, Protected
from dpx.claim import outside_code
from dpx.claim.spent import Spent
from dpx.data.declarations import Data
from dpx.interop.trained_on import among
from dpx.privacy.declarations import Accountant, Privacy
from dpx.privacy.ledger import join
from dpx.privacy.segments import Segments
from dpx.privacy.unit_facts import UnitFacts, unlike


@dataclasses.dataclass(frozen=True)
class StageCharge:
    """One run of a stage as the join reads it.

    `segments` are its charges, those of runs that it starts from included; `units` what they protect, `None` without privacy; `reasons`
    say why it has no guarantee by itself. `is_planned`: nothing has run, so these are its plan. `trains`: it does more than prepare text.
    """

    stage: str
    label: str
    data: Data
    privacy: Privacy
    accountant: Accountant
    is_private: bool
    segments: Segments
    units: UnitFacts | None
    reasons: tuple[str, ...] = ()
    is_planned: bool = False
    trains: bool = True


def claim(chain: Chain, charges: Sequence[StageCharge], missing: Sequence[str] = ()) -> ChainClaim:
    """Returns the claim of all stages together; `missing` are stages that have not run, of which nothing can be claimed yet."""
    protects = tuple(_protected(chain, one, charges, missing) for one in charges if one.is_private)
    reasons = tuple(dict.fromkeys(f"{one.stage}: {reason}" for one in protects for reason in one.reasons))
    by = outside_code.joined(*(outside_code.packages_of_guarantee(one.guarantee) or () for one in protects))
    public = [name for name, stage in chain.stages.items() if stage.provenance == "public"]
    bare = list(dict.fromkeys(one.stage for one in charges if one.trains and not one.is_private and one.stage not in public))
    return ChainClaim(
        guarantee=outside_code.guarantee(bool(protects), list(reasons), by),
        reasons=reasons if protects else ("no stage adds noise",),
        protects=protects,
        assumptions=tuple(_assumptions(chain, [one.stage for one in protects])),
        not_covered=tuple(_not_covered(chain, bare)),
    )


def _protected(chain: Chain, own: StageCharge, charges: Sequence[StageCharge], missing: Sequence[str]) -> Protected:
    others = [one for one in charges if one.label != own.label and one.trains]
    sharing = [one for one in others if not chain.are_disjoint(own.stage, one.stage)]
    reasons = [*own.reasons, *_against(chain, own, charges, sharing)]
    if missing:
        reasons.append(f"the stages {', '.join(missing)} have not run, and what they will release is not charged")
    composed = [one for one in sharing if one.is_private]
    segments = join(own.segments, *(one.segments for one in composed))
    by = outside_code.packages_of_segments(segments)
    spent = None if reasons or by else Spent(own.accountant, own.privacy, segments)
    epsilon = {} if spent is None else {name: spent.epsilon(name) for name in spent.accountants}
    if spent is not None and epsilon[spent.accountants[0]] is None:
        reasons, epsilon = [f"accountant={own.accountant.name} finds no finite epsilon at this delta"], {}
    assert own.units is not None
    return Protected(
        stage=own.label,
        protects=own.units.in_words(),
        unit=own.units,
        delta=own.privacy.delta,
        accountant=spent.accountants[0] if spent is not None else own.accountant.name,
        composed_with=tuple(one.label for one in composed),
        guarantee=outside_code.guarantee(True, reasons, by),
        reasons=tuple(dict.fromkeys(reasons)),
        epsilon=epsilon,
    )


def _against(chain: Chain, own: StageCharge, charges: Sequence[StageCharge], sharing: Sequence[StageCharge]) -> Iterator[str]:
    """Yields the reasons why other stages leave the text of `own` without a guarantee."""
    for one in sharing:
        word = f"declare chain.stages.{one.stage}.disjoint_from=[{own.stage}] if they share no unit"
        if not one.is_private:
            yield f"{one.stage} trains without privacy on rows that may be among its text ({word})"
            continue
        unlike_units = unlike([_comparable(own), _comparable(one)])
        if one.reasons:
            yield f"{one.label} may hold the same units and has no guarantee: {'; '.join(one.reasons)}"
        elif unlike_units:
            yield f"{one.label} may hold the same text and protects other units ({'; '.join(unlike_units)}): costs do not add up ({word})"
    for one in charges:
        same = among(own.data.known_as, one.data.known_as) if one.label != own.label and one not in sharing else ()
        if same:
            yield f"{one.stage} is declared to share no unit with it, but both are {same[0]}"
    yield from _of_vocabulary(chain, own, charges)


def _comparable(charge: StageCharge) -> UnitFacts | None:
    """Returns the record without what may differ between stages whose costs add up.

    That weights fit the vocabulary is checked when they are read.
    """
    if charge.units is None:
        return None
    facts = {"unit_mode": "", "rows_per_unit_max": 0, "vocabulary_source": ""}
    return dataclasses.replace(charge.units, **facts, vocabulary_sha256="" if charge.is_planned else charge.units.vocabulary_sha256)


def _of_vocabulary(chain: Chain, own: StageCharge, charges: Sequence[StageCharge]) -> Iterator[str]:
    """Yields the reason why a vocabulary that another stage fitted reveals text of `own`.

    Weights carry their vocabulary's origin themselves.
    """
    fed = chain.stages[own.stage].vocabulary
    source = next((one for one in charges if one.stage == fed), None)
    if source is None or chain.are_disjoint(own.stage, source.stage) or source.data.vocabulary.path is not None:
        return
    split = source.data.vocabulary.fit_on
    names = ("source", "split_salt", "public_fraction", "heldout_fraction", "heldout_by")
    is_split_alike = (
        all(getattr(source.data, name) == getattr(own.data, name) for name in names) and own.privacy.unit == source.privacy.unit
    )
    if split == "protected" or not is_split_alike:
        yield f"its vocabulary was fitted on {split} text of {source.stage}, which may be protected here"


def _assumptions(chain: Chain, private: Sequence[str]) -> Iterator[str]:
    for name, stage in chain.stages.items():
        if stage.provenance == "public":
            yield f"the user vouches that no text of {name} needs protection (chain.stages.{name}.provenance=public)"
        for other in stage.disjoint_from:
            yield f"the user vouches that no unit of {name} is in any data of {other}, or the reverse (chain.stages.{name}.disjoint_from)"
    if private:
        yield "the assumptions in the statement of each private stage hold, and no stage was changed after results of another were seen"


def _not_covered(chain: Chain, bare: Sequence[str]) -> Iterator[str]:
    if bare:
        yield f"the rows of {', '.join(bare)}: they are trained on without privacy, and their weights may repeat them"
    for name, stage in chain.stages.items():
        if stage.sweep:
            yield f"the choice among the points of {name}, which reads its rows without noise"
    yield "other chains and runs on the same text, repeats of this chain included"
