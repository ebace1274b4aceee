"""What the paper claims and what the demonstrations show, judged by code: parts of a verdict as a table."""

from collections.abc import Sequence

from dpx.report.shape import Part
from dpx.table import Table


def table(parts: Sequence[Part]) -> Table:
    """A row for each claim."""
    return Table("verdicts", ("claim", "state", "statistic"), tuple((one.claim, one.state, one.statistic) for one in parts), "verdicts")
