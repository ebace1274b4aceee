import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dpx.data import embedded
from dpx.data.embedded import DEPENDENCIES, EmbeddedSource, closure

SOURCE = '''"""The first line of the module's own text."""

NAME = "x"
HELP = """This is a long text that is not a docstring but is held in a constant, as command lines do.
It has to be of some length, or every message of the program would be taken for documentation,
and so it goes on for a while about nothing in particular.
"""

class Thing:
    """A thing that is described in one line."""

    def act(self):
        """Act on the thing in the way that is asked.

        >>> Thing().act()
        """
        if True:
            add_doc("act", """Another long text, which is passed to a function as the documentation of what is built in C.
It has to be of some length too, or it would be taken for a message of the program,
and therefore it also goes on for a while about nothing.
""")

    def again(self):
        """A thing that is described in one line."""
'''


def test_documentation_is_read_in_order_and_once(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    paragraphs = embedded._paragraphs(path)
    assert [paragraph.split()[0] for paragraph in paragraphs] == ["The", "This", "A", "Act", "Another"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("broken.py", '"""A text of the module."""\ndef ('), ("latin.md", b"The caf\xe9 of the town is open."), ("gone.md", None)],
)
def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path, name: str, content: str | bytes | None):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert embedded._paragraphs(path) == ()


def test_the_dependencies_are_the_declared_ones():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    declared = {Requirement(line).name for line in project["project"]["dependencies"]}
    assert declared - set(DEPENDENCIES) == set()
    assert {"jaxlib", "markdown-it-py", "attrs"} <= set(closure(DEPENDENCIES)) and "pytest" not in closure(DEPENDENCIES)


def test_units_are_distribution_and_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "DEPENDENCIES", ("grpcio",))
    monkeypatch.setattr(embedded, "_standard_library", lambda: iter(()))
    source = EmbeddedSource()
    documents = list(source.documents())
    ids = [document.unit_id for document in documents]
    assert ids == sorted(set(ids), key=str) and "grpcio/grpc/__init__.py" in ids
    assert "grpc" not in sys.modules
    assert source.fingerprint() == EmbeddedSource().fingerprint()
    assert [document.paragraphs for document in EmbeddedSource().documents()] == [document.paragraphs for document in documents]


@pytest.mark.slow
def test_there_is_enough_to_learn_from():
    """About 12 MB with the locked versions; a floor that says when a rule begins to drop too much."""
    documents = list(EmbeddedSource().documents())
    assert len(documents) > 3000
    assert sum(len(paragraph) for document in documents for paragraph in document.paragraphs) > 8e6
