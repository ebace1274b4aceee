"""What the figures of Anil et al. 2021 draw of the rows of runs."""

from dpx_papers.report.evidence import Rows
from dpx_papers.report.of_rows import of_rows

MOMENTS = {"optimizer.beta1": "1 - β1", "optimizer.beta2": "1 - β2"}


@of_rows
def of_trials(trials: Rows) -> Rows:
    """Returns the trials with 1 - β of both moments, which the paper searches and draws on a log scale."""
    return trials.assign(**{shown: 1 - trials[key] for key, shown in MOMENTS.items() if key in trials})
