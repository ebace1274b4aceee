"""A missing extra is named in the same words wherever it is missing."""

import dataclasses
import sys

import pytest

from dpx import packages
from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.data.completions import ChatTemplate
from dpx.data.declared_data import Hub
from dpx.data.labelled import Table
from dpx.data.sources import HubSource, TableSource
from dpx.data.tokenizer import SPECIAL_TOKENS, of_vocabulary
from dpx.declaration import ConfigError
from dpx.job.report import Report
from dpx.pages import pictures
from dpx.pages.analysis_tables import Picture
from dpx_papers.benchmark.job import require_installed

from .processes import answers, head_run


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
        ("papers", lambda: packages.supplied("report_of_papers", "")(Report(paper="anil2021"))),
        ("bench", lambda: require_installed("opacus_ew")),
        ("correlated", lambda: packages.require_extra("mechanism=banded", "correlated")),
    ],
)
def test_a_missing_extra_is_one_line(extra, needs_it, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    with pytest.raises(ConfigError) as refused:
        needs_it()
    end = f"which is not installed. Install the extra {extra}: pip install 'dpx-lm[{extra}]', in a checkout '.[{extra}]'."
    assert str(refused.value).endswith(end)


@pytest.mark.skipif(packages.is_installed("optuna"), reason="the extra tune is installed")
def test_a_search_without_its_library_names_the_extra():
    with pytest.raises(Exception, match="optuna") as raised:
        recipes.compose(["+experiment=laptop/anil_tune_32k"], with_hydra=True)
    assert str(as_refused(raised.value)).startswith("hydra/sweeper=search: needs optuna, which is not installed. Install the extra tune: ")


def test_nothing_is_imported_to_know_what_is_installed():
    assert packages.is_installed("antigravity") and not packages.is_installed("no_such_module_anywhere")
    assert "antigravity" not in sys.modules


def test_core_jobs_run_without_the_libraries_of_pages_and_the_papers_name_their_extra(tmp_path):
    """As in an environment that has none of them: an import of one fails, and none is found. Plans are made so in test_main.py."""
    blocked = (
        "import sys\nfor name in ('pandas', 'jinja2', 'matplotlib'):\n    assert name not in sys.modules\n    sys.modules[name] = None"
    )
    grid = ["+experiment=laptop/mckenna_grid", "hydra.mode=RUN", "data=text", "data.source.paths=x", "job=design"]
    lines = [
        blocked,
        ["job=list", "list.match=anil_2m_batch"],
        [*grid, "design.epsilon=inf", "design.size=800000", "design.compute=1e13"],
        head_run(1),
        ["+experiment=anil_sgd32x_ref"],
        ["job=report", "report.paper=anil2021"],
    ]
    *ran, analysis, page = answers([(tmp_path, line) for line in lines])
    assert [(done.returncode, done.stderr) for done in ran if done.returncode] == []
    end = "needs pandas, which is not installed. Install the extra papers: pip install 'dpx-lm[papers]', in a checkout '.[papers]'."
    assert [analysis.refusal(), page.refusal()] == [f"error: an analysis of a paper: {end}", f"error: report.paper=anil2021: {end}"]
