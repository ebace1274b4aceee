"""A launcher that runs points in other processes ends as one that runs them in this process: table, lines, exit code and study."""

import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hydra.conf import HydraConf, JobConf
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from dpx import console, packages
from dpx.config.command_line import as_refused
from dpx.declaration import ConfigError
from dpx.files.run_folder import Status
from dpx.launch import command, late, side_by_side
from dpx.launch.late import LateSweep
from dpx.launch.refused import NoteFolders
from dpx.launch.side_by_side import Processes
from dpx.launch.sweep import PointFailed, Sweep, Told
from dpx.launch.sweep_tables import Outcome
from dpx.packages import conf_directory
from dpx.processes import interruption
from dpx.processes.interruption import Interrupted
from tests.composed import in_command, point_at
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


def _recorded(launcher: Sweep, number: int, folder: Path) -> None:
    state, score, words, failure = POINTS[number]
    console.answer({"of": number})
    with in_command(OmegaConf.create({"hydra": HydraConf(job=JobConf(num=number))})):
        point = point_at(folder / str(number), "train", f"steps={number}")
        launcher._record(point, state, score, failure and (words, failure))


def test_a_pickled_launcher_tells_what_its_points_came_to(sweep: Path, capsys: Any) -> None:
    here, launcher = Sweep(), Sweep()
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
    launcher = Sweep()
    copy = pickle.loads(pickle.dumps(launcher))
    launcher.gather()
    _recorded(copy, 0, sweep)
    assert not list(sweep.iterdir())


# Point 0 finishes, point 1 is killed, point 2 ends with an error before it tells anything; each is told where to leave its file.
PLAYED = """
import os, pathlib, pickle, signal, sys
number, path, text = pickle.load(sys.stdin.buffer)
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if number == 2:
    sys.exit(3)
# Whole from the start, as dpx's own.
pathlib.Path(path + ".part").write_text(text)
os.replace(path + ".part", path)
if number == 3:
    sys.stdin.buffer.read()
"""


class Played(Processes):
    """Points that a program without dpx plays, since starting dpx takes seconds."""

    def _payload(self, composed: DictConfig) -> bytes:
        number, command = composed.hydra.job.num, self.sweep.elsewhere()
        outcome = Outcome(command.outcomes.parent / f"p{number}", (f"steps={number}",), "finished", 0.5)
        command.tell(number, Told(outcome, None, None, is_trial=False))
        path = command.outcomes / f"{number}.json"
        text = path.read_text()
        path.unlink()
        return pickle.dumps((number, str(path), text))


@pytest.fixture
def played(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    """A launcher of a sweep whose points are `PLAYED`, two at once."""
    monkeypatch.setattr(side_by_side, "_PROGRAM", ("-I", "-S", "-c", PLAYED))
    monkeypatch.setattr(Processes, "sweep", Sweep(), raising=False)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}})

    class Loader:
        def load_sweep_config(self, master: DictConfig, overrides: list[str]) -> DictConfig:
            number = overrides[0].partition("=")[2]
            node = {"sweep": {"dir": str(sweep), "subdir": f"p{number}"}, "job": {}, "overrides": {"task": overrides}}
            return OmegaConf.create({"hydra": node | {"runtime": {"choices": {"job": "train"}}}})

    own, context = Played(n_jobs=2), HydraContext(config_loader=cast(Any, Loader()), callbacks=cast(Any, None))
    own.setup(hydra_context=context, task_function=print, config=config)
    return own


def test_a_point_that_is_killed_is_a_failed_row_and_the_others_go_on(played: Played, sweep: Path, capsys: Any) -> None:
    returned = played.launch([["steps=0"], ["steps=1"], ["steps=2"]], 0)
    assert [one.return_value for one in returned] == [0.5, 0.0, 0.0]
    played.sweep.gather()
    assert [(one.folder.name, one.state, one.error) for one in played.sweep.outcomes] == [
        ("p0", "finished", None),
        ("p1", "failed", "p1: its process ended (SIGKILL)"),
        ("p2", "failed", "p2: its process ended (exit code 3)"),
    ]
    assert [command._answer(error) for error in played.sweep.failures] == [1, 1]
    assert capsys.readouterr().err.splitlines()[0] == (
        "error: p1: its process ended (SIGKILL). The same command resumes it; if memory ran out, let fewer points run at once"
    )
    assert not list(sweep.iterdir())


@pytest.mark.parametrize(("pid", "state"), [(7, "failed"), (8, "running")])
def test_a_killed_point_is_failed_in_the_folder_where_it_ran_and_no_other_process_is(
    played: Played, sweep: Path, pid: int, state: str
) -> None:
    """Under `repeat_and_select` a repeated draw has a folder of its own; and another command may have begun there since."""
    ran = sweep / "p1-again"
    Status(ran, "train").write("running", pid=pid)
    (played.sweep.elsewhere().outcomes / "1.begun").write_text(json.dumps([str(ran), 7]))
    played.launch([["steps=1"]], 1)
    played.sweep.gather()
    assert [(one.folder, one.state) for one in played.sweep.outcomes] == [(ran, "failed")]
    entry = Status(ran, "train").read()
    assert (entry["state"], entry.get("error")) == (state, "p1-again: its process ended (SIGKILL)" if state == "failed" else None)
    assert not played.sweep.elsewhere().outcomes.exists() or not list(played.sweep.elsewhere().outcomes.iterdir())


def test_a_signal_is_handed_to_every_point_and_no_point_is_called_failed(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def interrupted(seconds: float) -> None:
        time_sleep(seconds)
        looked.append(1)
        # Point 3 has told its outcome, and waits.
        if list(played.sweep.elsewhere().outcomes.glob("3.json")):
            raise Interrupted

    time_sleep = side_by_side.time.sleep
    monkeypatch.setattr(side_by_side.time, "sleep", interrupted)
    monkeypatch.setattr(interruption, "received", lambda: signal.SIGTERM)
    with pytest.raises(Interrupted) as stopped:
        # Point 3 waits for its command, and would for ever.
        played.launch([["steps=3"], ["steps=3"]], 3)
    assert stopped.value.how == "the same command resumes the sweep" and looked
    played.sweep.gather()
    assert {one.state for one in played.sweep.outcomes} == {"finished"} and not played.sweep.failures


def test_hydra_makes_the_launcher_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "_sweep", None)
    monkeypatch.setattr(Processes, "sweep", None, raising=False)
    own = LateSweep()
    late.register_launchers(own)
    node = OmegaConf.load(conf_directory() / "hydra" / "launcher" / "processes.yaml")
    made: Any = Plugins.instance()._instantiate(cast(Any, node))
    assert isinstance(made, Processes) and made._most == 2 and Processes.sweep is own.get()


@pytest.mark.parametrize("most", [0, -1])
def test_a_number_of_points_at_once_is_one_or_more(played: Played, most: int) -> None:
    played._most = most
    with pytest.raises(ConfigError, match=f"hydra.launcher.n_jobs={most}: is not"):
        played.launch([["steps=0"]], 0)


def _training(outputs: Path) -> dict[str, int]:
    """The processes of points that train in `outputs`, by folder."""
    found = {}
    for path in outputs.glob("*/private/status.json"):
        entry = json.loads(path.read_text()).get("train", {})
        if entry.get("state") == "running" and (path.parent / "ledger").exists():
            found[path.parent.parent.name] = entry["pid"]
    return found


def _awaited(found: Callable[[], Any]) -> Any:
    for _ in range(2400):
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError("nothing happened for two minutes")


def _require_launcher(name: str) -> None:
    """Skips the test where the launcher's extra is not installed."""
    plugin = {"submitit_local": "hydra_submitit_launcher", "joblib": "hydra_joblib_launcher"}.get(name)
    is_there = plugin is None or packages.is_installed("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{plugin}") is not None
    if not is_there:
        pytest.skip("needs the extra launchers")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["processes", "joblib", "submitit_local"])
def test_killed_points_and_a_killed_command_lose_nothing_else(tmp_path: Path, launcher: str) -> None:
    _require_launcher(launcher)
    at_once = [] if launcher == "submitit_local" else ["hydra.launcher.n_jobs=2"]
    line = [f"hydra/launcher={launcher}", *at_once, *micro_run(60), "seed=1", "noise.noise_multiplier=2,3,4"]

    def started(name: str) -> subprocess.Popen[str]:
        (tmp_path / name).mkdir()
        arguments = [sys.executable, "-m", "dpx", "-m", *line]
        own = environment(COLUMNS="160")
        return subprocess.Popen(arguments, cwd=tmp_path / name, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    one = started("point")
    point = _awaited(lambda: _training(tmp_path / "point/outputs"))
    name, pid = next(iter(point.items()))
    os.kill(pid, signal.SIGKILL)
    shown, told = one.communicate(timeout=500)
    how = "without a result" if launcher == "submitit_local" else "SIGKILL"
    assert one.returncode == 1 and shown.count(" finished ") == 2 and f"error: {name}: its process ended ({how}). " in told, told
    assert "Traceback" not in told and shown.count(" failed ") == 1, told
    entry = json.loads((tmp_path / "point/outputs" / name / "private/status.json").read_text())["train"]
    assert (entry["state"], entry["error"]) == ("failed", f"{name}: its process ended ({how})")
    if launcher == "submitit_local":
        # As with Slurm, jobs do not end with the command.
        again = _again(tmp_path / "point", line)
        assert again.returncode == 0 and again.stdout.count(" finished ") == 3, again.stderr
        return

    whole = started("command")
    points = _awaited(lambda: len(found := _training(tmp_path / "command/outputs")) == 2 and found)
    whole.kill()
    whole.communicate()
    _awaited(lambda: not any(Path(f"/proc/{pid}").exists() for pid in points.values()))
    for name in ("point", "command"):
        again = _again(tmp_path / name, line)
        assert again.returncode == 0 and again.stdout.count(" finished ") == 3, again.stderr


def _again(folder: Path, line: list[str]) -> subprocess.CompletedProcess[str]:
    own = environment(COLUMNS="160")
    return subprocess.run([sys.executable, "-m", "dpx", "-m", *line], cwd=folder, env=own, capture_output=True, text=True)


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
@pytest.mark.parametrize("launcher", ["processes", "joblib", "submitit_local"])
def test_a_sweep_and_its_study_are_the_same_under_a_launcher_of_other_processes(tmp_path: Path, launcher: str) -> None:
    _require_launcher(launcher)
    chosen = [f"hydra/launcher={launcher}"]
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
