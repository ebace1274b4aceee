"""Computes epsilon during a run, for the progress bar and TensorBoard."""

import time

from dpx.claim.calibration import accountant_of
from dpx.privacy import accounting, ledger, loss_grid
from dpx.privacy.declarations import Accountant, Privacy
from dpx.privacy.ledger import Ledger, Segments

# Time limits for showing epsilon: a fraction of the run's time so far, or this many seconds in a short run.
SHARE, SECONDS = 0.01, 0.8


class Spending:
    """Computes epsilon after each requested step by the run's own accountant, while that is cheap.

    The privacy losses of one step are computed once. Composing them costs hundredths of a second on a grid whose interval is a whole
    multiple of the statement's, so the value shown is never below the statement's value for the same steps (0.3 % above at most). The last
    step is composed as in the statement. `bound` is the headline of the newest statement, at the planned end, and bounds every step's
    epsilon; if the statement has none, it is `None` and nothing is reported.
    """

    def __init__(self, accountant: Accountant, privacy: Privacy, steps: int, entered: Ledger):
        self._accountant, self._privacy, self._steps, self._ledger = accountant_of(accountant), privacy, steps, entered
        self._coarse = accountant.value_discretization_interval
        self.bound: float | None = None
        self._began, self._took = time.monotonic(), 0.0

    def after(self, done: int) -> float | None:
        """Returns epsilon at the declared delta of the first `done` steps of this noise epoch and of all other charges.

        Returns `None` without a claim, without a known finite bound, or if the computation would cost too much now.
        """
        is_last, now = done == self._steps, time.monotonic()
        if self.bound is None or not (is_last or self._took <= max(SECONDS, SHARE * (now - self._began))):
            return None
        spent = min(self._composed(done, is_last), self.bound)
        self._took += time.monotonic() - now
        return accounting.finite(spent)

    def _composed(self, done: int, is_last: bool) -> float:
        (own, orders), privacy = self._accountant, self._privacy
        charges = accounting.bucketed(ledger.releases(self._entered_by(done)))
        interval = None if is_last or own != "pld" else loss_grid.multiple(charges, privacy.adjacency, self._coarse)
        return accounting.compose(charges, own, privacy.adjacency, orders, interval, self._coarse).epsilon(privacy.delta)

    def _entered_by(self, done: int) -> Segments:
        """Returns the ledger without the later steps of the newest noise epoch: the next step is entered before the metrics of this step
        are read."""
        newest = self._ledger.noise_epochs[-1].name
        segments = self._ledger.segments()
        return [segment for segment in segments if segment.epoch_name != newest] + ledger.until(
            [segment for segment in segments if segment.epoch_name == newest], done
        )
