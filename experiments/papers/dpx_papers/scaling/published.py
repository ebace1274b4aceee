"""Holds what McKenna et al. 2025 print: the 20 optima of Table 2.

The optima are looked up and never interpolated.

No model of the paper was trained to a stated epsilon: these are predictions of its fit.
"""

import dataclasses

from dpx.declaration import ConfigError
from dpx.pages.analysis_tables import Table

SEQUENCE_LENGTH, DELTA = 512, 1e-8


@dataclasses.dataclass(frozen=True)
class PublishedOptimum:
    """A row of Table 2: the compute beyond which more does not help at this data and budget, and the best configuration there."""

    size: float
    epsilon: float
    compute: float
    loss: float
    parameters: float
    steps: float
    batch_size: float
    tokens_per_parameter: float

    @property
    def implied_compute(self) -> float:
        """Returns 6 M B S T, to check the transcription; it is not a finding."""
        return 6 * self.parameters * self.batch_size * SEQUENCE_LENGTH * self.steps

    @property
    def implied_tokens_per_parameter(self) -> float:
        """Returns S B T / M, padding included, to check the transcription."""
        return SEQUENCE_LENGTH * self.batch_size * self.steps / self.parameters

    @property
    def epochs(self) -> float:
        """Returns B T / N; the losses come from less than one epoch."""
        return self.batch_size * self.steps / self.size


# Table 2: data, epsilon, compute, loss, parameters, steps, batch size, tokens per parameter.
_TABLE_2 = """
1e5 1 1.3e16 7.28 4.6e6 1.8e3 5.1e2 1.0e2
1e5 4 1.1e17 6.65 4.6e6 1.8e3 4.1e3 8.5e2
1e5 16 2.0e18 5.60 1.7e7 2.7e3 1.4e4 1.1e3
1e5 64 7.5e18 4.63 2.0e7 6.3e3 1.9e4 3.2e3
1e6 1 2.8e17 5.89 4.6e6 2.5e3 8.2e3 2.3e3
1e6 4 8.8e18 4.62 1.9e7 6.5e3 2.3e4 4.1e3
1e6 16 3.3e19 3.61 1.7e7 1.4e4 4.6e4 1.9e4
1e6 64 3.2e20 2.82 4.9e7 1.2e4 1.9e5 2.2e4
1e7 1 3.8e19 3.73 1.7e7 9.6e3 7.8e4 2.3e4
1e7 4 3.8e20 2.81 4.9e7 1.1e4 2.2e5 2.6e4
1e7 16 2.0e21 2.15 7.0e7 1.2e4 7.4e5 6.7e4
1e7 64 4.4e22 1.66 3.3e8 4.9e4 8.8e5 6.7e4
1e8 1 5.2e21 2.26 1.3e8 5.8e4 2.2e5 4.9e4
1e8 4 4.4e22 1.66 3.3e8 4.9e4 8.8e5 6.7e4
1e8 16 1.0e23 1.32 3.3e8 9.3e4 1.0e6 1.5e5
1e8 64 1.0e23 1.23 3.3e8 1.1e5 8.8e5 1.5e5
1e9 1 8.5e22 1.36 3.3e8 9.4e4 8.8e5 1.3e5
1e9 4 1.0e23 1.23 3.3e8 1.1e5 8.8e5 1.5e5
1e9 16 1.0e23 1.22 3.3e8 1.1e5 8.8e5 1.5e5
1e9 64 1.2e23 1.20 3.3e8 1.1e5 1.1e6 1.8e5
"""
TABLE_2 = tuple(PublishedOptimum(*map(float, line.split())) for line in _TABLE_2.strip().splitlines())


def look_up(size: float | int, epsilon: float | int) -> PublishedOptimum:
    """Returns the row of exactly this data and epsilon; raises `ConfigError` for any other, which would be an interpolation."""
    for row in TABLE_2:
        if (row.size, row.epsilon) == (size, epsilon):
            return row
    raise ConfigError(
        f"size={size:g}, epsilon={epsilon:g}", "Table 2 has no such row", "Use N of 1e5 to 1e9 and epsilon of 1, 4, 16 or 64, or a fit"
    )


def table(size: int, epsilon: float) -> Table:
    """Returns one printed optimum, looked up and never interpolated."""
    row = look_up(size, epsilon)
    columns = ("parameters", "batch_size", "steps", "compute", "loss", "epochs", "tokens_per_parameter")
    values = (row.parameters, row.batch_size, row.steps, row.compute, row.loss, row.epochs, row.tokens_per_parameter)
    notes = (
        f"McKenna et al. 2025, Table 2, at delta {DELTA:g}: a prediction of their fit, not the loss of a trained model",
        "losses were measured in less than one epoch and at a batch of 1,024; 3.3e8 parameters are the edge of their grid",
    )
    return Table("published", columns, (values,), f"published optimum, {size:,} records, epsilon {epsilon:g}", notes)
