"""The closing table of a sweep."""

import io
from pathlib import Path

from rich.console import Console

from dpx.launch.sweep import Outcome, show


def _shown(*outcomes: Outcome) -> str:
    written = io.StringIO()
    show(list(outcomes), Console(file=written, width=200))
    return written.getvalue()


def test_a_path_in_brackets_is_shown_as_it_is() -> None:
    paths = "data.source.paths=[/some/where.jsonl.gz,/else.txt]"
    assert paths in _shown(Outcome(Path("a"), (paths,), "failed", error="[/some]: no such file"))
    assert "[/some]: no such file" in _shown(Outcome(Path("a"), (paths,), "failed", error="[/some]: no such file"))


def test_only_what_differs_is_named() -> None:
    shown = _shown(Outcome(Path("a"), ("steps=1", "seed=1"), "finished", 0.25), Outcome(Path("b"), ("steps=1", "seed=2"), "failed"))
    assert "seed=2" in shown and "steps=1" not in shown and "25.00%" in shown
