"""The lines of a search's record: one record a kind, told apart by `kind` alone.

To note something new, declare its line here, add it to `Line` and say in `Record` what it means (`dpx.claim.search_record`).

The distribution that every trial of a `repeat_and_select` is drawn from: one for each setting that varies, and a fixed value for all
others.

It is fixed before the first trial. Which trial wins reveals something about the data, so a trial whose settings come from elsewhere, or
depend on other trials, is not a draw of the charged mechanism.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from dpx.config.declared_tuning import Budget, Charge
from dpx.files.records import described, record
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.hash_chain import Mark
from dpx.privacy.lines import SealedStatementLine, StatedLine
from dpx.privacy.segments import Segment

# A function from overrides to the config that they compose, as plain values, in the form of `TrialDistribution.fixed`.
Compose = Callable[[Sequence[str]], dict[str, Any]]


@record
class TrialDistribution:
    """Declares what the trials of a search are drawn from.

    A setting of the space has a type (`float`, `int` or `choice`), and its bounds (`low`, `high`, `step`, `is_log`) or its `values`. All
    values can be written as JSON.
    """

    sampler: dict[str, Any] = described("The classes that draw, and their settings.")
    space: dict[str, dict[str, Any]] = described("The distribution of each setting that is drawn, by its key.")
    fixed: dict[str, Any] = described("The config without the settings that are drawn.")

    def differing(self, other: "TrialDistribution") -> list[str]:
        """Returns the keys with different values in the two, as a user writes them."""
        parts = (("hydra.sweeper.", "sampler"), ("hydra.sweeper.params.", "space"))
        named = [
            f"{prefix}{key}"
            for prefix, part in parts
            for key in sorted(getattr(self, part).keys() | getattr(other, part).keys())
            if getattr(self, part).get(key) != getattr(other, part).get(key)
        ]
        return named + different_keys(self.fixed, other.fixed)

    def refusal(self, point: Sequence[str]) -> str | None:
        """Returns the reason, as text, why a trial with the overrides `point` is not a draw; `None` if it may be a draw."""
        settings = {key_of(part): part.partition("=")[2] for part in point}
        for key, distribution in self.space.items():
            if key not in settings:
                return f"sets no {key}, which the search draws"
            value = settings[key]
            if distribution["type"] == "choice":
                is_of_space = value in distribution["values"]
            else:
                try:
                    number = int(value) if distribution["type"] == "int" else float(value)
                    is_of_space = distribution["low"] <= number <= distribution["high"]
                except ValueError:
                    is_of_space = False
            if not is_of_space:
                return f"has {key}={settings[key]}, which is not of the declared space"
        return None

    def others(self, point: Sequence[str]) -> list[str]:
        """Returns the overrides in `point` that are not drawn."""
        return [part for part in point if key_of(part) not in self.space]


def key_of(override: str) -> str:
    """Returns the config key that an override sets, as a search space names it."""
    return override.lstrip("+~").partition("=")[0]


def different_keys(one: Any, other: Any, path: str = "") -> list[str]:
    """Returns the dotted keys with different values in two plain configs."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [path]
    keys = sorted(one.keys() | other.keys())
    return [key for name in keys for key in different_keys(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))]


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
class TrialStart:
    """A trial with its whole plan, as it started: it is charged even if its folder is deleted."""

    number: int = described("Number of the trial, from 0.")
    folder: str = described("Name of its run folder.")
    point: tuple[str, ...] = described("The overrides of the trial.")
    plan: tuple[Segment, ...] | None = described("The charge of its whole schedule; null without privacy.")


@record
class TrialEnd:
    """What a trial came to."""

    state: str = described("How it ended: finished or failed.")
    score: float | None = described("What trials are compared by; null for a trial without a result.")
    error: str | None = described("Why it failed; null for a trial that finished.")
    reasons: tuple[str, ...] = described("Why its own statement has no guarantee.")
    held: HeldLedger = described("What its ledger held.")


@record
class BegunLine(TrialStart):
    """A trial that starts."""

    kind: Literal["begun"] = "begun"


@record
class AgainLine:
    """A trial that is started again."""

    kind: Literal["again"] = "again"
    number: int = described("Number of the trial.")


@record
class EndedLine(TrialEnd):
    """The end of a trial."""

    kind: Literal["ended"] = "ended"
    number: int = described("Number of the trial.")


@record
class Trial(TrialStart, TrialEnd):
    """A trial as the whole record tells it. `state` is `begun` until it ends, and again while it resumes.

    A trial that is drawn again may share its folder with a lost one.
    """

    state: str = "begun"
    score: float | None = None
    error: str | None = None
    reasons: tuple[str, ...] = ()
    held: HeldLedger = HeldLedger()


Line = SharedLine | NumberLine | DistributionLine | DeclaredLine | BegunLine | AgainLine | EndedLine | SealedStatementLine | StatedLine


@record
class TrialNote:
    """The note in a trial's run folder, `private/trial.json`."""

    study: str = described("Name of the study.")
    trial: int = described("Number of the trial.")
    mark: Mark = described("The line of the study's record that it follows from.")
