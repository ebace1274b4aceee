"""The protocol of callbacks: what a package may do when a run starts, evaluates, saves and ends.

A callback is given copies of released values. Metrics without noise are given only where the config declares it, and the statement names
who gets them. Whatever a callback is given, its package is named in the guarantee (`dpx.statement.outside_code`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dpx.declaration import declaration
from dpx.statement.statement_records import AnyRun


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a callback is told.

    Attributes:
        name: Name of the run's folder.
        step: Number of steps done.
        steps: Planned number of steps.
        statement: The newest statement on disk.
        released: Lines of `release/telemetry.jsonl` that were published since the last moment.
        protected: The newest metrics of a step, by name; None unless the callback is declared with `protected=true`.
    """

    name: str
    step: int
    steps: int
    statement: AnyRun
    released: tuple[Mapping[str, Any], ...]
    protected: Mapping[str, float] | None


@declaration
class Callback:
    """The base class of callbacks; a callback is a declaration that inherits it and defines some of the four methods.

    One that raises an error is dropped with one line, and the run goes on.

    Attributes:
        protected: Whether it is given metrics that were computed without noise.
    """

    protected: bool = False

    def on_start(self, moment: Moment) -> None:
        """Is called after the first statement, before the first step of this process."""

    def on_evaluation(self, moment: Moment) -> None:
        """Is called after each evaluation."""

    def on_save(self, moment: Moment) -> None:
        """Is called after each checkpoint."""

    def on_end(self, moment: Moment) -> None:
        """Is called after the weights are released."""
