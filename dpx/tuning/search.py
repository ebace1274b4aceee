"""The parts of an experiment that decide how the trials of its search are charged."""

import dataclasses
from typing import Any

from dpx.claim import outside_code
from dpx.claim.caveats import of_table
from dpx.experiment import Experiment
from dpx.privacy.declarations import Accountant, Privacy
from dpx.tuning.declarations import Tune


@dataclasses.dataclass(frozen=True)
class Search:
    """Holds what a search needs of the experiment that declares it.

    `by` are the external packages that a trial trusts. `score` names what is compared, and `uncovered` the rows that it may read in
    addition to the protected ones. `declared` is the whole experiment as plain data, with its external classes by config key, if any: two
    classes may hold the same values."""

    tune: Tune
    privacy: Privacy
    accountant: Accountant
    is_private: bool
    by: tuple[str, ...]
    score: str
    uncovered: tuple[str, ...]
    declared: dict[str, Any]

    @classmethod
    def from_experiment(cls, experiment: Experiment) -> "Search":
        """Returns the search of an experiment that declares one."""
        assert experiment.tune is not None
        classes = {part.key: part.kind for part in outside_code.parts(experiment)}
        return cls(
            experiment.tune,
            experiment.privacy,
            experiment.accountant,
            experiment.is_private,
            outside_code.packages_of(experiment),
            experiment.task.metric,
            tuple(of_table(experiment.data)),
            dataclasses.asdict(experiment) | ({"outside_code": classes} if classes else {}),
        )
