"""The records of `chain.json`, the statement of a chain."""

from typing import Literal

from dpx.claim.document import Epsilons
from dpx.claim.manifest import CHAIN
from dpx.privacy.unit_facts import UnitFacts
from dpx.records import described, record

STATEMENT = CHAIN
# Format number of the statement of a chain; before 3 it had no release id.
FORMAT = 3


@record
class StageFacts:
    """One run of a stage."""

    stage: str = described("Name of the stage.")
    point: str = described("Its place in the sweep of the stage; empty without one.")
    folder: str = described("Name of its run folder, beside that of the chain.")
    job: Literal["train", "prepare"] = described("Whether it trains, or prepares text alone.")
    init: str | None = described("The stage whose weights it starts from; null without one.")
    vocabulary: str | None = described("The stage whose vocabulary it reads; null where it reads or fits its own.")
    provenance: str | None = described("`public` where the user vouches that none of its text needs protection.")
    disjoint_from: tuple[str, ...] = described("Stages with which it shares no unit, by the user's word.")
    state: Literal["finished", "not_run"] = described("Whether it has run to its end.")
    identity: str | None = described("Name of its ledger; null before it has one.")
    guarantee: str | None = described("The guarantee in its statement; null before it has one, and of a stage that trains nothing.")
    epsilon: Epsilons = described("The headline of its statement, by accountant.")
    compared_by: str | None = described("The rows that its points are compared by: held-out rows, or the test set itself.")
    statement: str | None = described("Checksum of its own statement; null before it has one.", default=None)


@record
class Protected:
    """What is claimed of the protected text of one stage, when everything that the chain releases is seen."""

    stage: str = described("Name of the stage.")
    protects: str = described("One unit of it, as text.")
    unit: UnitFacts = described("The record of its units.")
    delta: float = described("Delta of the claim.")
    accountant: str = described("The accountant whose epsilon is the headline.")
    composed_with: tuple[str, ...] = described("Stages that may hold the same units and whose steps are charged here too.")
    guarantee: str = described("`dp`, `none`, or `dp_by_<package>`.")
    reasons: tuple[str, ...] = described("Reasons against a guarantee; empty for a stage with one.")
    epsilon: Epsilons = described("Epsilon of all these stages together, by accountant; empty without a proof.")


@record
class ChainClaim:
    """The claim of all stages together."""

    guarantee: str = described("`dp` where every private stage has a guarantee, `none`, `dp_by_<package>`, or `not_private`.")
    reasons: tuple[str, ...] = described("Reasons against a guarantee; empty for a chain with one.")
    protects: tuple[Protected, ...] = described("One entry for each private stage.")
    assumptions: tuple[str, ...] = described("What must be true, beside the assumptions of each stage's own statement.")
    not_covered: tuple[str, ...] = described("What the claim does not cover, in sentences.")


@record
class ChainStatement:
    """The statement of a chain: what each of its stages protects."""

    kind: Literal["chain"] = "chain"
    format: int = described("Format number of this file.", default=FORMAT)
    release: str = described("Random id of the release, which its manifest repeats; empty before it is written.", default="")
    name: str = described("Name of the chain.")
    replicate: int = described("Number of the repeat.")
    claim: ChainClaim = described("What all stages together protect.")
    stages: tuple[StageFacts, ...] = described("Every run of every stage, in the order in which they run.")
