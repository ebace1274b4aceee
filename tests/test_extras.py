"""A missing extra is named in the same words wherever it is missing."""

import dataclasses
import sys

import pytest

from dpx import extras
from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.data.completions import ChatTemplate
from dpx.data.csv_table import TableSource
from dpx.data.declared_data import Hub
from dpx.data.hub import HubSource
from dpx.data.labelled import Table
from dpx.data.tokenizer import of_vocabulary
from dpx.data.vocabulary import SPECIAL_TOKENS
from dpx.declaration import ConfigError
from dpx.job.report import Report
from dpx.pages import pictures
from dpx.pages.analysis_tables import Picture
from dpx_papers.benchmark.job import require_installed


@pytest.mark.parametrize(
    ("extra", "needs_it"),
    [
        ("hub", lambda: next(HubSource(Hub(corpora=[{"name": "x"}])).documents())),
        ("hub", lambda: next(TableSource(Table(paths="hf://datasets/x", labels=["a", "b"])).documents())),
        (
            "chat",
            lambda: ChatTemplate(dataclasses.replace(of_vocabulary(list(SPECIAL_TOKENS)), chat_templates={"default": "{{ messages }}"})),
        ),
        ("plots", lambda: pictures.draw([Picture("name", "caption", ())], [])),
        ("papers", lambda: extras.supplied("report_of_papers", "")(Report(paper="anil2021"))),
        ("bench", lambda: require_installed("opacus_ew")),
        ("correlated", lambda: extras.require_extra("mechanism=banded", "correlated")),
    ],
)
def test_a_missing_extra_is_one_line(extra, needs_it, monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    with pytest.raises(ConfigError) as refused:
        needs_it()
    end = f"which is not installed. Install the extra {extra}: pip install 'dpx-lm[{extra}]', in a checkout '.[{extra}]'."
    assert str(refused.value).endswith(end)


@pytest.mark.skipif(extras.is_installed("optuna"), reason="the extra tune is installed")
def test_a_search_without_its_library_names_the_extra():
    with pytest.raises(Exception, match="optuna") as raised:
        recipes.compose(["+experiment=laptop/anil_tune_32k"], with_hydra=True)
    assert str(as_refused(raised.value)).startswith("hydra/sweeper=search: needs optuna, which is not installed. Install the extra tune: ")


def test_nothing_is_imported_to_know_what_is_installed():
    assert extras.is_installed("antigravity") and not extras.is_installed("no_such_module_anywhere")
    assert "antigravity" not in sys.modules
