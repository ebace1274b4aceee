"""What a chain protects: for each private stage, what a run would claim that begins from everything that the other stages release.

Whoever sees the last stage's weights may see those of every other stage too. So the other stages, with all that they come from, are origins
of the claim about one stage's text, as the origins in a run's own ledger are: the same rules (`dpx.init.start.related`,
`dpx.privacy.origins`) decide what is composed and what leaves no guarantee. Only the user's word separates two stages (`disjoint_from`,
`provenance=public`), and it covers the data of these two stages alone, not that of what they come from.
"""

import dataclasses
from collections.abc import Sequence

from dpx.claim.spent import Spent
from dpx.config.declared_chain import Chain
from dpx.init.relation import are_same
from dpx.init.start import Held, related
from dpx.interop.card import among
from dpx.privacy.declared_privacy import Accountant, UnitFacts
from dpx.privacy.origins import Origin, charged, given_protected, merged, reasons_of
from dpx.privacy.segments import Segments, join
from dpx.statement import outside_code
from dpx.statement.chain_seal import ChainClaim, Protected


@dataclasses.dataclass(frozen=True)
class StageRelease:
    """One run of a stage as the joint claim reads it, from its ledger, or from its plan before it has run.

    `origins` are the run itself first and then the origins in its ledger; a stage that prepared text alone has none, since other stages
    release what they took from it. `texts` are the identities of its text, from which other stages may learn their vocabularies. `segments`
    are all its charges, those of its origins included; `units` are what they protect, `None` without privacy; `reasons` say why it has no
    guarantee by itself.
    """

    stage: str
    label: str
    held: Held
    accountant: Accountant
    is_private: bool
    origins: tuple[Origin, ...]
    texts: tuple[str, ...] = ()
    segments: Segments = dataclasses.field(default_factory=list)
    units: UnitFacts | None = None
    reasons: tuple[str, ...] = ()

    @property
    def identities(self) -> set[str]:
        """The identities under which its own data is an origin of other runs: its ledger and its text."""
        return {*self.texts, *(one.identity for one in self.origins[:1])}


def claim(chain: Chain, releases: Sequence[StageRelease], missing: Sequence[str] = ()) -> ChainClaim:
    """Returns the claim of all stages together; `missing` are stages that have not run, of which nothing can be claimed yet."""
    protects = tuple(_protected(chain, one, releases, missing) for one in releases if one.is_private)
    reasons = tuple(dict.fromkeys(f"{one.stage}: {reason}" for one in protects for reason in one.reasons))
    by = outside_code.joined(*(outside_code.packages_of_guarantee(one.guarantee) or () for one in protects))
    public, assumptions, not_covered = [name for name, stage in chain.stages.items() if stage.provenance == "public"], [], []
    bare = list(dict.fromkeys(one.stage for one in releases if one.origins and not one.is_private and one.stage not in public))
    if bare:
        not_covered.append(f"the rows of {', '.join(bare)}: they are trained on without privacy, and their weights may repeat them")
    for name, stage in chain.stages.items():
        key = f"chain.stages.{name}"
        if stage.provenance == "public":
            assumptions.append(f"the user vouches that no text of {name} needs protection ({key}.provenance=public)")
        for other in stage.disjoint_from:
            assumptions.append(f"the user vouches that no unit of {name} is in any data of {other}, or the reverse ({key}.disjoint_from)")
        if stage.sweep:
            not_covered.append(f"the choice among the points of {name}, which reads its rows without noise")
    if protects:
        assumptions.append(
            "the assumptions in the statement of each private stage hold, and no stage was changed after results of another were seen"
        )
    not_covered += dict.fromkeys(sentence for one in releases for sentence in given_protected((), one.origins))
    not_covered.append("other chains and runs on the same text, repeats of this chain included")
    return ChainClaim(
        guarantee=outside_code.guarantee(bool(protects), list(reasons), by),
        reasons=reasons if protects else ("no stage adds noise",),
        protects=protects,
        assumptions=tuple(assumptions),
        not_covered=tuple(not_covered),
    )


def _protected(chain: Chain, own: StageRelease, releases: Sequence[StageRelease], missing: Sequence[str]) -> Protected:
    others = [one for one in releases if one.label != own.label]
    # The origins of everything that is released beside it, related to its data; its own origins are among them.
    declared = {one.identity for one in own.origins[1:] if one.relation == "disjoint"}
    declared |= {name for one in others if chain.are_disjoint(own.stage, one.stage) for name in one.identities}
    beside: list[Origin] = []
    for one in (own, *others):
        first, further = one.origins[:1], one.origins[1:]
        # What another run on the same data was declared to share no unit with shares none with these data either.
        is_holders = are_same(first[0].data, own.held.checksums) if first else False
        beside += [related(origin, own.held, declared, False) for origin in first]
        beside += [related(origin, own.held, declared, is_holders) for origin in further]
    seen = [one for one in merged([], beside) if one.identity != own.origins[0].identity]
    stages = {first.identity: one.stage for one in others for first in one.origins[:1] if not chain.are_disjoint(own.stage, one.stage)}
    fixes = {name: f" (declare chain.stages.{stage}.disjoint_from=[{own.stage}] if they share no unit)" for name, stage in stages.items()}
    found = [f"{reason}{fixes.get(one.identity, '')}" for one in seen for reason in reasons_of(one)]
    reasons = [*own.reasons, *found]
    for one in others:
        same = among(own.held.data.known_as, one.held.data.known_as) if chain.are_disjoint(own.stage, one.stage) else ()
        if same:
            reasons.append(f"{one.stage} is declared to share no unit with it, but both are {same[0]}")
    if missing:
        reasons.append(f"the stages {', '.join(missing)} have not run, and what they will release is not charged")
    segments = join(own.segments, *charged(seen))
    by = outside_code.packages_of_segments(segments)
    spent = None if reasons or by else Spent(own.accountant, own.held.privacy, segments)
    epsilon = {} if spent is None else {name: spent.epsilon(name) for name in spent.accountants}
    if spent is not None and epsilon[spent.accountants[0]] is None:
        reasons, epsilon = [f"accountant={own.accountant.name} finds no finite epsilon at this delta"], {}
    assert own.units is not None
    composed = {one.identity for one in seen if one.is_composed and one.segments}
    return Protected(
        stage=own.label,
        protects=own.units.in_words(),
        unit=own.units.as_released(tells_words=False),
        delta=own.held.privacy.delta,
        accountant=spent.accountants[0] if spent is not None else own.accountant.name,
        composed_with=tuple(one.label for one in others if one.is_private and composed & {first.identity for first in one.origins[:1]}),
        guarantee=outside_code.guarantee(True, reasons, by),
        reasons=tuple(dict.fromkeys(reasons)),
        epsilon=epsilon,
    )
