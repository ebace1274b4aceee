"""What an installed package adds, what it may not, and that dpx's own jobs go on whatever it does."""

import subprocess
import sys

import hydra
import pytest
from omegaconf import OmegaConf

from dpx import config, packages
from dpx.config import recipes
from dpx.config.command_line import as_refused
from dpx.config.hydra_version import VERSION_BASE
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.report import Analyse
from dpx_papers.report import paper
from tests.outside.made_up import POND, on_path, package, pond, record
from tests.processes import environment

OPTIONS = {
    *(
        "analysis/ripples",
        "callbacks/heron",
        "clip/smooth",
        "data/pebbles",
        "experiment/pond",
        "job/census",
        "mechanism/echo",
        "mechanism/mute",
    ),
    *("model/brook", "sampler/coins", "task/every_other"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return pond(tmp_path_factory.mktemp("site"))


PAPER = POND.parent / "experiments" / "pond"


def refusal(*overrides: str) -> str:
    """What composing and building these answers, in its one line."""
    with pytest.raises(Exception) as raised:
        config.build(recipes.compose(list(overrides)))
    refused = as_refused(raised.value)
    assert refused is not None, raised.value
    return str(refused)


def test_a_package_is_found_without_being_imported(site):
    with on_path(site):
        found = packages.named("dpx_pond")
        assert found is not None and (str(found), found.set_aside, set(found.options)) == ("dpx_pond 0.3.1", "", OPTIONS)
        assert "dpx_pond" not in sys.modules
        assert "pond" in recipes.names() and "mechanism=echo" in packages.described()
    assert packages.outside() == () and packages.described() == "" and "pond" not in recipes.names()


def test_its_options_compose_and_only_for_dpx(site, tmp_path):
    (tmp_path / "config.yaml").write_text("mechanism: none\n")
    with on_path(site):
        experiment, _ = config.build(recipes.compose(["+experiment=pond"]))
        assert (experiment.mechanism.name, experiment.clip.kind, experiment.model.name) == ("echo", "smooth", "brook")
        with hydra.initialize_config_dir(str(tmp_path), **VERSION_BASE):
            from hydra.core.global_hydra import GlobalHydra

            places = [part.path for part in GlobalHydra.instance().config_loader().get_search_path().get_path()]
    assert not any("dpx_pond" in str(place) for place in places)


@pytest.mark.slow
def test_help_and_list_name_its_options(site, tmp_path):
    environ = environment(PYTHONPATH=f"{environment()['PYTHONPATH']}:{site}", COLUMNS="200")
    driver = (
        "import sys; from dpx.__main__ import main\n"
        "sys.argv = ['dpx', 'job=list', 'list.match=pond']; main()\n"
        "sys.argv = ['dpx', '--help']; main()"
    )
    done = subprocess.run([sys.executable, "-c", driver], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed, _, helped = done.stdout.partition("dpx trains")
    assert "pond" in listed and "0.3.1" in listed and "sampler=coins" in listed
    assert "dpx_pond 0.3.1: " in helped and "every_other" in helped.partition("\ntask:")[2].partition("\n\n")[0]


def test_a_target_of_an_unlisted_package_is_refused_before_it_is_imported(tmp_path):
    package(tmp_path, "dpx_reed", {"clip.py": f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'touched').touch()"})
    with on_path(tmp_path):
        assert "dpx_reed 0.1 cannot be loaded" in refusal("clip._target_=dpx_reed.clip.Reed")
        assert (tmp_path / "touched").is_file()
    (tmp_path / "touched").unlink()
    (tmp_path / "dpx_reed-0.1.dist-info").rename(tmp_path / "elsewhere")
    with on_path(tmp_path):
        assert "dpx_reed is not an installed package for dpx" in refusal("clip._target_=dpx_reed.clip.Reed")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("dpx_pond.job.census", "not a declaration"),
        ("dpx_pond.mechanism.GaussianDpEvent", "not a declaration"),
        ("dpx_pond.job.RunFolder", "not a declaration"),
        ("dpx_pond.clip.Missing", "dpx_pond 0.3.1 cannot be loaded"),
        ("subprocess.Popen", "subprocess is not an installed package for dpx"),
        ("dpx_pond..clip.Smooth", "is not a name of a declaration"),
    ],
)
def test_a_target_that_is_no_declaration_of_a_package_is_refused(site, target, reason):
    with on_path(site):
        assert reason in refusal(f"clip._target_={target}")


def test_a_run_of_a_package_that_is_gone_is_refused_by_name(site, tmp_path):
    with on_path(site):
        plain = config.resolved(recipes.compose(["+experiment=pond"]))
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    with pytest.raises(ConfigError, match="dpx_pond is not an installed package for dpx"):
        config.build(config.load(str(tmp_path))[0])


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(3)"])
def test_a_package_that_breaks_stops_nothing_but_its_own_use(tmp_path, body):
    package(tmp_path, "dpx_reed", {"__init__.py": body, "conf/clip/reed.yaml": "_target_: dpx_reed.clip.Reed"})
    with on_path(tmp_path):
        config.build(recipes.compose([]))
        assert "dpx_reed 0.1 cannot be loaded" in refusal("clip=reed")


def test_a_package_whose_declaration_breaks_is_named(tmp_path):
    body = "from dpx.declaration import declaration\n@declaration\nclass Reed:\n    def __post_init__(self): 1 / 0\n"
    package(tmp_path, "dpx_reed", {"clip.py": body, "conf/clip/reed.yaml": "_target_: dpx_reed.clip.Reed"})
    with on_path(tmp_path):
        assert "dpx_reed 0.1 cannot make" in refusal("clip=reed")


def test_two_packages_with_one_option_are_set_aside_and_both_named(site, tmp_path):
    package(tmp_path, "dpx_reed", {"conf/mechanism/echo.yaml": "a: 1", "conf/clip/reed.yaml": "_target_: dpx_reed.clip.Reed"})
    with on_path(site), on_path(tmp_path):
        config.build(recipes.compose([]))
        for override in ("mechanism=echo", "clip=reed", "clip=smooth", "clip._target_=dpx_pond.clip.Smooth"):
            line = refusal(override)
            assert "mechanism=echo is an option of" in line and "dpx_pond" in line and "dpx_reed" in line
        assert all(one.is_own for one in packages.usable())


def test_an_option_of_dpx_is_nobody_elses(tmp_path):
    package(tmp_path, "dpx_reed", {"conf/mechanism/dp_sgd.yaml": "_target_: dpx_reed.Reed", "conf/clip/reed.yaml": "a: 1"})
    with on_path(tmp_path):
        experiment, _ = config.build(recipes.compose([]))
        assert type(experiment.mechanism).__module__ == "dpx.mechanism.dp_sgd"
        assert "mechanism=dp_sgd is an option of dpx_reed and of dpx" in refusal("clip=reed")


@pytest.mark.parametrize("entry", ["dpx", "os", "dpx_reed.inner", "dpx_gone"])
def test_an_entry_point_names_a_package_of_its_own(tmp_path, entry):
    record(tmp_path, "dpx_reed", "0.1", entry)
    with on_path(tmp_path):
        (found,) = packages.outside()
        assert "its entry point names" in found.set_aside and all(one.is_own for one in packages.usable())


def test_a_project_folder_that_hides_an_installed_package_is_named(tmp_path):
    """As for who starts dpx beside the project: Python finds the folder of the project first, which is not a package."""
    record(tmp_path, "dpx_reed", "0.1", "dpx_reed")
    (tmp_path / "dpx_reed").mkdir()
    with on_path(tmp_path):
        assert f"the folder {tmp_path}/dpx_reed without an __init__.py is found first; start from another folder" in refusal("clip=reed")


def test_its_job_analysis_and_paper_are_declared_by_yaml(site, tmp_path):
    with on_path(site):
        experiment, job = config.build(recipes.compose(["+experiment=pond", "job=census", "job.title=parts"]))
        job(experiment, RunFolder(tmp_path))
        assert "dpx_pond.mechanism.Echo" in (tmp_path / "release" / "census.json").read_text()
        experiment, job = config.build(recipes.compose(["analysis=ripples", "job=analyse"]))
        assert isinstance(job, Analyse)
        job(experiment, RunFolder(tmp_path))
        assert "ripples" in (tmp_path / "release" / "analysis.json").read_text()
        assert paper.read(PAPER).title == "The pond"
    with pytest.raises(ConfigError, match="dpx_pond is not an installed package for dpx"):
        paper.read(PAPER)
