"""The cost of a charged sum of trials: full plans from the beginning, restarts in addition, and every declared trial."""

import json
import shutil
from pathlib import Path

import pytest

from dpx.claim.claim_checks import check_start
from dpx.claim.study import Study
from dpx.config.declared_init import RandomStart
from dpx.config.declared_tuning import Tune
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.files.run_folder import Status
from dpx.launch.search import search_of
from dpx.privacy.ledger import Ledger
from tests.sealed import sealed_anew
from tests.tuning.made_up import STEPS, begin, enter, experiment, folder_of, stated, steps_of, trial, units_of


def test_a_killed_trial_is_charged_its_plan_and_has_failed(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    trial(study, of, 1, 0.1)
    begin(study, of, folder_of(study, 2))
    enter(folder_of(study, 2), of, range(1))
    with open(study.private / "trials", "a") as file:
        file.write('0123 {"kind": "begun", "number": 2, "folder": "cut sh')
    assert [one.state for one in study.close(search_of(of))] == ["finished", "failed"]
    assert steps_of(stated(study)) == 2 * STEPS


def test_a_trial_that_left_nothing_is_charged_its_plan_and_named(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    trial(study, of, 1, 0.1)
    begin(study, of, folder_of(study, 2))
    shutil.rmtree(folder_of(study, 2))
    study.close(search_of(of))
    said = stated(study)
    assert said["guarantee"] == "dp" and steps_of(said) == 2 * STEPS
    assert said["trials"] == {"kind": "counted", "declared": 3, "begun": 2, "charged_by_plan_alone": ["laptop_anil_tune_32k-2"]}


def test_the_claim_is_of_all_declared_trials_and_what_is_spent_stands_beside_it(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition", 3)
    said = []
    for number in range(3):
        trial(study, of, number, 0.1)
        said.append(stated(study))
    claims, spent = [one["epsilon"]["rdp"] for one in said], [one["spent"]["epsilon"]["rdp"] for one in said]
    assert claims[0] == claims[1] == claims[2] == spent[2] > spent[1] > spent[0]
    assert "stopping here depended neither" in said[0]["spent"]["valid_only_if"]


def test_steps_entered_again_in_another_epoch_stay_charged_without_their_folder(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    first = trial(study, of, 1, None, steps=3)
    begin(study, of, first)
    enter(first, of, range(1, STEPS), epoch=1)
    study.end(search_of(of), first, "finished", 0.1)
    assert steps_of(stated(study)) == 3 + 4, "steps 1 and 2 were drawn twice; step 0 is not left to do"
    before = stated(study)["epsilon"]
    shutil.rmtree(first)
    study.close(search_of(of))
    assert stated(study)["epsilon"] == before and steps_of(stated(study)) == 3 + 4


def test_a_trial_whose_folder_was_deleted_is_another_trial_when_it_begins_again(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition", 2)
    shutil.rmtree(trial(study, of, 1, 0.1))
    trial(study, of, 1, 0.2)
    said = stated(study)
    assert said["trials"]["begun"] == 2 and steps_of(said) == 2 * STEPS
    assert of.tune is not None and study.left(of.tune) == 0


def test_a_ledger_that_was_set_back_takes_the_guarantee_away(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    first = trial(study, of, 1, 0.1, steps=3)
    older = (first / "private" / "ledger").read_bytes()
    begin(study, of, first)
    enter(first, of, range(3, STEPS))
    study.end(search_of(of), first, "finished", 0.1)
    assert stated(study)["guarantee"] == "dp"
    (first / "private" / "ledger").write_bytes(older)
    study.close(search_of(of))
    said = stated(study)
    assert said["guarantee"] == "none" and said["epsilon"] == {}
    (reason,) = said["reasons"]
    assert reason.startswith("laptop_anil_tune_32k-1: its ledger ends at line") and str(tmp_path) not in reason
    assert steps_of(said) == STEPS, "what it held is known"


def test_more_trials_than_declared_are_a_choice_after_results(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    trial(study, experiment("composition", 1), 1, 0.1)
    assert stated(study)["guarantee"] == "dp"
    trial(study, experiment("composition", 3), 2, 0.2)
    said = stated(study)
    assert said["guarantee"] == "none" and said["trials"]["declared"] == 3
    assert said["reasons"] == [
        "tune.trials was raised from 1 to 3 after 1 had begun: the number of trials was chosen after results",
    ]
    claimed = [one["value"] for one in said["unsupported"]]
    study.close(search_of(experiment("composition", 1)))
    assert stated(study)["guarantee"] == "none", "it stays in the record"
    assert [one["value"] for one in stated(study)["unsupported"]] == claimed


def test_fewer_trials_than_declared_cost_no_less(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    trial(study, experiment("composition", 3), 1, 0.1)
    before = stated(study)
    study.close(search_of(experiment("composition", 1)))
    assert stated(study)["epsilon"] == before["epsilon"] and stated(study)["trials"]["declared"] == 3


def test_a_trial_without_a_guarantee_leaves_the_study_none_though_its_results_are_deleted(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    folder = folder_of(study, 1)
    begin(study, of, folder)
    enter(folder, of, range(STEPS))
    said = json.loads((folder / "release" / "privacy.json").read_text())
    (folder / "release" / "privacy.json").write_text(json.dumps(said | {"guarantee": "none", "reasons": ["audit: refuted"]}))
    sealed_anew(folder)
    study.end(search_of(of), folder, "finished", 0.1)
    shutil.rmtree(folder)
    study.close(search_of(of))
    assert stated(study)["reasons"] == ["a trial has no guarantee", "audit: refuted"]


def test_a_trial_whose_statement_was_edited_leaves_the_study_none_though_its_results_are_deleted(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    folder = folder_of(study, 1)
    begin(study, of, folder)
    enter(folder, of, range(STEPS))
    path = folder / "release" / "privacy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"epsilon": {"rdp": 0.001}}))
    study.end(search_of(of), folder, "finished", 0.1)
    shutil.rmtree(folder)
    study.close(search_of(of))
    assert stated(study)["guarantee"] == "none" and "the parts of a trial's folder do not agree" in stated(study)["reasons"]


def test_a_killed_trial_that_was_resumed_to_its_end_has_finished(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    folder = folder_of(study, 1)
    begin(study, of, folder)
    enter(folder, of, range(2))
    assert [one.state for one in study.close(search_of(of))] == ["failed"]
    enter(folder, of, range(2, STEPS))
    Status(folder, "resume").write("finished", score=0.4)
    (finished,) = study.close(search_of(of))
    assert (finished.state, finished.score) == ("finished", 0.4) and steps_of(stated(study)) == STEPS


def test_what_a_parent_has_spent_is_in_no_trials_plan() -> None:
    with pytest.raises(ConfigError, match="fork=outputs/a with tune.charge=composition"):
        check_start("outputs/a", RandomStart(), Tune(charge="composition"))
    check_start("outputs/a", RandomStart(), Tune(charge="uncharged"))
    check_start(None, RandomStart(), Tune(charge="composition"))


def test_runs_without_privacy_have_no_plan_and_no_claim(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition", 3, "mechanism=none")
    folder = folder_of(study, 1)
    begin(study, of, folder)
    Ledger(folder / "private" / "ledger").close()
    study.end(search_of(of), folder, "finished", 0.1)
    assert stated(study)["guarantee"] == "not_private" and study.trials()[0].plan is None


@pytest.mark.parametrize("is_deleted", [False, True])
def test_trials_on_data_that_was_prepared_otherwise_in_between_have_no_guarantee(tmp_path: Path, is_deleted: bool) -> None:
    """One config: only what the store says tells the vocabularies apart, and a row that is cut by another vocabulary is another unit."""
    study, of = Study(tmp_path, "s"), experiment("composition")
    first = trial(study, of, 1, 0.1)
    assert stated(study)["guarantee"] == "dp" and stated(study)["units"] == [to_json(units_of(of))]
    if is_deleted:
        shutil.rmtree(first)
    trial(study, of, 2, 0.2, units=units_of(of, "b" * 64))
    said = stated(study)
    assert said["guarantee"] == "none" and said["epsilon"] == {} and len(said["units"]) == 2
    assert any("data.vocabulary" in reason for reason in said["reasons"])


OTHER_UNITS = {
    "data": ["data.split_salt=other", "data.public_fraction=0.2", "data.heldout_fraction=0.2", "data.sequence_length=16"]
    + ["data.vocabulary.fit_on=protected", "data.vocabulary.size=512"],
    "privacy": ["privacy.unit=document", "privacy.adjacency=add_remove"],
}


# Parts are compared whole.
@pytest.mark.parametrize(
    ("part", "override"),
    [
        pytest.param(part, override, marks=[pytest.mark.slow] * (override != overrides[0]))
        for part, overrides in OTHER_UNITS.items()
        for override in overrides
    ],
)
def test_trials_of_one_study_protect_one_unit(tmp_path: Path, part: str, override: str) -> None:
    study = Study(tmp_path, "s")
    trial(study, experiment("composition"), 1, 0.1)
    with pytest.raises(ConfigError, match=f"began with another {part}"):
        begin(study, experiment("composition", 3, override), folder_of(study, 2), ())
