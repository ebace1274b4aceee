"""One finished run, or a whole chain, as facts, measurements and curves: what a page shows and a table of runs holds."""

import dataclasses
from collections.abc import Iterator

FINAL = "final"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run; `run` is its folder's name without the experiment's. `curves[metric]` are (steps done, value) in the order of steps."""

    experiment: str
    run: str
    point: str
    replicate: int
    config: dict[str, str]
    facts: dict[str, str]
    finals: dict[str, float]
    curves: dict[str, tuple[tuple[int, float], ...]]

    @property
    def key(self) -> tuple[str, str]:
        return self.experiment, self.run

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yields (metric, step, value) of every fact, with numbers to seven digits."""
        texts = {"config": self.config, "fact": self.facts}
        yield from ((f"{kind}/{name}", "", value) for kind, named in texts.items() for name, value in named.items())
        yield from ((metric, FINAL, f"{value:.7g}") for metric, value in self.finals.items())
        yield from ((metric, str(step), f"{value:.7g}") for metric, curve in self.curves.items() for step, value in curve)
