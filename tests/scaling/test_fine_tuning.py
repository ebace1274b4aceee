"""The table of measured fine-tuning, and the setting that is chosen from it: judged on tasks that it was not chosen on."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from dpx.cost import fine_tuning
from dpx.cost.fine_tuning import Asked, Measured, choose, expected
from dpx.declaration import ConfigError

JUDGE = Path(__file__).parents[2] / "experiments" / "fine_tuning" / "judge.py"
ONE = Measured("a", "c", "last_layer", 100, 1000, 8.0, 1e-5, 125, 40, 0.05, 3, 1.0, 0.5, 0.8, 500, 0.5)
ASKED = Asked("last_layer", 100, 5.0, ONE.signal)


def _run(accuracy: float, **changes) -> Measured:
    return dataclasses.replace(ONE, accuracy=accuracy, **changes)


def test_of_each_task_a_design_from_the_other_tasks_is_as_good_as_a_search_of_twelve_points():
    """All but one: 1,000 rows of SST-2 at epsilon 1 have less signal than anything that the other tasks measured."""
    judge = runpy.run_path(str(JUDGE))
    table = fine_tuning.read(fine_tuning.shipped())
    found = [judge["judged"](table, table, key, rows) for key, rows in judge["searches"](table).items()]
    assert {row["task"] for row in found} == {"mrpc", "overruling", "qnli", "sst2"} and len(found) == 90
    failed = [(row["task"], row["head"], row["size"], row["epsilon"], row["passes"]) for row in found if not row["passes_test"]]
    assert failed == [("sst2", "mean linear", 1000, 1.0, 2.0)]


def test_settings_carry_over_to_tasks_that_the_table_does_not_have_and_accuracies_do_not():
    judge = runpy.run_path(str(JUDGE))
    table, unread = (fine_tuning.read(path) for path in (fine_tuning.shipped(), JUDGE.parent / "unread.csv"))
    assert not {row.task for row in table} & {row.task for row in unread}
    long = {key: rows for key, rows in judge["searches"](unread).items() if key[-2:] == (8.0, 20.0)}
    found = {key[0]: judge["judged"](table, unread, key, rows) for key, rows in long.items()}
    assert set(found) == {"mnli", "qqp"} and all(row["passes_test"] for row in found.values())
    assert found["mnli"]["designed"] < 0.4 and min(found["mnli"]["predicted"].values()) > 0.68, "a miss"


def test_equal_settings_of_tasks_of_other_sizes_are_one_point():
    larger = dataclasses.replace(ONE, size=1820, batch=228)
    assert ONE.point == larger.point and ONE.point.steps(5.0) == 40
    assert larger.signal == pytest.approx(1.82 * ONE.signal)


def test_the_best_setting_is_chosen_and_among_equals_the_one_with_fewer_passes():
    table = [_run(0.70, rate=0.5), _run(0.80), _run(0.801, steps=160, rate=0.0125), _run(0.75, rate=0.015)]
    assert choose(table, ASKED).point == ONE.point
    long = dataclasses.replace(ASKED, passes=20.0)
    assert choose(table, long).point == ONE.point
    assert choose([*table, _run(0.85, steps=160, rate=0.05)], long).point.passes == 20


def test_runs_of_the_same_head_decide_where_there_are_any():
    table = [_run(0.70, head="mean linear"), _run(0.90, rate=0.5, head="mean linear"), _run(0.80, head="cls linear_tanh")]
    assert choose(table, dataclasses.replace(ASKED, head="cls linear_tanh")).measured == (table[2],)
    assert choose(table, dataclasses.replace(ASKED, head="cls pooler")).measured == tuple(table[:2]), "the head that was measured most"


def test_a_condition_that_is_not_above_its_baseline_does_not_choose():
    useless = [_run(0.50, task="b"), _run(0.52, task="b", rate=0.5), _run(0.49, task="b", rate=0.15)]
    table = [_run(0.80), _run(0.60, rate=0.5), _run(0.78, rate=0.15), *useless]
    assert choose(table, ASKED).point == ONE.point
    assert [one.is_above for one in expected(choose(table, ASKED), ASKED)] == [True, False]


def test_accuracy_rises_with_the_signal_and_is_held_beyond_what_was_measured():
    table = [_run(0.7), _run(0.69, size=2000, batch=250), _run(0.8, size=4000, batch=500)]
    at = lambda signal: expected(choose(table, ASKED), dataclasses.replace(ASKED, signal=signal))[0]  # noqa: E731
    values = [at(ONE.signal * factor).accuracy for factor in (0.1, 1, 1.5, 2, 3, 4, 100)]
    assert values == sorted(values) and values[0] == values[1] and values[-1] == 0.8
    assert at(ONE.signal * 100).is_extrapolated and not at(ONE.signal * 2).is_extrapolated


def test_a_budget_below_the_measured_runs_gets_the_steps_that_it_pays_for():
    chosen = choose([_run(0.8), _run(0.7, rate=0.5), _run(0.7, rate=0.15)], dataclasses.replace(ASKED, passes=1.0))
    assert chosen.passes == 1.0 and chosen.point.passes == 5.0 and chosen.point.steps(chosen.passes) == 8


def test_what_is_not_measured_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="train=bias: no measured run trains this part. Use one of last_layer"):
        choose([ONE], dataclasses.replace(ASKED, trained="bias"))
    (tmp_path / "own.csv").write_text("task,size\n")
    with pytest.raises(ConfigError, match="has no column checkpoint, trained"):
        fine_tuning.read(tmp_path / "own.csv")
