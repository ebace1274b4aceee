"""Makes a table of the verdicts on the paper's claims."""

from collections.abc import Sequence

from dpx.report.shape import Part
from dpx.table import Table


def table(parts: Sequence[Part]) -> Table:
    """Returns a table with a row for each claim."""
    return Table("verdicts", ("claim", "state", "statistic"), tuple((one.claim, one.state, one.statistic) for one in parts), "verdicts")
