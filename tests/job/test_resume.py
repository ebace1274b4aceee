"""Going on needs a run; it takes that run's config and no other."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpx import config, packages
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.train import Resume, Train
from dpx.launch.point import _of_finished_run
from tests.composed import point_at


def _run(folder: Path, *overrides: str) -> Path:
    (folder / "release").mkdir(parents=True)
    cfg = OmegaConf.create(config.resolved(recipes.compose(list(overrides))))
    (folder / "release" / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    return folder


def test_nothing_to_go_on_with(tmp_path: Path) -> None:
    experiment, job = config.build(recipes.compose(["job=resume"]))
    with pytest.raises(ConfigError, match="no run is named"):
        job(experiment, RunFolder(tmp_path))


def test_goes_on_in_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Train, "__call__", lambda self, experiment, folder: seen.append((experiment.steps, folder.path)))
    folder = _run(tmp_path / "a", "steps=7")
    cfg, path = _of_finished_run(recipes.compose([f"run={folder}", "job=resume"]), [f"run={folder}", "job=resume"])
    experiment, job = config.build(cfg)
    assert isinstance(job, Resume)
    job(experiment, RunFolder(path))
    assert seen == [(7, folder)]


def test_a_run_is_found_by_its_name_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(Path("outputs/main-1234"))
    assert config.load("main")[1] == config.load("main-1234")[1] == Path("outputs/main-1234")
    _run(Path("outputs/main-5678"))
    with pytest.raises(ConfigError, match="2 runs have this name"):
        config.load("main")
    with pytest.raises(ConfigError, match="no such run. Name a run folder, such as main-1234"):
        config.load("main-1235")


@pytest.mark.parametrize("name", ["nowhere", "/nowhere", "**", "123", "['a']"])
def test_what_names_no_run_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such run"):
        _of_finished_run(recipes.compose([f"run={name}"]), [f"run={name}"])


def test_the_folder_of_a_chain_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/two-1234/release").mkdir(parents=True)
    (tmp_path / "outputs/two-1234/release/chain.json").write_text("{}")
    for name in ("two-1234", "outputs/two-1234"):
        with pytest.raises(
            ConfigError, match="is the folder of a chain and not of one run. Name the folder of one of its stages, or add job=explain"
        ):
            config.load(name)


def test_a_config_that_is_a_list_is_none(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "config.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="config.yaml: is not a config of a run"):
        config.load(str(tmp_path))


def test_a_service_of_the_command_that_resumes_is_checked_as_that_of_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (f"run={_run(tmp_path / 'a')}", "job=resume", "logger=mlflow")
    monkeypatch.setattr(packages, "require_extra", lambda value, extra: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = point_at(tmp_path, "resume", *asked, cfg=_of_finished_run(recipes.compose(list(asked)), list(asked))[0])
    with pytest.raises(ConfigError, match="^logger.mlflow.tracking_uri=null: names no server"):
        made.built()


@pytest.mark.parametrize("job", ["plan", "benchmark", "design", "report", "list"])
def test_a_job_with_values_of_its_own_looks_at_a_run(tmp_path: Path, job: str) -> None:
    asked = [f"run={_run(tmp_path / 'a', 'steps=7')}", f"job={job}"]
    experiment, made = config.build(_of_finished_run(recipes.compose(asked), asked)[0])
    assert experiment.steps == 7 and type(made).__name__.lower() == job


def test_a_value_of_the_job_beside_a_run_is_read(tmp_path: Path) -> None:
    asked = [f"run={_run(tmp_path / 'a')}", "job=plan", "plan.compile=true"]
    assert config.build(_of_finished_run(recipes.compose(asked), asked)[0])[1].compile  # type: ignore[attr-defined]


def test_what_may_differ_beside_a_run_does(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a")
    own = _of_finished_run(recipes.compose([f"run={folder}"]), [])[0]
    asked = [f"run={folder}", "job=evaluate", "schedule.evaluation_rows=7", "microbatch=4", "mesh.data=2"]
    cfg, _ = _of_finished_run(recipes.compose(asked), asked)
    assert (cfg.schedule.evaluation_rows, cfg.microbatch, cfg.mesh.data) == (7, 4, 2)
    assert own.schedule.evaluation_rows != 7 and own.microbatch != 4 and own.mesh.data != 2
    assert cfg.schedule.evaluate_every == own.schedule.evaluate_every and cfg.mesh.name == own.mesh.name


def test_no_other_config_beside_a_run(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a")
    with pytest.raises(ConfigError, match="model=micro: the run .* has its own config"):
        _of_finished_run(recipes.compose([f"run={folder}", "model=micro"]), [f"run={folder}", "model=micro"])
