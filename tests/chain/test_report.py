"""A finished chain on a page: what `job=report` collects of it, and what it leaves out."""

import json
import shutil
from pathlib import Path

import pytest

from dpx.pages import read_runs
from dpx.pages.page_document import Folded
from dpx_papers.report import privacy, rows, stages

from .conftest import PRETRAIN, node, run


def test_a_finished_chain_is_one_run_with_the_results_of_its_stages(place, tmp_path):
    (found,), left_out = read_runs.collect(Path("outputs"), ("two-",))
    assert left_out == [] and read_runs.is_of_chain(found) and found.experiment == "two"
    own = json.loads(next(Path("outputs").glob("two_pretrain-*/private/results.json")).read_text())
    assert found.finals["pretrain/heldout/mlm_accuracy"] == own["heldout"]["mlm_accuracy"]
    assert found.facts["guarantee"] == "dp" and found.facts["sealed"] == "yes" and "epsilon/rdp" in found.facts
    low, score, high = (found.finals[f"classify/heldout/macro_f1{side}"] for side in ("_low", "", "_high"))
    assert low < score < high and found.finals["classify/heldout/rows"] > 10
    assert "pretrain/before" not in found.finals and "classify/before" not in found.finals, "their tasks differ from those before"
    rows.write(tmp_path / "results.csv", [found])
    (read,) = rows.read(tmp_path / "results.csv")
    assert read.facts == found.facts and set(read.finals) == set(found.finals)
    assert privacy.lines([read])[0].startswith("**dp** for the chain as a whole, ε = ")


def test_the_chosen_point_of_a_stage_gives_its_scores(swept):
    found = max(read_runs.collect(swept / "outputs", ("two-",))[0], key=lambda one: len(one.finals))
    points = {rate: found.finals[f"classify (lr_schedule.learning_rate={rate})/heldout/macro_f1"] for rate in (0.001, 0.3)}
    assert found.finals["classify/heldout/macro_f1"] == max(points.values())
    assert found.facts["classify/chosen"] == f"lr_schedule.learning_rate={max(points, key=lambda rate: points[rate])}"
    assert stages.stages_of([found]) == ["pretrain", *(f"classify (lr_schedule.learning_rate={rate})" for rate in points)]
    chosen, _, every = stages.tables([found])
    assert isinstance(chosen, str) and isinstance(every, Folded)
    assert chosen.count("| classify |") == 1 and every.text.count("| classify |") == 2


def test_a_chain_whose_points_were_chosen_on_the_test_set_is_marked(place):
    (found,), _ = read_runs.collect(Path("outputs"), ("two-",))
    found.facts.update({"classify/chosen": "a=1", "classify/compared_by": "the test set itself"})
    assert "Chosen on the test set" in "\n".join(stages.tables([found]))


def test_a_chain_that_has_not_finished_or_lost_a_stage_or_was_edited_is_left_out(place):
    (stage,), (folder,) = Path("outputs").glob("two_classify-*"), Path("outputs").glob("two-*")
    results = (stage / "private" / "results.json").read_text()
    (stage / "private" / "results.json").unlink()
    assert len(read_runs.collect(Path("outputs"), ("two-",))[1]) == 1
    (stage / "private" / "results.json").write_text(results)
    file = folder / "release" / "chain.json"
    told = file.read_text()
    file.write_text(told.replace('"dp"', '"none"'))
    assert "differs from the statement whose checksum" in read_runs.collect(Path("outputs"), ("two-",))[1][0]
    file.write_text(told)
    shutil.rmtree(stage)
    (line,) = read_runs.collect(Path("outputs"), ("two-",))[1]
    assert "the folder of a finished stage is missing" in line


def test_a_stage_of_the_same_task_is_compared_with_the_weights_that_it_began_with(place):
    run(node(pretrain=PRETRAIN, again=PRETRAIN | {"init": "pretrain"}))
    found = max(read_runs.collect(Path("outputs"), ("two-",))[0], key=lambda one: len(one.finals))
    own = json.loads(next(Path("outputs").glob("two_pretrain-*/private/results.json")).read_text())
    assert found.finals["again/before"] == pytest.approx(own["heldout"]["mlm_accuracy"], abs=1e-6)
    assert found.facts["again/before"] == "held-out rows"


# That a finished stage is not trained again is in test_run.py.
@pytest.mark.slow
def test_two_chains_share_a_stage_of_one_name_and_config(place):
    run(node(pretrain=PRETRAIN | {"name": "shared"}), "chain", "name=one")
    before = {path: path.stat().st_mtime_ns for path in Path("outputs").glob("shared-*/**/*") if path.is_file()}
    run(node(pretrain=PRETRAIN | {"name": "shared"}), "chain", "name=other")
    assert len(list(Path("outputs").glob("shared-*"))) == 1
    assert before == {path: path.stat().st_mtime_ns for path in Path("outputs").glob("shared-*/**/*") if path.is_file()}
