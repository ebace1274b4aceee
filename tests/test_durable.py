"""Drafts of files and folders: in place and on disk when their block ends, gone if it raises."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpx.durable import draft_folder_of, draft_of, make_private, remove_drafts, write_durably


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


HOLDS = """
import sys, time
from pathlib import Path
from dpx.durable import draft_folder_of, make_private
with draft_folder_of(Path(sys.argv[1]), make_private) as draft:
    (draft / "text").write_text("protected")
    print(draft.name, flush=True)
    time.sleep(600)
"""


def test_a_killed_process_draft_is_removed_and_a_living_ones_is_not(tmp_path):
    path = tmp_path / "store"
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        draft = tmp_path / holder.stdout.readline().strip()
        assert draft.stat().st_mode & 0o777 == 0o700
        # What only looks like one: another store's, a file, a link, and a name without the eight letters.
        others = [tmp_path / name for name in (".store-2.1.0123abcd", ".store.1.0123abcd.txt", ".store.1.x")]
        for other in others:
            other.mkdir()
        (tmp_path / ".store.3.0123abcd").symlink_to(others[0])
        (tmp_path / ".store.4.0123abcd").write_text("a file")
        assert remove_drafts(path) == [] and (draft / "text").is_file()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        kept = sorted(set(os.listdir(tmp_path)) - {draft.name})
        assert remove_drafts(path) == [draft] and sorted(os.listdir(tmp_path)) == kept
    finally:
        holder.kill()
        holder.communicate()
    assert remove_drafts(tmp_path / "nowhere" / "store") == []


def test_a_draft_is_locked_until_it_has_its_name(tmp_path):
    def put(draft, path):
        assert remove_drafts(path) == []
        os.rename(draft, path)

    with draft_folder_of(tmp_path / "store", make_private, put) as draft:
        assert remove_drafts(tmp_path / "store") == []
        (draft / "text").write_text("protected")
    assert os.listdir(tmp_path / "store") == ["text"]
