"""The lines of a search's record: one record a kind, told apart by `kind` alone.

To note something new, declare its line here, add it to `Line` and say in `Record` what it means (`dpx.tuning.record`).
"""

from typing import Any, Literal

from dpx.privacy.chain import Mark
from dpx.privacy.lines import SealedStatementLine, StatedLine
from dpx.privacy.segments import Segment
from dpx.privacy.unit_facts import UnitFacts
from dpx.records import described, record
from dpx.tuning.declarations import Budget, Charge
from dpx.tuning.distribution import TrialDistribution


@record
class DrawnNumber:
    """The distribution of the secret number of trials of a `repeat_and_select`."""

    mean: int = described("Its mean.")
    shape: str = described("Its shape, as text because it may be infinite.")


@record
class SharedSettings:
    """What all trials of a search share."""

    charge: Charge = described("How the search charges the choice among its trials.")
    number: DrawnNumber | None = described("Distribution of the number of trials; null where the number is declared.")
    budget: Budget | None = described("What the trials may cost together; null without a budget.")
    config: dict[str, Any] = described("The parts of the config that all trials share, as plain data.")


@record
class HeldLedger:
    """Everything that the ledger of a trial is known to have held."""

    entered: tuple[Segment, ...] = described("The steps that were entered.", default=())
    mark: Mark | None = described("Its last line; null for a trial whose ledger was never read.", default=None)
    units: tuple[UnitFacts | None, ...] = described("What the steps protect; null for steps whose units were not noted.", default=())


@record
class SharedLine:
    """What the first trial began with."""

    kind: Literal["began_with"] = "began_with"
    shared: SharedSettings = described("The settings.")


@record
class NumberLine:
    """The secret number of trials of a `repeat_and_select`."""

    kind: Literal["drawn"] = "drawn"
    number: int = described("The number.")
    drawn_from: DrawnNumber = described("Its distribution.")


@record
class DistributionLine:
    """What trials are drawn from; the last such line before the first trial counts."""

    kind: Literal["draws_from"] = "draws_from"
    distribution: TrialDistribution = described("The distribution.")


@record
class DeclaredLine:
    """The declared number of trials; another such line says that it was raised."""

    kind: Literal["declared"] = "declared"
    trials: int = described("The number.")


@record
class BegunLine:
    """A trial that starts, with its whole plan: it is charged even if its folder is deleted."""

    kind: Literal["begun"] = "begun"
    number: int = described("Number of the trial, from 0.")
    folder: str = described("Name of its run folder.")
    point: tuple[str, ...] = described("The overrides of the trial.")
    plan: tuple[Segment, ...] | None = described("The charge of its whole schedule; null without privacy.")


@record
class AgainLine:
    """A trial that is started again."""

    kind: Literal["again"] = "again"
    number: int = described("Number of the trial.")


@record
class EndedLine:
    """The result of a trial."""

    kind: Literal["ended"] = "ended"
    number: int = described("Number of the trial.")
    state: str = described("How it ended: finished or failed.")
    score: float | None = described("What trials are compared by; null for a trial without a result.")
    error: str | None = described("Why it failed; null for a trial that finished.")
    reasons: tuple[str, ...] = described("Why its own statement has no guarantee.")
    held: HeldLedger = described("What its ledger held.")


Line = SharedLine | NumberLine | DistributionLine | DeclaredLine | BegunLine | AgainLine | EndedLine | SealedStatementLine | StatedLine


@record
class TrialNote:
    """The note in a trial's run folder, `private/trial.json`."""

    study: str = described("Name of the study.")
    trial: int = described("Number of the trial.")
    mark: Mark = described("The line of the study's record that it follows from.")
