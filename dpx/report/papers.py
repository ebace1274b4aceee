"""The papers that have a page: whose runs it takes, what it adds by arithmetic, and how the page is made."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from dpx.report.anil2021 import exact, page
from dpx.report.document import Document
from dpx.report.published import Published
from dpx.report.rows import Row, Run


@dataclasses.dataclass(frozen=True)
class Paper:
    """`match`: beginnings of experiment names. `document(runs, published, notes)`: the page."""

    match: tuple[str, ...]
    computed: Callable[[], list[Row]]
    document: Callable[[Sequence[Run], Sequence[Published], Path], Document]


PAPERS = {"anil2021": Paper(("laptop_anil_", "anil_"), exact.computed, page.document)}
