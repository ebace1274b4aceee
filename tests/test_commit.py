"""A run's code is named where git can name it, and not where it cannot."""

import os
import subprocess
from pathlib import Path

import pytest

from dpx.job.train import CHECKOUT, commit


def git(*arguments: str, at: Path) -> str:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(["git", *arguments], cwd=at, env=alone, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh checkout of a commit of the packages that report the commit."""
    source = tmp_path / "source"
    for name in ("dpx/__init__.py", "dpx/job/train.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text((CHECKOUT / name).read_text())
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    git("init", "--quiet", at=source)
    git("add", ".", at=source)
    git(*author, "commit", "--quiet", "-m", "first", at=source)
    git("clone", "--quiet", str(source), str(tmp_path / "clone"), at=tmp_path)
    return tmp_path / "clone"


def test_a_clone_names_its_commit_and_whether_its_code_was_changed(clone: Path) -> None:
    head = git("rev-parse", "HEAD", at=clone)[:12]
    (clone / "notes.txt").write_text("not code")
    assert commit(clone) == head
    with (clone / "dpx" / "job" / "train.py").open("a") as file:
        file.write("# changed\n")
    assert commit(clone) == f"{head}+"


def test_what_is_no_checkout_names_nothing(clone: Path) -> None:
    (clone / ".git").rename(clone / "git")
    assert commit(clone) is None


def test_git_that_fails_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() is None
