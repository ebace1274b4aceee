"""Repeat and select: the declared plan is what is charged, and a trial that is not one draw of it takes the guarantee away."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from dpx import config
from dpx.claim.study import Study
from dpx.config import recipes
from dpx.config.experiment import Experiment
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.files.results import Results, write_results
from dpx.files.run_folder import Status, write_json
from dpx.files.weights import METADATA
from dpx.launch.search import adopt, own_place, search_of
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import TrialOf
from dpx.statement import agreement
from dpx.statement.agreement import LEDGER
from tests.composed import in_command, point_at
from tests.tuning.made_up import DRAWN, STEPS, begin, enter, experiment, folder_of, stated, trial, units_of


@pytest.fixture(autouse=True)
def three_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 3)


def _complete(study: Study, last: Callable[[Study, Experiment], None]) -> dict:
    """The statement after two trials as planned and a third."""
    of = experiment("repeat_and_select", 8)
    trial(study, of, 0, 0.1)
    trial(study, of, 1, 0.3)
    last(study, of)
    study.close(search_of(of))
    return stated(study)


def _as_planned(study: Study, of: Experiment) -> None:
    trial(study, of, 2, 0.2)


def _failed(study: Study, of: Experiment) -> None:
    trial(study, of, 2, None, steps=2)


def _killed(study: Study, of: Experiment) -> None:
    begin(study, of, folder_of(study, 2))
    enter(folder_of(study, 2), of, range(2))


def _left_nothing(study: Study, of: Experiment) -> None:
    begin(study, of, folder_of(study, 2))


def _lost(study: Study, of: Experiment) -> None:
    shutil.rmtree(trial(study, of, 2, 0.2))


def _on_other_data(study: Study, of: Experiment) -> None:
    trial(study, of, 2, 0.2, units=units_of(of, "b" * 64))


def _lost_its_ledger(study: Study, of: Experiment) -> None:
    (trial(study, of, 2, 0.2) / "private" / "ledger").unlink()


def _lost_its_results(study: Study, of: Experiment) -> None:
    shutil.rmtree(trial(study, of, 2, 0.2) / "private" / "withheld")


def _pruned(study: Study, of: Experiment) -> None:
    trial(study, of, 2, 0.2, steps=STEPS - 1)


def _redrawn(study: Study, of: Experiment) -> None:
    folder = trial(study, of, 2, None, steps=3)
    begin(study, of, folder)
    enter(folder, of, range(2, STEPS), epoch=1)
    study.end(search_of(of), folder, "finished", 0.2)


def _redrawn_in_a_deleted_folder(study: Study, of: Experiment) -> None:
    shutil.rmtree(folder_of(study, 1))
    trial(study, of, 1, 0.2)


def _set_back(study: Study, of: Experiment) -> None:
    folder = trial(study, of, 2, 0.2)
    lines = (folder / "private" / "ledger").read_bytes().splitlines(keepends=True)
    (folder / "private" / "ledger").write_bytes(b"".join(lines[:-1]))


VOIDED = {
    _failed: "a trial failed, or was killed and never finished",
    _killed: "a trial failed, or was killed and never finished",
    _left_nothing: "a trial failed, or was killed and never finished",
    _lost: "the results of a trial are lost",
    _lost_its_ledger: "the results of a trial are lost",
    _lost_its_results: "the results of a trial are lost",
    _pruned: "a trial was stopped before its planned end",
    _redrawn: "a trial was drawn again",
    _redrawn_in_a_deleted_folder: "the results of a trial are lost",
    _set_back: "a trial's ledger disagrees with what follows from it",
}


def test_what_is_charged_is_the_plan_whatever_the_trials_came_to(tmp_path: Path) -> None:
    said = _complete(Study(tmp_path, "s"), _as_planned)
    assert said["guarantee"] == "dp" and [one["count"] for one in said["ledger"]["repeated"]] == [STEPS]
    redrawn = _complete(Study(tmp_path / "other", "s"), _redrawn)
    assert redrawn["ledger"]["repeated"] == said["ledger"]["repeated"]
    assert redrawn["unsupported"][0]["value"] == said["epsilon"]["rdp"]


# Of each way in which a trial is no draw one.
QUICK = (_failed, _lost_its_ledger, _pruned, _redrawn, _redrawn_in_a_deleted_folder, _set_back)
EACH = [pytest.param(last, id=last.__name__.strip("_"), marks=[pytest.mark.slow] * (last not in QUICK)) for last in VOIDED]


@pytest.mark.parametrize("last", EACH)
def test_a_trial_that_is_no_draw_of_the_plan_takes_the_guarantee_away(tmp_path: Path, last: Callable[..., None]) -> None:
    said = _complete(Study(tmp_path, "s"), last)
    assert said["guarantee"] == "none" and said["epsilon"] == {}
    assert f"repeat_and_select: {VOIDED[last]}" in ": ".join(said["reasons"])
    assert said["unsupported"][0]["name"] == "epsilon/rdp" and said["unsupported"][0]["value"] > 0


def test_trials_on_data_that_was_prepared_otherwise_in_between_are_no_repetition(tmp_path: Path) -> None:
    said = _complete(Study(tmp_path, "s"), _on_other_data)
    assert said["guarantee"] == "none" and any("data.vocabulary" in reason for reason in said["reasons"])


def test_a_killed_trial_that_is_resumed_and_ends_as_planned_is_a_draw(tmp_path: Path) -> None:
    def last(study: Study, of: Experiment) -> None:
        _killed(study, of)
        study.close(search_of(of))
        enter(folder_of(study, 2), of, range(2, STEPS))
        Status(folder_of(study, 2), "resume").write("finished", score=0.2)

    study = Study(tmp_path, "s")
    said = _complete(study, last)
    assert said["guarantee"] == "dp"
    assert not (folder_of(study, 2) / "release").exists(), "what it gave out on the way is withheld again"


@pytest.mark.parametrize("place", ["dpx.claim.study.put_in_place", "dpx.claim.search_record.Record.end"])
def test_a_kill_while_a_trial_is_noted_as_finished_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def last(study: Study, of: Experiment) -> None:
        _killed(study, of)
        enter(folder_of(study, 2), of, range(2, STEPS))
        Status(folder_of(study, 2), "train").write("finished", score=0.2)
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(place, Mock(side_effect=KeyboardInterrupt))
            study.end(search_of(of), folder_of(study, 2), "finished", 0.2)

    study = Study(tmp_path, "s")
    assert _complete(study, last)["guarantee"] == "dp"
    assert not (folder_of(study, 2) / "release").exists() and (folder_of(study, 2) / "private" / "withheld").is_dir()


def test_trials_of_another_cost_are_no_repetitions(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    begin(study, experiment("repeat_and_select", 8), tmp_path / "a")
    with pytest.raises(ConfigError, match="telemetry=released: has another cost .* repetitions of one mechanism must have the same cost"):
        begin(
            study,
            experiment("repeat_and_select", 8, "telemetry=released"),
            tmp_path / "b",
            ("telemetry=released", DRAWN),
            settles=False,
        )


@pytest.mark.parametrize("number", [1, 3])
def test_nothing_released_tells_how_many_trials_there_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: number)
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    for place in range(number):
        trial(study, of, place, 0.1 * place + 0.1)
    study.close(search_of(of))
    said = stated(study)
    mark = said["record"].pop("mark")
    assert mark.keys() == {"chain", "digest", "position"} and mark["position"] is None, "a position would count lines"
    plain = _complete_with_one(tmp_path / "reference", monkeypatch)
    assert said == plain, "but for the mark, the same whatever the number"
    assert sorted(path.name for path in study.release.rglob("*")) == ["privacy.json", "privacy.json", "winner"]


def test_the_winners_weights_carry_the_seal_of_the_statement_that_they_are_released_under(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    for number in range(3):
        folder = folder_of(study, number)
        begin(study, of, folder, (f"optimizer.weight_decay={number}",))
        enter(folder, of, range(STEPS))
        told = {"custom_metadata": {"statement": "of the trial", "weights": {}, "ledger": to_json(Ledger(folder / LEDGER).mark)}}
        write_json(folder / "release" / "params" / METADATA, told)
        study.end(search_of(of), folder, "finished", 0.1 * number)
    study.close(search_of(of))
    with pytest.raises(ConfigError, match="differs from the statement that was released with these weights"):
        agreement.check_copy(folder_of(study, 0) / "private" / "withheld")
    agreement.check_copy(study.release / "winner")
    assert stated(study)["guarantee"] == "dp"


def _complete_with_one(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 1)
    study, of = Study(outputs, "s"), experiment("repeat_and_select", 8)
    trial(study, of, 0, 0.5)
    study.close(search_of(of))
    said = stated(study)
    said["record"].pop("mark")
    return said


def test_the_released_digest_still_finds_a_record_that_was_replaced(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    for place in range(3):
        shutil.rmtree(trial(study, of, place, 0.1))
        if place == 1:
            older = (study.private / "trials").read_bytes()
    study.close(search_of(of))
    assert Study(tmp_path, "s").trials(), "the record as it is holds"
    (study.private / "trials").write_bytes(older)
    with pytest.raises(ConfigError, match="does not have the line that this file names"):
        study.close(search_of(of))


def _config(outputs: Path, charge: str = "repeat_and_select"):
    cfg = recipes.compose(["+experiment=laptop/anil_tune_32k", "hydra/sweeper=basic", "model=micro", f"tune.charge={charge}"])
    return cfg, outputs / config.run_name(cfg)


def test_a_point_drawn_twice_is_drawn_with_noise_of_its_own(tmp_path: Path) -> None:
    cfg, first = _config(tmp_path)
    assert own_place(cfg, first) == (cfg, first)
    (first / "private").mkdir(parents=True)
    (first / "private" / "dpx.log").touch()
    assert own_place(cfg, first)[1] == first, "nothing of a trial is there"
    places = [first]
    for replicate in (1, 2):
        (places[-1] / "private").mkdir(parents=True, exist_ok=True)
        (places[-1] / "private" / "trial.json").touch()
        again, place = own_place(cfg, first)
        assert again.replicate == replicate and place not in places and place.name == config.run_name(again)
        places.append(place)
    assert cfg.replicate == 0
    summed, folder = _config(tmp_path, "composition")
    assert own_place(summed, folder)[1] == folder, "a sum takes the result that is there"


def test_a_point_that_was_trained_before_its_search_is_charged_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = experiment("composition")
    folder = tmp_path / f"{of.name}-7"
    enter(folder, of, range(STEPS))
    write_results(folder / "private", Results(steps=STEPS, metric="accuracy", heldout={"accuracy": 0.4}, baselines={}))
    status = Status(folder, "train")
    status.write("finished", score=0.4)
    monkeypatch.setattr("dpx.launch.search.build", lambda cfg: (of, None))
    monkeypatch.setattr("dpx.launch.search.prepare", lambda data, privacy: None)
    command = recipes.compose(["+experiment=laptop/anil_tune_32k", "hydra/sweeper=basic"], with_hydra=True)
    with in_command(command):
        for _ in range(2):
            adopt(point_at(folder, "train", "a=1", is_sweep=True, cfg=command))
    (adopted,) = Study(tmp_path, of.name).trials()
    assert (adopted.folder, adopted.state, adopted.score, adopted.point) == (folder.name, "finished", 0.4, ("a=1",))
    assert Ledger(folder / LEDGER).trials == [TrialOf(study=of.name, charge="composition")], "what begins from it learns that it was chosen"
