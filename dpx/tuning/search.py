"""What of an experiment decides how the trials of its search are charged."""

import dataclasses
from collections.abc import Callable

from dpx import batch_schedule
from dpx.claim import calibration, rests_on
from dpx.claim.caveats import of_table
from dpx.experiment import Experiment
from dpx.privacy.declarations import Accountant, Privacy
from dpx.privacy.ledger import Segments
from dpx.tuning.declarations import Tune


@dataclasses.dataclass(frozen=True)
class Search:
    """`planned_at(size, noise_multiplier)` is what one trial's whole schedule is charged at that public N and noise; `by` are the packages
    from outside on whose word a trial rests. `score` names what is compared, and `uncovered` which rows beside the protected ones it may
    read."""

    tune: Tune
    privacy: Privacy
    accountant: Accountant
    is_private: bool
    planned_at: Callable[[int, float], Segments]
    by: tuple[str, ...]
    score: str
    uncovered: tuple[str, ...]

    @classmethod
    def of(cls, experiment: Experiment) -> "Search":
        """That of an experiment which is searched over."""
        assert experiment.tune is not None

        def planned_at(size: int, noise_multiplier: float) -> Segments:
            steps = batch_schedule.stages(experiment.batch_schedule, experiment.steps)
            return calibration.planned(experiment, steps, size, noise_multiplier)

        return cls(
            experiment.tune,
            experiment.privacy,
            experiment.accountant,
            experiment.is_private,
            planned_at,
            rests_on.of(experiment),
            experiment.task.metric,
            tuple(of_table(experiment.data)),
        )
