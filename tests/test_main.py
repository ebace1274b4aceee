"""The real command line, in processes: exit codes, the one line, the private log, and that no jax starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpx import config
from dpx.claim.search_record import opened
from dpx.config import recipes
from dpx.durable import write_durably
from dpx.files.run_folder import RunFolder, Status
from tests.processes import COARSE, Answer, answers, environment

BAD = {
    ("optimizer.bta1=0.1",): "optimizer.bta1: unknown key. Did you mean optimizer.beta1?",
    ("run=nowhere", "job=plan"): "run=nowhere: no such run.",
    ("data=text", "data.source.paths=[missing.txt]", "job=plan"): "missing.txt: no such file.",
    ("job=list", "list.match=nothing"): "list.match=nothing: no recipe has this name.",
    ("job=evaluate",): "run: this job evaluates a run, and no run is named. Add run=<folder>.",
    ("job=account",): "run: this job needs a run to account for, and no run is named. Add run=<folder>, or job.ledgers=[...].",
    ("tune=search",): "tune: a search is a sweep, but this command starts one run. Launch it with -m, or remove the search with ~tune.",
    ("job=list", "hydra.run.dir=/dev/null/runs"): "/dev/null/runs: not a directory.",
    ("job=list", "hydra.job_logging=null"): "hydra.job_logging=null: field 'hydra.job_logging' is not Optional.",
    ("job=list", "hydra.verbose=5"): "hydra.verbose=5: Hydra cannot use this",
    ("-m", "job=list", "hydra.launcher=5"): "hydra.launcher=5: ",
    (
        "-m",
        "job=list",
        "steps=range(0,10000000000)",
    ): "steps=range(0,10000000000): steps has 10,000,000,000 values, and a sweep at most 100,000",
    (NO_EPSILON := ("noise.epsilon=-1",)): "noise.epsilon=-1.0: epsilon must be positive. Give a target above 0.",
}
# Refused when the run has its folder and its data is prepared.
TOO_LARGE = ("batch_schedule.size=9999999", "model=micro", "data=synthetic")
REFUSED_SWEEP = ("-m", "model=micro", "steps=-1,-2")
IN_A_FOLDER = (*NO_EPSILON, "hydra.run.dir=mine")
# One point is refused, and another one has no name, since its config cannot be resolved.
TWO_FAIL = ("-m", "+experiment=anil_2m_batch", "job=plan", COARSE, "noise.epsilon=-1,${none},5.36")
# Plans of points that differ in their noise's randomness alone are equal.
EQUAL_PLANS = ("-m", "+experiment=anil_2m_batch", "job=plan", COARSE, "replicate=0,1")
FINISHED_BEFORE = ("-m", "model=micro", "steps=1,2")
# Both points have finished before, so that only the study at the end is read; its record is not a chain.
CLOSES = (*FINISHED_BEFORE, "tune=search", "hydra/callbacks=search")
# Asked for as Optuna's sweeper asks for it, which is not installed here.
NOTHING_LEFT = (*FINISHED_BEFORE, "tune=search", "tune.trials=1", "hydra/callbacks=search", "hydra.sweeper.max_batch_size=${trials_left:}")
HELD = ("model=micro", "steps=1")
AS_JSON, AS_JSON_BAD, QUIET = (
    ("--json", "job=list", "list.match=anil_2m_*"),
    ("--json", *NO_EPSILON),
    ("job=list", "list.match=anil_2m_*", "--quiet"),
)
# Three recipes on three meshes; the command's model takes the place of an axis of the second one.
_RECIPES = "+experiment=anil_nonprivate_baseline,dpfp_table2_nonprivate,mckenna_fig11_nonprivate"
SEVERAL_RECIPES = ("-m", _RECIPES, "job=plan", "model=base")
# A run's folder whose private tree leads elsewhere: that of the launch, and one that came from somebody else.
LINKED, RECEIVED = ("job=list", "hydra.run.dir=linked"), ("job=explain", "run=received")
# From here on the lines run in one of two processes, as a launcher says.
IN_TWO = "import os; os.environ['SLURM_STEP_NUM_TASKS'] = '2'"
REFUSED_IN_TWO = (
    ("model=micro", "steps=3"),
    ("-m", "model=micro", "steps=3,4"),
    ("-m", "model=micro", "steps=5,6", "tune=search", "hydra/callbacks=search"),
)


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> dict[tuple[str, ...], tuple[Answer, Path]]:
    """By command line what it answered and where; all in one process."""
    lines = [
        *BAD,
        TOO_LARGE,
        REFUSED_SWEEP,
        IN_A_FOLDER,
        TWO_FAIL,
        EQUAL_PLANS,
        FINISHED_BEFORE,
        CLOSES,
        NOTHING_LEFT,
        HELD,
        LINKED,
        RECEIVED,
        SEVERAL_RECIPES,
        AS_JSON,
        AS_JSON_BAD,
        QUIET,
    ]
    lines += [IN_TWO, *REFUSED_IN_TWO]
    folders = [tmp_path_factory.mktemp("main") for _ in lines]
    for steps in (1, 2):
        name = recipes.compose(["model=micro", f"steps={steps}"], with_hydra=True).hydra.sweep.subdir
        for arguments in (FINISHED_BEFORE, CLOSES):
            Status(folders[lines.index(arguments)] / "outputs" / name, "train").write("finished", score=0.25)
    write_durably(folders[lines.index(CLOSES)] / "outputs" / "studies" / "main" / "private" / "trials", "no chain")
    outputs = folders[lines.index(NOTHING_LEFT)] / "outputs"
    with opened(outputs, outputs / "studies" / "main") as record:
        record.begin(outputs / "main-trial", ("steps=1",), None)
    for arguments, name in ((LINKED, "linked"), (RECEIVED, "received")):
        folder = folders[lines.index(arguments)]
        for place in (folder / "victim", folder / name / "release"):
            place.mkdir(parents=True)
        (folder / name / "private").symlink_to(folder / "victim")
        write_durably(folder / name / "release" / "config.yaml", "name: main\n")
    write_durably(folders[lines.index(IN_A_FOLDER)] / "mine" / "notes", "kept")
    held = RunFolder(folders[lines.index(HELD)] / "outputs" / config.run_name(recipes.compose(list(HELD))))
    Status(held.path, "train").write("running", pid=1)
    with held.claimed():
        told = answers(list(zip(folders, lines, strict=True)))
    return dict(zip(lines, zip(told, folders, strict=True), strict=True))


@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: arguments[0])
def test_bad_command_line_is_one_line_and_exit_code_2(answered, arguments: tuple[str, ...]) -> None:
    done, _ = answered[arguments]
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {BAD[arguments]}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_closed_pipe_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for arguments in (["job=plan", "data.declared_size=10000", "noise=multiplier", "accountant=rdp"], ["--cfg", "job"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "dpx", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
        assert done.stderr == "error: standard output: was closed before everything was written. Read all of it, or write it to a file.\n"
        assert done.returncode == 2


def test_a_checkout_whose_dependencies_are_missing_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "dpx"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: hydra: is not installed for") and "pip install -c requirements.lock -e ." in done.stderr


def test_importing_the_command_line_changes_nothing_in_the_process(tmp_path: Path) -> None:
    program = (
        "import os, signal, rich.console as rich; handled = [*signal.valid_signals()]\n"
        "def state(): return [signal.getsignal(one) for one in handled], dict(os.environ), dict(vars(rich.Console))\n"
        "before = state(); import dpx.__main__, dpx.console, dpx.launch.command; assert state() == before"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [*BAD, TOO_LARGE, REFUSED_SWEEP], ids=lambda arguments: arguments[0])
def test_a_refused_command_leaves_no_folder(answered, arguments: tuple[str, ...]) -> None:
    _, folder = answered[arguments]
    # Prepared text is kept: every run on it uses it.
    assert [path for path in folder.rglob("*") if "data" not in path.relative_to(folder).parts and path.name != "outputs"] == []
    assert not (folder / "outputs").exists() or (folder / "outputs" / "data").exists()


def test_a_refused_run_names_the_key_to_set(answered) -> None:
    done, _ = answered[TOO_LARGE]
    assert done.returncode == 2
    assert "error: batch size 9999999: a step draws from" in done.stderr and "Set batch_schedule.size=" in done.stderr


def test_what_existed_before_a_refused_command_stays_and_its_traceback_goes_to_the_private_log_alone(answered) -> None:
    done, folder = answered[IN_A_FOLDER]
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert (folder / "mine" / "notes").read_text() == "kept"
    assert "Traceback" in (folder / "mine" / "private" / "dpx.log").read_text()
    assert not (folder / "mine" / "release").exists()


def test_jobs_that_only_compute_start_no_jax_and_a_plan_takes_no_device(tmp_path: Path) -> None:
    program = (
        "import sys, dpx.job.account, dpx.job.explain, dpx.job.list, dpx.job.plan, dpx.job.report; "
        "import dpx_papers.report.page, dpx_papers.report.collect; "
        "import dpx.__main__ as m; assert 'jax' not in sys.modules; sys.modules['pandas'] = sys.modules['jinja2'] = None; "
        f"sys.argv = ['dpx', '+experiment=anil_2m_batch', '{COARSE}', 'job=plan']; m.main(); "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("outputs/anil_2m_batch-*/release/plan.json"))


@pytest.mark.slow
def test_a_mesh_names_its_simulated_devices_and_their_threads_before_jax_starts(tmp_path: Path) -> None:
    program = (
        "import os; from dpx import config; from dpx.config import recipes; from dpx.processes.mesh import simulate_devices; "
        "mesh = config.build(recipes.compose(['mesh=data_fsdp']))[0].mesh; "
        "simulate_devices(mesh, mesh.simulated_devices); import jax; print(len(jax.devices()), os.environ['PJRT_NPROC'])"
    )
    three = environment(XLA_FLAGS="--xla_force_host_platform_device_count=3")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=three, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "8 32", done.stderr


def test_json_is_one_object_for_each_run(answered) -> None:
    done, _ = answered[AS_JSON]
    (told,) = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, told["job"], told["state"], told["error"]) == (0, "list", "finished", None)
    assert [(one["experiment"], one["points"]) for one in told["answer"]][0] == ("anil_2m_batch", 1)
    assert all(one["meaning"] for one in told["answer"])


def test_json_of_a_refused_run_holds_the_error(answered) -> None:
    done, _ = answered[AS_JSON_BAD]
    told = json.loads(done.stdout)
    assert (done.returncode, told["state"], told["answer"]) == (2, "failed", None)
    assert done.stderr == f"error: {told['error']}\n"


def test_quiet_prints_nothing(answered) -> None:
    done, _ = answered[QUIET]
    assert done == (0, "", "")


def test_a_sweep_goes_on_past_a_failed_point_and_ends_with_a_table(answered) -> None:
    done, folder = answered[TWO_FAIL]
    assert done.returncode == 2
    refused, unnamed = done.stderr.splitlines()
    assert refused == "error: noise.epsilon=-1.0: the target must be positive and finite. Give a target above 0."
    assert unnamed == "error: noise.epsilon: Interpolation key 'none' not found. Correct the interpolation."
    assert " failed " in done.stdout and " finished " in done.stdout
    states = [json.loads(path.read_text())["plan"]["state"] for path in folder.glob("outputs/*/private/status.json")]
    assert states == ["finished"], "a point that was refused leaves no folder"


def test_equal_plans_of_a_sweep_are_printed_once_with_their_points(answered) -> None:
    done, _ = answered[EQUAL_PLANS]
    assert done.returncode == 0 and done.stdout.count("noise multiplier") == 1
    assert "This plan holds for 2 points: replicate=0; replicate=1" in done.stdout


def test_a_finished_point_is_skipped(answered) -> None:
    done, _ = answered[FINISHED_BEFORE]
    assert done.returncode == 0 and done.stdout.count("finished before") == 2
    assert "25.00%" in done.stdout


def test_a_search_that_cannot_be_closed_is_told_by_the_exit_code(answered) -> None:
    done, _ = answered[CLOSES]
    assert done.returncode == 2 and "trials: is not a chain of checksummed lines" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_search_that_has_had_all_its_trials_is_closed_and_draws_none(answered) -> None:
    done, folder = answered[NOTHING_LEFT]
    assert (done.returncode, done.stderr) == (0, "")
    assert "main-trial" in done.stdout and "killed" in done.stdout and "finished before" not in done.stdout
    assert json.loads((folder / "outputs" / "studies" / "main" / "release" / "privacy.json").read_text())["guarantee"] == "none"


def test_what_another_process_trains_is_left_as_it_is(answered) -> None:
    done, folder = answered[HELD]
    assert done.returncode == 2 and "another process is training in this folder" in done.stderr
    (path,) = folder.glob("outputs/*/private/status.json")
    assert json.loads(path.read_text())["train"]["state"] == "running"


@pytest.mark.parametrize("arguments", [LINKED, RECEIVED], ids=lambda arguments: arguments[1])
def test_nothing_is_written_where_a_link_in_a_runs_folder_leads(answered, arguments: tuple[str, ...]) -> None:
    done, folder = answered[arguments]
    assert done.returncode == 2 and "private: is a symbolic link" in done.stderr and len(done.stderr.splitlines()) == 1
    assert list((folder / "victim").iterdir()) == []


def test_several_recipes_are_planned_at_their_own_points_on_any_meshes(answered) -> None:
    done, folder = answered[SEVERAL_RECIPES]
    assert (done.returncode, done.stderr) == (0, "")
    plans = [json.loads(path.read_text()) for path in folder.glob("outputs/*/release/plan.json")]
    names = [path.parts[-3].rpartition("-")[0] for path in folder.glob("outputs/*/release/plan.json")]
    points = {"anil_nonprivate_baseline": 1, "dpfp_table2_nonprivate": 4, "mckenna_fig11_nonprivate": 1}
    assert len(plans) == 6 and {name: names.count(name) for name in names} == points


@pytest.mark.parametrize("arguments", REFUSED_IN_TWO, ids=["run", "sweep", "search"])
def test_one_of_two_processes_trains_nothing_and_writes_nothing(answered, arguments) -> None:
    done, folder = answered[arguments]
    assert done.returncode == 2 and done.stderr.startswith("error: SLURM_STEP_NUM_TASKS=2: SLURM_PROCID does not give")
    assert len(done.stderr.splitlines()) == 1
    # Of a sweep Hydra notes the command.
    assert {path.name for path in folder.rglob("*") if path.is_file()} <= {"multirun.yaml"}
