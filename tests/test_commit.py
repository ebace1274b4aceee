"""A run's code is named where git can name it, and not where it cannot."""

import re
from pathlib import Path

import pytest

from dpx.launch import commit


def test_hash_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "0123456789ab", "status": ""}
    monkeypatch.setattr(commit, "_CHECKOUT", Path(__file__).parent)
    monkeypatch.setattr(commit, "_git", lambda name, *_: answers[name])
    assert commit.commit() is None, "no .git here"
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert commit.commit() == "0123456789ab"
    answers["status"] = " M dpx/mesh.py"
    assert re.fullmatch("[0-9a-f]{12}\\+", commit.commit() or "")


def test_git_that_fails_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit.commit() is None
