"""What of an experiment decides how the trials of its search are charged."""

import dataclasses

from dpx.claim import rests_on
from dpx.claim.caveats import of_table
from dpx.experiment import Experiment
from dpx.privacy.declarations import Accountant, Privacy
from dpx.tuning.declarations import Tune


@dataclasses.dataclass(frozen=True)
class Search:
    """`by` are the packages from outside on whose word a trial rests. `score` names what is compared, and `uncovered` which rows beside the
    protected ones it may read."""

    tune: Tune
    privacy: Privacy
    accountant: Accountant
    is_private: bool
    by: tuple[str, ...]
    score: str
    uncovered: tuple[str, ...]

    @classmethod
    def of(cls, experiment: Experiment) -> "Search":
        """That of an experiment which is searched over."""
        assert experiment.tune is not None
        return cls(
            experiment.tune,
            experiment.privacy,
            experiment.accountant,
            experiment.is_private,
            rests_on.of(experiment),
            experiment.task.metric,
            tuple(of_table(experiment.data)),
        )
