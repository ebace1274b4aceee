"""What a refused command may remove: only a folder that it made itself and that holds nothing but what every command writes."""

import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpx import durable
from dpx.durable import locked, write_durably
from dpx.files.run_folder import RunFolder
from dpx.launch.refused import NoteFolders, remove_if_new


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that a command made after it had noted which exist, with what every command writes."""
    _note(tmp_path / "outputs" / "main-1")
    path = tmp_path / "outputs" / "main-1"
    write_durably(path / "private" / "hydra" / "config.yaml", "steps: 1")
    write_durably(path / "private" / "dpx.log", "Traceback")
    _status(path, pid=os.getpid())
    with RunFolder(path).claimed():
        pass
    return path


def _note(path: Path) -> None:
    NoteFolders().on_run_start(SimpleNamespace(hydra=SimpleNamespace(run=SimpleNamespace(dir=str(path)))))


def _status(path: Path, pid: int, job: str = "train") -> None:
    write_durably(path / "private" / "status.json", json.dumps({job: {"state": "running", "pid": pid}}))


def test_a_new_folder_is_removed_with_the_parents_made_for_it(folder: Path, tmp_path: Path) -> None:
    assert remove_if_new(folder, "train")
    assert list(tmp_path.iterdir()) == []


def test_parents_that_existed_stay(folder: Path, tmp_path: Path) -> None:
    _note(tmp_path / "outputs" / "main-2")
    (tmp_path / "outputs" / "main-2").mkdir()
    assert remove_if_new(tmp_path / "outputs" / "main-2", "train")
    assert list((tmp_path / "outputs").iterdir()) == [folder]


def test_a_folder_that_existed_stays_even_if_it_was_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    _note(tmp_path / "mine")
    assert not remove_if_new(tmp_path / "mine", "train") and (tmp_path / "mine").exists()


def test_without_a_note_nothing_is_removed(folder: Path) -> None:
    NoteFolders().on_run_start(None)
    assert not remove_if_new(folder, "train") and (folder / "private" / "dpx.log").exists()


@pytest.mark.parametrize("name", ["private/ledger", "private/trial.json", "release/plan.json", "notes", "private/hydra/mine.yaml"])
def test_a_folder_with_anything_else_stays_whole(folder: Path, name: str) -> None:
    write_durably(folder / name, "x")
    before = sorted(folder.rglob("*"))
    assert not remove_if_new(folder, "train") and sorted(folder.rglob("*")) == before


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (folder / "release").rmdir()
    (folder / "release").symlink_to(tmp_path / "victim")
    assert not remove_if_new(folder, "train") and (tmp_path / "victim").exists()


@pytest.mark.parametrize(("pid", "job"), [(1, "train"), (os.getpid(), "plan")], ids=["process", "job"])
def test_a_folder_that_another_process_or_job_has_noted_itself_in_stays(folder: Path, pid: int, job: str) -> None:
    _status(folder, pid, job)
    assert not remove_if_new(folder, "train") and (folder / "private" / "dpx.log").exists()


def test_a_folder_that_another_process_holds_stays(folder: Path) -> None:
    with RunFolder(folder).claimed():
        assert not remove_if_new(folder, "train")
    assert (folder / "private" / "lock").exists()


def test_a_lock_file_that_was_removed_while_it_was_opened_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes would otherwise hold two files of one name, and both would train."""
    path, flock = tmp_path / "lock", fcntl.flock

    def removed_meanwhile(handle: int, operation: int) -> None:
        monkeypatch.setattr(durable.fcntl, "flock", flock)
        path.unlink()
        flock(handle, operation)

    monkeypatch.setattr(durable.fcntl, "flock", removed_meanwhile)
    with locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
        with pytest.raises(BlockingIOError), locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            pass
