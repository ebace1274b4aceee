"""What the figures of Yin and Habernal 2022 draw of the rows of a benchmark."""

from dpx_papers.report.evidence import Rows
from dpx_papers.report.of_rows import of_rows

# Overruling's training rows.
ROWS = 1920


@of_rows
def seconds_of_an_epoch(benchmark: Rows) -> Rows:
    """Returns the benchmark with the seconds of an epoch of Overruling (Figure 3)."""
    return benchmark.assign(**{"seconds of an epoch": ROWS / benchmark["examples_per_s"]})
