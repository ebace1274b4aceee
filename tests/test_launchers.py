"""A launcher that runs points in other processes ends as one that runs them in this process: table, lines, exit code and study."""

import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.conf import HydraConf, JobConf
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from dpx import console, extras
from dpx.config.command_line import as_refused
from dpx.declaration import ConfigError
from dpx.launch import command
from dpx.launch.elsewhere import PointFailed
from dpx.launch.launcher import Launcher
from dpx.launch.refused import NoteFolders
from tests.composed import in_command
from tests.processes import environment, micro_run

# State, score, and the error of a point as text and itself.
POINTS = (
    ("finished", 0.25, "", None),
    ("failed", None, "steps=-1: is negative. Use 1 or more.", ConfigError("steps=-1", "is negative", "Use 1 or more")),
    ("failed", None, "RuntimeError: no memory", RuntimeError("no\nmemory")),
)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sweep that has begun, under `--json`."""
    monkeypatch.setattr(NoteFolders, "existing", frozenset({tmp_path}))
    monkeypatch.setattr(NoteFolders, "listed", frozenset({tmp_path}))
    monkeypatch.setattr(console, "_form", "json")
    return tmp_path


def _recorded(launcher: Launcher, number: int, folder: Path) -> None:
    state, score, words, failure = POINTS[number]
    console.answer({"of": number})
    with in_command(OmegaConf.create({"hydra": HydraConf(job=JobConf(num=number))})):
        launcher._record(folder / str(number), (f"steps={number}",), state, score, failure and (words, failure))


def test_a_pickled_launcher_tells_what_its_points_came_to(sweep: Path, capsys: Any) -> None:
    here, launcher = Launcher(), Launcher()
    copies = [pickle.loads(pickle.dumps(launcher)) for _ in POINTS]
    # A copy may be pickled again, as when Slurm resubmits a job.
    copies[2] = pickle.loads(pickle.dumps(copies[2]))
    assert len(list(sweep.iterdir())) == 1
    for number in (2, 0, 1):
        _recorded(copies[number], number, sweep)
    assert capsys.readouterr().out == ""
    launcher.gather()
    launcher.gather()
    elsewhere = capsys.readouterr().out
    for number in range(len(POINTS)):
        _recorded(here, number, sweep)
    assert elsewhere == capsys.readouterr().out and json.loads(elsewhere.splitlines()[2])["answer"] == {"of": 2}
    assert launcher.outcomes == here.outcomes and launcher.is_sweep and not launcher.is_search
    assert [type(error) for error in launcher.failures] == [ConfigError, PointFailed]
    assert [command._answer(error) for error in here.failures] == [command._answer(error) for error in launcher.failures] == [2, 1]
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == told[2:] and told[1].startswith("error: RuntimeError: no memory. ")
    assert not list(sweep.iterdir())


def test_a_point_that_outlives_its_command_leaves_no_file(sweep: Path) -> None:
    launcher = Launcher()
    copy = pickle.loads(pickle.dumps(launcher))
    launcher.gather()
    _recorded(copy, 0, sweep)
    assert not list(sweep.iterdir())


def test_a_launcher_that_is_missing_names_its_extra() -> None:
    refused = as_refused(MissingConfigException("", "hydra/launcher/joblib"))
    assert str(refused).startswith(
        "hydra/launcher=joblib: needs hydra-joblib-launcher, which is not installed. Install the extra launchers: "
    )


def _swept(folder: Path, *arguments: str) -> tuple[int, list[str], list[str]]:
    """Exit code, and the lines of the closing table and of the errors."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "dpx", "-m", *arguments],
        cwd=folder,
        env=environment(COLUMNS="160"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    table = done.stdout.partition("points of the sweep")[2].splitlines()
    return done.returncode, table, [line for line in done.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_sweep_and_its_study_are_the_same_under_a_launcher_of_other_processes(tmp_path: Path, launcher: str) -> None:
    plugin = f"hydra_{launcher.partition('_')[0]}_launcher"
    if not extras.is_installed("hydra_plugins") or importlib.util.find_spec(f"hydra_plugins.{plugin}") is None:
        pytest.skip("needs the extra launchers")
    chosen = ["hydra/launcher=processes"] if launcher == "joblib" else [f"hydra/launcher={launcher}"]
    search = ["tune=search", "tune.trials=3", "hydra/sweeper=basic", "hydra/callbacks=search"]
    line = [*micro_run(1), "seed=1", *search, "lr_schedule.learning_rate=0.01,-1,0.02"]
    alone, apart = _swept(tmp_path / "alone", *line), _swept(tmp_path / "apart", *chosen, *line)
    # Trials that run side by side begin in either order.
    assert [*map(sorted, apart[1:])] == [*map(sorted, alone[1:])] and apart[0] == alone[0] == 2 and len(alone[2]) == 1
    assert sum(" finished " in line for line in alone[1]) == 2
    kept = [sorted(path.name for path in (tmp_path / name / "outputs").iterdir()) for name in ("alone", "apart")]
    assert kept[0] == [name for name in kept[1] if name != ".submitit"]
    statements = [(tmp_path / name / "outputs/studies/main/release/privacy.json").read_text() for name in ("alone", "apart")]
    assert len({json.dumps({key: json.loads(text)[key] for key in ("guarantee", "reasons", "trials")}) for text in statements}) == 1
