"""Ends a run without noise once a held-out metric has stopped growing, and keeps the weights of its best evaluation.

So does the code of Yin and Habernal 2022 (downstream_tasks/train.py: strictly above the best so far is a gain, and the best weights are
tested). A private run does not do this: `Experiment` refuses it.
"""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from dpx.config.experiment import Schedule
from dpx.files.orbax_checkpoints import Checkpoints, State
from dpx.files.weights import facts_of_checkpoint

# Under private/: checkpoints of the best evaluations.
FOLDER = "best"
_HELDOUT = "heldout"


class Ended(Exception):
    """Says that the run ended early, after `done` steps, with `state`."""

    def __init__(self, done: int, state: State):
        super().__init__(done)
        self.done, self.state = done, state


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far: steps done, and the metrics."""

    steps_done: int
    metrics: dict[str, float]


class EarlyStopping:
    """Counts evaluations without gain in `metric`; the states of the best ones are in `kept`.

    A run that is resumed after `first_step` steps reads there how good it was and when. States of later steps are removed: these steps are
    run again.
    """

    def __init__(self, schedule: Schedule, metric: str, kept: Checkpoints, first_step: int):
        assert schedule.stop_after_evaluations_without_gain is not None
        self.allowed, self.metric = schedule.stop_after_evaluations_without_gain, metric
        self._every, self._kept, self._first = schedule.evaluate_every, kept, first_step
        self.best: Best | None = None
        for steps_done in kept.steps:
            facts = facts_of_checkpoint(kept.directory / str(steps_done))
            if steps_done > first_step or facts is None:
                shutil.rmtree(kept.directory / str(steps_done))
            else:
                self.best = Best(steps_done, facts[_HELDOUT])

    def note(self, done: int, metrics: dict[str, float], state: State) -> None:
        """Keeps the state after `done` steps if its metrics are the best so far."""
        value, best = metrics[self.metric], self.best
        if not math.isnan(value) and (best is None or value > best.metrics[self.metric]):
            self.best = Best(done, metrics)
            self._kept.save(done, state, {_HELDOUT: metrics})
            # A checkpoint of the run that is newer than the one here would be resumed without it.
            self._kept.wait()

    def is_over(self, done: int) -> bool:
        """Returns whether the run ends after `done` steps, because its last evaluations brought no gain."""
        since = self._first if self.best is None else self.best.steps_done
        return (done - since) // self._every >= self.allowed

    def state(self, done: int, last: State, like: State) -> State:
        """Returns the state of the best evaluation, laid out as `like`; `last`, that after `done` steps, if it is the best or none is."""
        if self.best is None or self.best.steps_done == done:
            return last
        return self._kept.load(self.best.steps_done, like).state


@contextlib.contextmanager
def opened(schedule: Schedule, metric: str, private: Path, first_step: int) -> Iterator[EarlyStopping | None]:
    """Yields what ends a run early, with the states that it kept in `private`; `None` for a run that takes all its steps."""
    if schedule.stop_after_evaluations_without_gain is None:
        yield None
        return
    with contextlib.closing(Checkpoints(private / FOLDER, schedule.checkpoints_kept)) as kept:
        yield EarlyStopping(schedule, metric, kept, first_step)
