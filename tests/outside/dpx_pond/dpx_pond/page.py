"""`report.paper=pond`: a page of the runs whose experiment begins with pond."""

from collections.abc import Sequence
from pathlib import Path

from dpx.declaration import declaration
from dpx.report.document import Document, Grid, Section
from dpx.report.pages import Page
from dpx.report.published import Published
from dpx.report.rows import Run


@declaration
class Pond(Page):
    title: str

    @property
    def match(self) -> tuple[str, ...]:
        return ("pond",)

    def document(self, runs: Sequence[Run], published: Sequence[Published], notes: Path) -> Document:
        rows = [(run.experiment, run.facts.get("guarantee", "?"), ", ".join(one.value for one in published)) for run in runs]
        return Document(self.title, (), (Section("Runs", (Grid(("run", "guarantee", "published"), rows),)),))
