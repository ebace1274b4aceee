"""The package of the papers is found like a stranger's, and is dpx's own by the metadata of its distribution, not by its name."""

import importlib
import json
import sys
from pathlib import Path

import pytest

import dpx
from dpx import config, packages
from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.report import Report
from dpx.job.train import Train
from dpx.statement import outside_code
from tests.outside.made_up import as_if_unimported, on_path, package, record

PAPERS = "dpx_papers"
ELSEWHERE = "import dpx.job.train\nfrom dpx.declaration import declaration\n\n\n@declaration\nclass Train(dpx.job.train.Train):\n    pass\n"


@pytest.fixture
def without_papers(monkeypatch):
    """An installation whose distribution lists no package."""
    monkeypatch.setattr(packages.metadata, "entry_points", lambda group: [])
    packages._listed.cache_clear()
    yield
    packages._listed.cache_clear()


def test_it_is_listed_by_the_entry_point_and_counts_as_dpxs_own():
    found = packages.named(PAPERS)
    assert found is not None and found.is_own and not found.set_aside
    assert {"analysis/anil_accounting", "job/benchmark"} <= set(found.options)
    assert found not in packages.outside() and PAPERS not in packages.described()
    experiment, job = config.build(recipes.compose(["job=benchmark"]))
    assert type(job).__module__.startswith(f"{PAPERS}.") and PAPERS in sys.modules
    assert outside_code.packages_of(experiment, job) == () and outside_code.imported() == ()


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_strangers_package_of_that_name_is_the_strangers(tmp_path, is_listed):
    package(tmp_path, PAPERS, {"job.py": ELSEWHERE})
    if not is_listed:
        (tmp_path / f"{PAPERS}-0.1.dist-info").rename(tmp_path / "gone")
    experiment = config.build(recipes.compose([]))[0]
    with as_if_unimported(PAPERS), on_path(tmp_path):
        assert not packages.is_of_dpx(PAPERS)
        job = importlib.import_module(f"{PAPERS}.job").Train()
        assert outside_code.packages_of(experiment) == outside_code.packages_of(experiment, job) == (PAPERS,)
        assert outside_code.guarantee(True, [], outside_code.packages_of(experiment, Train())) == f"dp_by_{PAPERS}"
    assert packages.is_of_dpx(PAPERS)


def test_a_module_that_took_its_place_in_this_process_is_not_it(tmp_path):
    package(tmp_path, PAPERS, {})
    with as_if_unimported(PAPERS):
        with on_path(tmp_path):
            stranger = importlib.import_module(PAPERS)
        sys.modules[PAPERS] = stranger
        assert outside_code.imported() == (PAPERS,)


@pytest.mark.parametrize(
    ("record", "origin"),
    [
        ("dpx/__init__.py,,\ndpx_papers/__init__.py,,\n", None),
        ("", {"url": "file:///elsewhere", "dir_info": {"editable": True}}),
        ("", {"url": Path(dpx.__file__).parents[1].as_uri(), "dir_info": {}}),
        ("", {"url": Path(dpx.__file__).parents[1].as_uri(), "dir_info": {"editable": True}}),
    ],
    ids=["a record of another dpx", "another checkout", "an archive", "this checkout, and a folder outside it"],
)
def test_a_distribution_that_did_not_install_this_dpx_has_no_package_of_dpx(tmp_path, record, origin):
    package(tmp_path, "dpx_reed", {})
    info = tmp_path / "dpx_reed-0.1.dist-info"
    (info / "RECORD").write_text(record.replace("dpx_papers", "dpx_reed"))
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))
    with on_path(tmp_path):
        assert [one.name for one in packages.outside()] == ["dpx_reed"] and not packages.is_of_dpx("dpx_reed")


def test_another_distribution_that_lists_the_name_alone_takes_nothing_away(tmp_path):
    record(tmp_path, PAPERS, "0.0")
    with on_path(tmp_path):
        assert [one.distribution for one in packages.outside() if "both provide dpx_papers" in one.set_aside] == ["dpx-papers"]
        found = packages.named(PAPERS)
        assert found is not None and found.is_own and packages.is_of_dpx(PAPERS)
        assert type(config.build(recipes.compose(["job=analyse", "analysis=anil_accounting"]))[1].analysis).__module__.startswith(PAPERS)


def test_its_options_are_dpxs_and_nobody_elses(tmp_path):
    package(tmp_path, "dpx_reed", {"conf/analysis/anil_accounting.yaml": "_target_: dpx_reed.Reed", "conf/clip/reed.yaml": "a: 1"})
    with on_path(tmp_path):
        assert type(config.build(recipes.compose(["job=analyse", "analysis=anil_accounting"]))[1].analysis).__module__.startswith(PAPERS)
        assert [bool(one.set_aside) for one in packages.listed() if one.name in (PAPERS, "dpx_reed")] == [False, True]


@pytest.mark.parametrize("asked", [["job=benchmark"], ["job=analyse", "analysis=anil_accounting"], ["+experiment=anil_accounting"]])
def test_what_it_adds_is_refused_without_it_in_one_line_that_names_the_extra(without_papers, asked):
    config.build(recipes.compose([]))
    with pytest.raises(Exception) as raised:
        config.build(recipes.compose(asked))
    assert "pip install 'dpx-lm[papers]'" in str(as_refused(raised.value))


def test_what_core_jobs_show_of_a_paper_is_refused_without_it(without_papers, tmp_path):
    experiment = config.build(recipes.compose([]))[0]
    with pytest.raises(ConfigError, match=r"report.paper=anil2021: needs the package of the papers.*dpx-lm\[papers\]"):
        Report(paper="anil2021")(experiment, RunFolder(tmp_path))
    job = config.build(recipes.compose(["job=design", "design.published=true", "design.size=100000", "design.epsilon=4"]))[1]
    with pytest.raises(ConfigError, match=r"design.published=true: needs the package of the papers"):
        job(experiment, RunFolder(tmp_path))
