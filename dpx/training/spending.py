"""Epsilon as a run goes by: what the progress bar and TensorBoard show."""

from dpx.experiment import Experiment
from dpx.privacy import accounting, ledger
from dpx.privacy.calibration import Calibrated, accountant_of
from dpx.privacy.ledger import Ledger
from dpx.privacy.statement import reasons_against

POINTS = 40


class Spending:
    """Epsilon spent by the run's own accountant, composed anew at `POINTS` steps of the run (a composition takes up to a second).

    `planned` is `None`, and nothing is reported, for a run without a guarantee.
    """

    def __init__(self, experiment: Experiment, calibrated: Calibrated, entered: Ledger, manifest: object):
        self._experiment, self._ledger = experiment, entered
        self._reported = experiment.is_private and not reasons_against(experiment, manifest)
        self._every = max(1, experiment.steps // POINTS)
        own = accountant_of(experiment)[0]
        self.planned = calibrated.epsilon.get(own) if self._reported else None

    def after(self, done: int) -> float | None:
        """Epsilon of everything entered so far at the declared delta, where `done` is one of the points; else `None`."""
        if not self._reported or (done % self._every and done != self._experiment.steps):
            return None
        own, orders = accountant_of(self._experiment)
        charges = ledger.releases(self._ledger.runs())
        privacy = self._experiment.privacy
        return accounting.finite(
            accounting.compose(accounting.bucketed(charges, 30), own, privacy.adjacency, orders).epsilon(privacy.delta)
        )
