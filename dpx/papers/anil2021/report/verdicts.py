"""The thirteen verdicts, in the order of the paper's catalogue."""

from collections.abc import Sequence

from dpx.papers.anil2021.report import batches, exact, sweeps
from dpx.report.rows import Run
from dpx.report.shape import Verdict

CHECKS = (
    sweeps.nonprivate_baseline,
    sweeps.tuning,
    sweeps.table1_best,
    sweeps.weight_decay,
    exact.scale_invariance,
    sweeps.epsilon_sweep,
    batches.batch_sweep,
    batches.largest_batch,
    batches.batch_schedule,
    exact.schedule_variants,
    exact.accounting,
    exact.throughput,
    exact.reference,
)


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """One verdict per experiment, `not run` where its rows are missing."""
    return [check(runs) for check in CHECKS]
