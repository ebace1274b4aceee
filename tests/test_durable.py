"""Drafts of files and folders: in place and on disk when their block ends, gone if it raises."""

import os
from pathlib import Path

import pytest

from dpx.durable import draft_of, write_durably


@pytest.fixture
def synced(monkeypatch):
    """The names of what was synced to disk, in order."""
    names, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (names.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name), fsync(handle)))
    return names


def test_a_folder_is_synced_file_by_file_before_it_has_its_name(tmp_path, synced):
    with draft_of(tmp_path / "folder") as draft:
        (draft / "inner").mkdir(parents=True)
        (draft / "inner" / "file").write_text("content")
        assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "content"
    assert synced == ["inner", "file", draft.name, tmp_path.name]


def test_a_block_that_raises_leaves_what_was_there(tmp_path):
    write_durably(tmp_path / "file", "before")
    for name, make in (("file", Path.touch), ("folder", Path.mkdir), ("missing", lambda _: None)):
        with pytest.raises(ValueError), draft_of(tmp_path / name) as draft:
            make(draft)
            raise ValueError
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "before"


def test_a_draft_that_must_not_replace_leaves_the_first(tmp_path):
    for text in ("first", "second"):
        try:
            with draft_of(tmp_path / "file", os.link) as draft:
                draft.write_text(text)
        except FileExistsError:
            assert text == "second"
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "first"
