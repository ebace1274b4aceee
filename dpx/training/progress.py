"""Displays the progress of a run: a bar on a terminal, plain lines elsewhere."""

import time

from rich.progress import BarColumn, Progress, TextColumn

from dpx.console import figure, progress_console

LINES = 20


class RunProgress:
    """The progress display: steps done, examples/s, loss, accuracy, epsilon spent of planned, time left. Use it as a context manager.

    The first step of a process compiles, so neither its speed nor its time is shown or counted.
    """

    def __init__(self, first_step: int, steps: int):
        self._steps, self._first = steps, first_step
        self._every = max(1, steps // LINES)
        self._console = progress_console()
        self.planned: float | None = None
        # The newest epsilon and the step after which it was composed; a bar shows it until the next one.
        self._epsilon: tuple[float, int] | None = None
        self._compiled: float | None = None
        self._bar = None
        if self._console.is_terminal:
            # The bar fits into eighty columns, also on a wider terminal.
            columns = (BarColumn(10), TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[facts]}"))
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=steps, completed=first_step, facts="")

    def __enter__(self) -> "RunProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a separate line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        """Shows the activity that takes time from now on: in the bar, or on a separate line."""
        if self._bar:
            self._bar.update(self._task, facts=text)
        else:
            self.say(text)

    def shows(self, done: int) -> bool:
        """Returns whether a line, and epsilon with it, is due after `done` steps."""
        return done % self._every == 0 or done in (self._first + 1, self._steps)

    def step(self, done: int, examples_per_s: float, loss: float | None, accuracy: float | None, epsilon: float | None) -> None:
        """Shows the state after `done` steps; `epsilon` belongs to these steps, and is `None` if it was not composed.

        `loss` and `accuracy` are `None` for a step that drew no example.
        """
        now = time.monotonic()
        if epsilon is not None:
            self._epsilon = epsilon, done
        facts = ["no example drawn"] if loss is None or accuracy is None else [f"loss {figure(loss, 2)}", f"accuracy {accuracy:.1%}"]
        if self.planned is not None and self._epsilon is not None:
            spent, at = self._epsilon
            facts.append(f"epsilon {figure(spent, 2)}/{figure(self.planned, 2)}" + ("" if at == done else f" at {at}"))
        if self._compiled is None:
            self._compiled = now
        else:
            left = (now - self._compiled) / (done - self._first - 1) * (self._steps - done)
            facts = [f"{examples_per_s:,.0f} examples/s", *facts, f"{left:,.0f} s left"]
        if self._bar:
            self._bar.update(self._task, completed=done, facts="  ".join(facts))
        elif self.shows(done):
            self.say("  ".join([f"step {done}/{self._steps}", *facts]))
