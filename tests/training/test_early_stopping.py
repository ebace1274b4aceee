"""Runs that end early: when, with which weights, the same after an interruption, and never with noise."""

import dataclasses

import jax
import numpy as np
import pytest

from dpx import config
from dpx.config import recipes
from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Vocabulary
from dpx.data.labelled import Table
from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import Checkpoints, State
from dpx.files.results import read_results
from dpx.files.run_folder import RunFolder
from dpx.mechanism.dp_sgd import DpSgd, NoPrivacy
from dpx.models.trained import LastLayer
from dpx.sampler import Shuffled
from dpx.sampler.batch_schedule import Constant
from dpx.task.declared_task import Classification
from dpx.training import loop, session
from dpx.training.evaluation import EarlyStopping, HeldOut

from .conftest import declare, opened


class Killed(Exception):
    """Stands for a SIGKILL."""


class Nowhere(Checkpoints):
    """Keeps nothing."""

    def save(self, steps_done, state, facts):
        pass


def counted(values: list[float], allowed: int, tmp_path) -> tuple[int | None, int | None]:
    """The evaluation (from 1) after which a run with these values of its metric ends, and the best one."""
    schedule, state = Schedule(evaluate_every=10, stop_after_evaluations_without_gain=allowed), State(params={}, moments={})
    subject = EarlyStopping(schedule, "f1", Nowhere(tmp_path, 1), 0)
    for number, value in enumerate(values, start=1):
        subject.note(10 * number, {"f1": value}, state)
        if subject.is_over(10 * number):
            break
    else:
        number = None
    return number, None if subject.best is None else subject.best.steps_done // 10


@pytest.mark.parametrize(
    ("values", "allowed", "expected"),
    [
        ([0.1, 0.3, 0.2, 0.25, 0.9], 2, (4, 2)),
        ([0.1, 0.3, 0.3, 0.2, 0.4], 4, (None, 5)),
        ([0.3, 0.3, 0.3], 2, (3, 1)),
        ([float("nan"), 0.1, float("nan"), float("nan")], 2, (4, 2)),
        ([float("nan")] * 3, 2, (2, None)),
    ],
)
def test_a_run_ends_after_so_many_evaluations_that_are_not_strictly_above_the_best(values, allowed, expected, tmp_path):
    assert counted(values, allowed, tmp_path) == expected


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    lines = [f"{'red blue green'.split()[number % 3]} thing {number}\t{'no yes'.split()[number % 2]}" for number in range(60)]
    (folder / "rows.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")
    source = Table(paths=str(folder / "rows.tsv"), labels=("no", "yes"))
    data = Data(
        name="table", source=source, vocabulary=Vocabulary(size=64), sequence_length=16, directory=str(folder / "data"),
        pairs="none", short_sequence_rate=0.0, public_fraction=0.2, heldout_fraction=0.2,
    )  # fmt: skip
    schedule = Schedule(evaluate_every=2, evaluation_rows=32, checkpoint_every=3, stop_after_evaluations_without_gain=2, gain_in="macro_f1")
    fields = {
        "data": data,
        "task": Classification(classes=2),
        "train": LastLayer(),
        "mechanism": NoPrivacy(),
        "sampler": Shuffled(),
        "seed": 5,
    }
    return declare(**fields, steps=20, batch_schedule=Constant(size=4), schedule=schedule)


# Of the evaluations after 2, 4, ... steps: the best is that after 4, and the run ends after 8.
_VALUES = {2: 0.2, 4: 0.6, 6: 0.5, 8: 0.6}


def train(experiment, path, monkeypatch, die_after: int | None = None):
    """Trains with evaluations whose `macro_f1` is by the number of steps; returns the parameters that the run ended with."""
    measured, one_step = HeldOut.__call__, loop.one_step
    done = {"steps": 0}

    def step(runtime, epoch, secret, number, state):
        found = one_step(runtime, epoch, secret, number, state)
        if number == die_after:
            raise Killed
        done["steps"] = number + 1
        return found

    monkeypatch.setattr(loop, "one_step", step)
    monkeypatch.setattr(HeldOut, "__call__", lambda self, params: measured(self, params) | {"macro_f1": _VALUES.get(done["steps"], 0.1)})
    with monkeypatch.context(), opened(experiment, RunFolder(path)) as run:
        return jax.tree.map(np.array, session.train(run).state.params)


def test_a_run_ends_with_its_best_weights_also_when_it_was_interrupted(experiment, tmp_path, monkeypatch):
    ended = {}
    for name, die_after in (("whole", None), ("killed", 6)):
        with monkeypatch.context() as patch:
            if die_after is not None:
                with pytest.raises(Killed):
                    train(experiment, tmp_path / name, patch, die_after)
                patch.undo()
            ended[name] = train(experiment, tmp_path / name, patch)
        found = read_results(tmp_path / name / "private")
        assert (found.steps, found.best_step, found.heldout["macro_f1"]) == (8, 4, 0.6)
        steps = sorted(int(path.name) for path in (tmp_path / name / "private" / "checkpoints").glob("[0-9]*"))
        assert steps[-1] == 8
    same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, ended.values()), strict=True)]
    assert same and all(same)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mechanism": DpSgd()}, "schedule.stop_after_evaluations_without_gain=2, mechanism=dp_sgd: the last step of a private run is not"),
        ({"schedule": Schedule(stop_after_evaluations_without_gain=2, gain_in="f2")}, "schedule.gain_in=f2: is not measured by this task"),
    ],
)
def test_noise_and_an_unknown_metric_are_refused(experiment, changed, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(experiment, **changed)


def test_no_evaluations_are_refused():
    with pytest.raises(ConfigError, match="schedule.stop_after_evaluations_without_gain=0: must be at least 1"):
        Schedule(stop_after_evaluations_without_gain=0)


def test_the_run_has_another_folder_with_it_and_the_same_one_without():
    plain = ["mechanism=none", "schedule.evaluate_every=7"]
    names = [config.run_name(recipes.compose([*plain, *more])) for more in ([], ["schedule.checkpoint_every=9"])]
    early = "schedule.stop_after_evaluations_without_gain="
    names += [config.run_name(recipes.compose([*plain, *more])) for more in ([f"{early}2"], [f"{early}3"], [f"{early}2"])]
    assert names[0] == names[1] != names[2] != names[3] and names[2] == names[4]
    others = [config.run_name(recipes.compose(["mechanism=none", f"{early}2", f"schedule.evaluate_every={every}"])) for every in (7, 8)]
    assert others[0] == names[2] != others[1]
