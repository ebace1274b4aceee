"""`job=design` of a classification task: what is written runs as it was designed, and what it says beside it."""

import dataclasses
import json
from pathlib import Path

import pytest

from dpx.config import build, recipes
from dpx.cost import fine_tuning
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.design import Design
from dpx.job.design_fine_tuning import Designed, designed, experiment_file, tables
from dpx.job.run_plan import plan_of_run
from dpx.optimizer import Optax
from dpx.sampler.batch_schedule import Constant
from tests.processes import COARSE

GIVEN = ["data=synthetic_labels", "model=micro", "task=classification", "train=last_layer", "data.declared_size=4000", "privacy.delta=1e-5"]
COMMAND = [*GIVEN, COARSE, "job=design", "design.epsilon=8", "steps=7", "noise.epsilon=1", "telemetry=secret"]
TABLE = fine_tuning.read(fine_tuning.shipped())


@pytest.fixture(scope="module")
def experiment():
    return build(recipes.compose(COMMAND))[0]


@pytest.fixture(scope="module")
def found(experiment) -> Designed:
    return designed(experiment, 4000, 8.0, 5e11, TABLE)


def notes(found: Designed, table=TABLE, is_own=False) -> str:
    return " ".join(tables(found, table, fine_tuning.shipped(), is_own)[0].notes)


@pytest.mark.parametrize("is_own", [False, True])
def test_the_file_trains_what_was_designed(found, is_own, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "design.yaml").write_text(experiment_file(COMMAND, found, Path("mine.csv") if is_own else None))
    written = build(recipes.compose([f"hydra.searchpath=[file://{tmp_path}]", "+experiment=design"]))[0]
    assert (written.chosen_by and written.chosen_by.name) == ("mine.csv" if is_own else None)
    alike = dataclasses.replace(written, chosen_by=None)
    assert alike == found.experiment and alike.batch_schedule == Constant(size=found.batch)
    assert plan_of_run(written).noise_multiplier == found.plan.noise_multiplier


def test_the_plan_keeps_to_the_budget_and_to_epsilon(found):
    assert found.plan.flops <= 5e11 and found.plan.guarantee == "dp"
    assert found.plan.epsilon["pld"] == pytest.approx(8, rel=1e-3) and found.plan.epsilon["pld"] <= 8
    assert all(0 < snr < 10 for snr in found.snrs) and len(found.snrs) > 3


def test_it_names_its_table_and_says_where_it_extrapolates(found):
    said = notes(found)
    assert "measured.csv: mrpc, overruling, qnli, sst2" in said and "may differ from the measured all-MiniLM-L6-v2" in said
    assert "by its 95 % interval" in said and "chosen_by" not in said
    assert "the designed run has no guarantee" in notes(found, is_own=True)


def test_it_says_when_nothing_is_above_the_baseline(experiment):
    of_mrpc = [row for row in TABLE if row.task == "mrpc"]
    said = notes(designed(experiment, 100, 0.5, 1e12, of_mrpc), of_mrpc)
    assert "nothing is above always answering the most frequent class at this epsilon and N" in said
    assert "extrapolates: the signal" in said


def test_a_design_of_adapters_says_on_how_few_settings_it_stands():
    experiment = build(recipes.compose([*COMMAND, "train=lora", "train.head=true"]))[0]
    found = designed(experiment, 4000, 8.0, float("inf"), TABLE)
    measured = {row.point for row in TABLE if row.trained == "lora"}
    assert found.choice.point in measured and f"only {len(measured)} settings were measured with train=lora" in notes(found)


@pytest.mark.parametrize(
    ("changes", "epsilon", "compute", "why"),
    [
        ({"optimizer": Optax(name="lion")}, 8.0, 1e12, "optimizer=lion: the measured runs of fine-tuning have optimizer=adam"),
        ({}, float("inf"), 1e12, "design.epsilon=inf: the measured runs of fine-tuning have noise"),
        ({}, 8.0, 1.0, "a budget of 1 FLOPs: does not pay for a step over these rows. Give at least .* or no budget"),
    ],
)
def test_what_was_not_measured_is_refused(experiment, changes, epsilon, compute, why):
    with pytest.raises(ConfigError, match=why):
        designed(dataclasses.replace(experiment, **changes), 4000, epsilon, compute, TABLE)


@pytest.mark.parametrize("given", [["+experiment=fine_tune_number"], ["+experiment=fine_tune_labels", "data.source.label_names=[one,two]"]])
def test_a_task_without_measured_runs_is_refused_before_a_budget_is_asked_for(given, tmp_path):
    experiment = build(recipes.compose([*given, "model=micro", "data.source.paths=rows.csv", "data.declared_size=4000", "job=design"]))[0]
    said = f"task={experiment.task.name}: the predictions of job=design are for single-label classification"
    with pytest.raises(ConfigError, match=said):
        Design()(experiment, RunFolder(tmp_path, ""))


def test_the_job_writes_its_tables_and_needs_neither_epsilon_nor_a_budget(experiment, tmp_path, capsys):
    """Without them epsilon is that of the run, and the passes are those of the measured runs."""
    Design()(experiment, RunFolder(tmp_path, ""))
    document = json.loads((tmp_path / "release" / "design.json").read_text())
    assert [table["name"] for table in document["tables"]] == ["designs", "expected", "settings"] and document["size"] == 4000
    assert (document["epsilon"], document["compute"]) == (1.0, None)
    assert "fine-tuning designed for 4,000 rows, epsilon 1" in capsys.readouterr().out
