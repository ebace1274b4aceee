"""Statement and config are what was sealed: whatever is edited in them, every job that would repeat them refuses, for copies alike."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import dpx
from dpx import config, packages
from dpx.claim import trial_charges
from dpx.claim.combined_ledgers import read
from dpx.claim.search_record import Trial
from dpx.config.declared_init import FromRun
from dpx.cost import measured_runs
from dpx.declaration import ConfigError
from dpx.files.records import from_json
from dpx.files.run_folder import RunFolder
from dpx.init.parent import open_parent
from dpx.interop.export import export
from dpx.job.account import Account
from dpx.job.explain import Explain
from dpx.job.generate import Generate
from dpx.job.released_jobs import Evaluate, Export, Predict
from dpx.job.train import Resume, Train, say_finished
from dpx.launch.point import _of_finished_run
from dpx.pages import read_runs
from dpx.privacy.ledger import Ledger
from dpx.statement import agreement, seals
from dpx.statement.statement_records import RunStatement
from dpx_papers.mckenna2025 import table3_trainset

from ..composed import composed
from ..made_statement import made_statement
from ..processes import micro_run
from ..training.sharing import run_job

STATEMENT, WHOLE, RELEASED = "release/privacy.json", "private/config.yaml", "release/config.yaml"


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str]:
    return composed(*micro_run(2), f"data.directory={tmp_path_factory.mktemp('data')}")


@pytest.fixture(scope="module")
def run(declared: tuple[Any, Any, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outputs") / "main-0"
    run_job(declared, path)
    (path / "private" / "status.json").write_text('{"train": {"state": "finished"}}')
    assert agreement.check(path) is not None
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "outputs" / "main-0")


def leaves(node: Any, *at: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document, of empty values too."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if not inner:
        yield at
    for key, value in inner:
        yield from leaves(value, *at, key)


def edited(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return -value - 1
    return f"{value}x" if isinstance(value, str) else ["x"] if isinstance(value, list) else {"x": 1} if isinstance(value, dict) else 0


def edits(document: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(place, `document` edited there) for every value: changed, and taken out with its key."""
    for *parents, last in leaves(document):
        for changes in (True, False):
            other = json.loads(json.dumps(document))
            node = other
            for key in parents:
                node = node[key]
            if changes:
                node[last] = edited(node[last])
            else:
                del node[last]
            yield (*parents, last, "changed" if changes else "deleted"), other


def refuses(act: Callable[[], Any], file: str) -> None:
    with pytest.raises(ConfigError) as raised:
        act()
    said = str(raised.value)
    assert file.rpartition("/")[2] in said and ("sealed" in said or "with" in said or "ledger" in said or "YAML" in said), said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("file", "has_private"),
    [
        (WHOLE, True),
        (STATEMENT, False),
        (RELEASED, True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(STATEMENT, True), (RELEASED, False)]),
    ],
    ids=lambda value: {True: "run", False: "handed on"}.get(value, value),
)
def test_every_field_is_sealed(copy: Path, file: str, has_private: bool) -> None:
    if not has_private:
        shutil.rmtree(copy / "private")
    path = copy / file
    before = path.read_text()
    is_statement = file == STATEMENT
    document = json.loads(before) if is_statement else yaml.safe_load(before)
    places = []
    for place, other in edits(document):
        path.write_text(json.dumps(other) if is_statement else yaml.safe_dump(other))
        refuses(lambda: agreement.check(copy), file)
        places.append(place)
    assert len(places) > 100, "the walk reaches what is nested"
    path.write_text(before)
    agreement.check(copy)


def anew(document: dict[str, Any], entered: Ledger) -> RunStatement:
    """The same statement, of a later line of the ledger."""
    stated = from_json(RunStatement, document, "a statement")
    return dataclasses.replace(stated, ledger=dataclasses.replace(stated.ledger, mark=entered.mark))


def lower_epsilon(path: Path) -> None:
    said = json.loads((path / STATEMENT).read_text())
    said["epsilon"]["rdp"] = 0.001
    (path / STATEMENT).write_text(json.dumps(said))


def lower_delta(path: Path, file: str = WHOLE) -> None:
    text = (path / file).read_text()
    assert "delta: 0.0001" in text
    (path / file).write_text(text.replace("delta: 0.0001", "delta: 1.0e-12"))


EDITS = {STATEMENT: lower_epsilon, WHOLE: lower_delta, RELEASED: lambda path: lower_delta(path, RELEASED)}


def rows_beside(path: Path) -> str:
    """A table to predict for: whether there is one is asked first."""
    (path.parent / "rows.csv").write_text("text\nany\n")
    return str(path.parent / "rows.csv")


# Every road on which a statement or a config of a run is read. The experiment is that of the run as it was.
ROADS: dict[str, Callable[[Any, Path], Any]] = {
    "account": lambda of, path: Account(accountant="rdp")(of, RunFolder(path)),
    "account of the folder": lambda of, path: Account(ledgers=[str(path)])(of, RunFolder(path.parent / "other")),
    "account of the ledger": lambda of, path: read(path / "private" / "ledger"),
    "account of the statement": lambda of, path: read(path / STATEMENT),
    "evaluate": lambda of, path: Evaluate()(of, RunFolder(path)),
    "explain": lambda of, path: Explain()(of, RunFolder(path)),
    "export": lambda of, path: Export()(of, RunFolder(path)),
    "export elsewhere": lambda of, path: export(of.fitted, path, path.parent / "exported"),
    "generate": lambda of, path: Generate(prompts=rows_beside(path))(of, RunFolder(path)),
    "predict": lambda of, path: Predict(input=rows_beside(path), output=f"{path}/out")(of, RunFolder(path)),
    "resume": lambda of, path: Resume()(of, RunFolder(path, "name: main\n")),
    "train": lambda of, path: Train()(of, RunFolder(path, "name: main\n")),
    "train, finished": lambda of, path: say_finished(path),
    "dpx.load": lambda of, path: dpx.load(path),
    "run=": lambda of, path: config.load(str(path)),
    "init=run": lambda of, path: open_parent(FromRun(run=str(path)), "init.run=x"),
    "init=run of a checkpoint": lambda of, path: open_parent(FromRun(run=str(path), step=2), "init.run=x"),
    "fork": lambda of, path: Train()(of, RunFolder(path.parent / "fork", "name: main\n", f"{path}@2")),
    "report": lambda of, path: read_runs.read(path),
    "design": lambda of, path: measured_runs._rows(path, 1),
    "analysis": lambda of, path: table3_trainset._row(path, 1.0, 1),
}


@pytest.mark.parametrize("file", EDITS)
@pytest.mark.parametrize("road", ROADS)
def test_no_road_repeats_what_was_edited(copy: Path, declared: tuple[Any, Any, str], road: str, file: str) -> None:
    EDITS[file](copy)
    before = (copy / STATEMENT).read_text()
    refuses(lambda: ROADS[road](declared[0], copy), file)
    assert (copy / STATEMENT).read_text() == before and not (copy.parent / "exported").exists()
    assert not {"explain.json", "account.json", "hf"} & {path.name for path in (copy / "release").iterdir()}


OF_COPIES = ("account", "account of the folder", "account of the statement", "evaluate", "explain", "export", "export elsewhere")
OF_COPIES += ("generate", "predict", "dpx.load", "run=", "init=run", "design", "analysis")


@pytest.mark.parametrize("file", [STATEMENT, RELEASED])
@pytest.mark.parametrize("road", OF_COPIES)
def test_no_road_repeats_what_was_edited_in_a_release_that_was_handed_on(
    copy: Path, declared: tuple[Any, Any, str], road: str, file: str
) -> None:
    metrics = (copy / "private" / "metrics.jsonl").read_text()
    shutil.rmtree(copy / "private")
    if road == "design":
        (copy / "private").mkdir()
        (copy / "private" / "metrics.jsonl").write_text(metrics)
    EDITS[file](copy)
    refuses(lambda: ROADS[road](declared[0], copy), file)


@pytest.mark.parametrize("file", EDITS)
def test_no_job_is_given_a_run_whose_parts_were_edited(copy: Path, file: str) -> None:
    jobs = [job for job in packages.names_in("job") if packages.is_own("job", job)]
    asked = [OmegaConf.create({"run": str(copy), "job": job}) for job in jobs]
    for cfg in asked:
        _of_finished_run(cfg, [])
    EDITS[file](copy)
    for cfg in asked:
        refuses(lambda: _of_finished_run(cfg, []), file)  # noqa: B023
    assert {"account", "audit", "benchmark", "evaluate", "explain", "export", "generate", "plan", "predict", "resume", "train"} <= set(jobs)


def test_a_trial_whose_statement_was_edited_disagrees(copy: Path) -> None:
    assert trial_charges._believed(copy, Trial(number=0, folder=copy.name, point=(), plan=None))[2] is None
    lower_epsilon(copy)
    assert (
        trial_charges._believed(copy, Trial(number=0, folder=copy.name, point=(), plan=None))[2]
        == "main-0/release/privacy.json differs from the statement whose checksum is in private/ledger"
    )


def test_a_statement_of_another_time_is_found(copy: Path, declared: tuple[Any, Any, str]) -> None:
    """An older one is lower where steps were charged again since."""
    older, folder = (copy / STATEMENT).read_text(), RunFolder(copy)
    entered = Ledger(copy / "private" / "ledger")
    seals.write_statement(folder, entered, anew(json.loads(older), entered))
    agreement.check(copy)
    (copy / STATEMENT).write_text(older)
    refuses(lambda: agreement.check(copy), STATEMENT)


def test_an_edited_statement_that_is_moved_away_is_stated_anew(copy: Path, declared: tuple[Any, Any, str]) -> None:
    """The refusal says so, and it is true: nothing but the ledger is needed to state it."""
    before = json.loads((copy / STATEMENT).read_text())
    lower_epsilon(copy)
    (copy / STATEMENT).rename(copy.parent / "moved")
    run_job(declared, copy)
    after = json.loads((copy / STATEMENT).read_text())
    assert after["epsilon"] == before["epsilon"] and after["guarantee"] == before["guarantee"]
    assert dpx.load(copy).is_checked


class Killed(BaseException):
    """Stands for a SIGKILL at a chosen write."""


STEPS = ("seal", "write", "note")


@pytest.mark.parametrize("kills", list(itertools.product([None, *STEPS], repeat=3)), ids=str)
def test_no_order_of_kills_locks_a_run_out(tmp_path: Path, kills: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before one of the three writes of each of three statements, the run goes on each time; an older one is never its newest."""
    folder, seen = RunFolder(tmp_path), []
    for number, kill in enumerate(kills):
        entered = Ledger(folder.private / "ledger")
        assert agreement.before_training(tmp_path) is not None
        with monkeypatch.context() as patch:
            for step, (place, name) in zip(
                STEPS, ((Ledger, "seal_statement"), (seals, "write_durably"), (Ledger, "note_stated")), strict=True
            ):
                if step == kill:
                    patch.setattr(place, name, lambda *_: (_ for _ in ()).throw(Killed))
            try:
                seals.write_statement(folder, entered, made_statement(entered, replicate=number))
            except Killed:
                pass
        entered.close()
        agreement.check(tmp_path)
        lies = (tmp_path / STATEMENT).read_text() if (tmp_path / STATEMENT).is_file() else None
        seen += [lies] if lies is not None and lies not in seen else []
        if kill is None:
            for older in seen[:-1]:
                (tmp_path / STATEMENT).write_text(older)
                refuses(lambda: agreement.check(tmp_path), STATEMENT)
            (tmp_path / STATEMENT).write_text(seen[-1])


def test_a_statement_that_is_made_anew_while_a_job_looks_is_the_runs_own(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on between the reading of its statement and of its ledger."""
    entered, made, before = Ledger(copy / "private" / "ledger"), Ledger.__init__, json.loads((copy / STATEMENT).read_text())
    times = iter([True])

    def late(self: Ledger, path: Any) -> None:
        if next(times, False):
            seals.write_statement(RunFolder(copy), entered, anew(before, entered))
            seals.write_config(RunFolder(copy, "name: anew\n"), entered)
        made(self, path)

    monkeypatch.setattr(Ledger, "__init__", late)
    assert agreement.check(copy) is not None and next(times, None) is None
    assert json.loads((copy / STATEMENT).read_text()) != before


def test_a_config_that_a_kill_left_half_written_is_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = Ledger(tmp_path / "private" / "ledger")
    seals.write_config(RunFolder(tmp_path, "a: /x/1\n"), entered)
    writes, whole = iter([True, False]), seals.write_durably

    def mortal(*given: Any) -> None:
        if not next(writes):
            raise Killed
        whole(*given)

    monkeypatch.setattr(seals, "write_durably", mortal)
    with pytest.raises(Killed):
        seals.write_config(RunFolder(tmp_path, "a: /x/2\n"), entered)
    assert [(tmp_path / file).read_text() for file in (WHOLE, RELEASED)] == ["a: /x/2\n", "a: '1'\n"]
    agreement.check(tmp_path)


def test_a_ledger_that_is_lost_is_missed_by_the_whole_config(copy: Path) -> None:
    """Of a seeded run nothing else of private/ would tell that there was one."""
    for name in ("ledger", "root_secret_0"):
        (copy / "private" / name).unlink()
    shutil.rmtree(copy / "private" / "checkpoints")
    refuses(lambda: agreement.check(copy), "private/config.yaml")


def test_two_seals_of_one_content_are_one(tmp_path: Path) -> None:
    entered = Ledger(tmp_path / "private" / "ledger")
    for _ in range(2):
        seals.write_config(RunFolder(tmp_path, "a: 1\n"), entered)
    assert (tmp_path / "private" / "ledger").read_text().count("sealed") == 1
