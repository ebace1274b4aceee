"""The record of a search: a chain that its statement and its trials' folders name, so that none of it can go missing unseen."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpx.claim import search_record
from dpx.claim.combined_ledgers import read
from dpx.claim.search_record import Line
from dpx.claim.study import Study
from dpx.config.declared_tuning import Tune
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.launch.search import search_of
from dpx.privacy.hash_chain import Chain
from tests.tuning.made_up import STEPS, begin, experiment, folder_of, stated, trial


def _refuses_everything(study: Study, words: str) -> None:
    of = experiment("composition")
    for use in (
        lambda: study.left(of.tune or Tune()),
        lambda: begin(study, of, folder_of(study, 9)),
        lambda: study.end(search_of(of), folder_of(study, 1), "finished", 0.1),
        lambda: study.close(search_of(of)),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            use()
        assert "\n" not in str(refused.value)


def test_a_deleted_study_does_not_start_to_count_again(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    trial(study, of, 1, 0.1)
    shutil.rmtree(study.path)
    _refuses_everything(study, r"private/trials: is lost, but laptop_anil_tune_32k-1/private/trial.json follows from it. Restore")
    other = Study(tmp_path, "another")
    trial(other, of, 2, 0.1)
    assert stated(other)["trials"]["begun"] == 1, "other studies do not mind"


def test_a_lost_record_is_missed_by_the_statement_alone(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    shutil.rmtree(trial(study, experiment("composition"), 1, 0.1))
    (study.private / "trials").unlink()
    _refuses_everything(study, "is lost, but s/release/privacy.json follows from it")


def test_a_record_that_was_cut_is_missed_by_what_follows_from_it(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    trial(study, of, 1, 0.1)
    lines = (study.private / "trials").read_bytes().splitlines(keepends=True)
    trial(study, of, 2, 0.1)
    (study.private / "trials").write_bytes(b"".join(lines))
    _refuses_everything(study, "beside s/release/privacy.json: ends at line")
    shutil.rmtree(study.release)
    _refuses_everything(study, "beside laptop_anil_tune_32k-2/private/trial.json: ends at line")


def test_an_edited_statement_of_a_study_is_refused_by_the_study_and_by_an_account(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    trial(study, of, 1, 0.1)
    path = study.release / "privacy.json"
    older = path.read_text()
    trial(study, of, 2, 0.1)
    newest = path.read_text()
    lower = json.loads(newest)
    lower["ledger"]["segments"] = []
    for text in (older, json.dumps(lower), json.dumps(json.loads(newest) | {"delta": 1e-12})):
        path.write_text(text)
        _refuses_everything(study, "s/release/privacy.json: differs from the statement whose checksum is in the study's record")
        for source in (study.path, path):
            with pytest.raises(ConfigError, match="differs from the statement whose checksum is in the study's record"):
                read(source)
    path.write_text(newest)
    assert read(path).segments == read(study.path).segments != []


class Killed(Exception):
    """Stands for a SIGKILL at a chosen write."""


@pytest.mark.parametrize("killed", ["sealed_statement", "written", "stated"])
def test_a_kill_while_a_study_is_stated_locks_nobody_out(tmp_path: Path, killed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    trial(study, of, 1, 0.1)
    whole, note = search_record.write_durably, search_record.Record.note

    def mortal(*given: Any) -> None:
        if killed == "written":
            raise Killed
        whole(*given)

    def noted(self: Any, *lines: Line) -> None:
        if any(line.kind == killed for line in lines):
            raise Killed
        note(self, *lines)

    for number in (2, 3):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(search_record, "write_durably", mortal)
            patch.setattr(search_record.Record, "note", noted)
            trial(study, of, number, 0.1)
    study.close(search_of(of))
    assert stated(study)["trials"]["begun"] == 3


def test_an_edited_record_is_no_chain(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    trial(study, experiment("composition"), 1, 0.1)
    path = study.private / "trials"
    path.write_bytes(path.read_bytes().replace(b'"score": 0.1', b'"score": 0.9'))
    _refuses_everything(study, r"line \d+ was changed")


def test_a_new_record_under_an_old_name_is_another_one(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    trial(study, of, 1, 0.1)
    (study.private / "trials").unlink()
    Chain(study.private / "trials", {"trials": search_record.FORMAT}).close()
    _refuses_everything(study, "is another chain")


def test_the_plan_is_on_disk_before_a_trial_starts(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    begin(study, of, folder_of(study, 1), ("optimizer.weight_decay=1",))
    (line,) = [line for line in Chain(study.private / "trials").lines if line["kind"] == "begun"]
    (run,) = line["plan"]
    assert run["steps"] == [[0, STEPS]] and (run["q"], run["noise_multiplier"]) == (0.1, 4.0)
    noted = json.loads((folder_of(study, 1) / "private" / "trial.json").read_text())
    assert noted["study"] == "s" and to_json(Chain(study.private / "trials").mark) == noted["mark"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"kind": "again", "number": 0, "why": "no"}, "line 2: its content has the field why, unknown here"),
        ({"kind": "again"}, "line 2: its content has no value for the field number"),
        ({"kind": "again", "number": "0"}, "line 2: number is not a whole number"),
        ({"kind": "began"}, "line 2: its content is of the kind began, not one of began_with, drawn, draws_from, declared, begun, again"),
        ({"again": 0}, "line 2: its content is of the kind None, not one of began_with"),
        ({"kind": "again", "number": 0}, "line 2: trial 0 did not begin"),
        ({"kind": "begun", "number": 1, "folder": "f", "point": [], "plan": None}, "line 2: trial 1 begins after 0 others"),
    ],
)
def test_a_line_that_is_not_a_record_of_a_search_is_refused(tmp_path: Path, line: dict[str, Any], words: str) -> None:
    study = Study(tmp_path, "s")
    study.private.mkdir(parents=True)
    written = Chain(study.private / "trials", {"trials": search_record.FORMAT})
    written.append([line])
    written.close()
    _refuses_everything(study, f"private/trials, {words}")


def test_a_note_of_a_trial_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    folder = trial(study, experiment("composition"), 1, 0.1)
    path = folder / "private" / "trial.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"won": True}))
    _refuses_everything(study, "private/trial.json: its content has the field won, unknown here")


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    study.private.mkdir(parents=True)
    Chain(study.private / "trials", {"trials": 2}).close()
    _refuses_everything(study, r"private/trials: is in format 2, not 3\. Use the version of dpx that wrote it\.$")


def test_a_trial_whose_plan_is_not_recorded_has_an_unknown_cost(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    with search_record.opened(study.outputs, study.path) as begun:
        begun.begin(folder_of(study, 1), (), None)
    study.close(search_of(of))
    said = stated(study)
    assert said["guarantee"] == "none" and "what it cost is not known" in said["reasons"][0]


def test_a_statement_that_names_no_line_does_not_follow_from_a_record(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    trial(study, experiment("composition"), 1, 0.1)
    path = study.release / "privacy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"record": {}}))
    _refuses_everything(study, "beside s/release/privacy.json: is a chain of lines, and the file that depends on it names no line")
