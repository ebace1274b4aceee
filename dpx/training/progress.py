"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress:
    """Steps done, examples/s, loss, accuracy, epsilon spent of planned, time left. Use as a context manager."""

    def __init__(self, first_step: int, steps: int, planned_epsilon: float | None, every: int = 0):
        self._steps, self.planned, self._first = steps, planned_epsilon, first_step
        self._every = every or max(1, steps // 20)
        self._console = Console(file=sys.stderr)
        # Composed at some steps only; shown until the next.
        self._epsilon: float | None = None
        self._bar = None
        if self._console.is_terminal:
            # Eighty columns hold all of it; a wider terminal widens nothing.
            columns = (
                BarColumn(10),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=steps, completed=first_step, facts="")
        self._began = time.monotonic()

    def __enter__(self) -> "RunProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, done: int, examples_per_s: float, loss: float, accuracy: float, epsilon: float | None) -> None:
        """Shows the state after `done` steps."""
        if epsilon is not None:
            self._epsilon = epsilon
        facts = f"{examples_per_s:,.0f} examples/s  loss {loss:.2f}  accuracy {accuracy:.1%}"
        if self.planned is not None and self._epsilon is not None:
            facts += f"  epsilon {self._epsilon:.2f}/{self.planned:.2f}"
        if self._bar:
            self._bar.update(self._task, completed=done, facts=facts)
        elif done % self._every == 0 or done in (self._first + 1, self._steps):
            left = (time.monotonic() - self._began) / max(done - self._first, 1) * (self._steps - done)
            self.say(f"step {done}/{self._steps}  {facts}  {left:,.0f} s left")
