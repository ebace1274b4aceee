"""The page of Anil et al. 2021."""

from collections.abc import Sequence
from pathlib import Path

from dpx.declaration import declaration
from dpx.report.document import Document
from dpx.report.pages import Page
from dpx.report.published import Published
from dpx.report.rows import Row, Run


@declaration
class Anil2021(Page):
    """Large-Scale Differentially Private BERT."""

    @property
    def match(self) -> tuple[str, ...]:
        return ("laptop_anil_", "anil_")

    def computed(self) -> list[Row]:
        from dpx.papers.anil2021.report import exact

        return exact.computed()

    def document(self, runs: Sequence[Run], published: Sequence[Published], notes: Path) -> Document:
        from dpx.papers.anil2021.report import page

        return page.document(runs, published, notes)
