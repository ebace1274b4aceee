"""The page of McKenna et al. 2025."""

from collections.abc import Sequence
from pathlib import Path

from dpx.declaration import declaration
from dpx.report.document import Document
from dpx.report.pages import Page
from dpx.report.published import Published
from dpx.report.rows import Run


@declaration
class Mckenna2025(Page):
    """Scaling Laws for Differentially Private Language Models."""

    @property
    def match(self) -> tuple[str, ...]:
        return ("laptop_mckenna_",)

    def shows(self, metric: str) -> bool:
        # Losses step by step are in measurements.csv, and norms of every matrix would be two thirds of the file.
        return metric == "grad/clipped_fraction" or not metric.startswith(("grad/", "weights/"))

    def fill(self, outputs: Path, home: Path) -> list[str]:
        from dpx.papers.mckenna2025.report import evidence

        return [*evidence.fill_measurements(outputs, home), *evidence.fill_analyses(outputs, home)]

    def document(self, runs: Sequence[Run], published: Sequence[Published], notes: Path) -> Document:
        from dpx.papers.mckenna2025.report import page

        return page.document(runs, published, notes.parent)
