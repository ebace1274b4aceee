"""The pond and dpx, each built into a wheel and installed into a separate environment; only dpx's build backend
is downloaded."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
POND = Path(__file__).parent / "dpx_pond"
QUICK = ("+experiment=pond", "schedule.evaluation_rows=32")


def run(*command: str, cwd: Path, **more: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"} | more
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of a fresh environment: the wheels of the pond and of dpx, and what dpx depends on from where the tests run."""
    root = tmp_path_factory.mktemp("fresh")
    wheels = root / "wheels"
    run("git", "clone", "-q", "--depth=1", f"file://{CHECKOUT}", str(root / "dpx"), cwd=root)
    run("cp", "-r", str(POND), str(root / "dpx_pond"), cwd=root)
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels))
    run(*build, str(root / "dpx"), cwd=root)
    run(*build, "--no-index", "--no-build-isolation", str(root / "dpx_pond"), cwd=root)
    run(sys.executable, "-m", "venv", "--without-pip", str(root / "env"), cwd=root)
    site = next((root / "env").glob("lib/python*/site-packages"))
    install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site))
    run(*install, *map(str, wheels.glob("*.whl")), cwd=root)
    # A path named so is searched, and the files in it that name other paths, such as this checkout's, are not read.
    (site / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return root / "env" / "bin" / "python"


@pytest.mark.slow
def test_it_is_listed_planned_trained_and_read_again(python, tmp_path):
    assert str(CHECKOUT) not in run(str(python), "-c", "import dpx; print(dpx.__file__)", cwd=tmp_path)
    listed = run(str(python), "-m", "dpx", "job=list", "list.match=pond", cwd=tmp_path)
    assert "0.3.1" in listed and "mechanism=echo" in listed
    run(str(python), "-m", "dpx", *QUICK, "job=plan", cwd=tmp_path)
    (planned,) = tmp_path.glob("outputs/pond-*/release/plan.json")
    assert json.loads(planned.read_text())["guarantee"] == "dp_by_dpx_pond"
    assert "dp_by_dpx_pond" in run(str(python), "-m", "dpx", *QUICK, cwd=tmp_path)
    (folder,) = tmp_path.glob("outputs/pond-*")
    said = json.loads((folder / "release" / "privacy.json").read_text())
    assert said["guarantee"] == "dp_by_dpx_pond" and said["epsilon"] == {} and said["unsupported"][0]["value"] > 0
    assert "nothing was done" in run(
        str(python), "-c", f"import sys, dpx.__main__ as m; sys.stderr = sys.stdout; sys.argv = ['dpx', *{QUICK!r}]; m.main()", cwd=tmp_path
    )
    assert "guarantee: dp_by_dpx_pond" in run(str(python), "-m", "dpx", "job=evaluate", f"run={folder}", cwd=tmp_path)
    assert "NO BOUND" in run(str(python), "-m", "dpx", "job=account", "job.accountant=rdp", f"run={folder}", cwd=tmp_path)
    assert "dpx_pond" in run(str(python), "-m", "dpx", "job=explain", f"run={folder}", cwd=tmp_path)
    run(str(python), "-m", "dpx", "+experiment=pond", "job=census", cwd=tmp_path)
    run(str(python), "-m", "dpx", "analysis=ripples", "job=analyse", cwd=tmp_path)


@pytest.mark.slow
def test_it_runs_from_a_sweep_of_several_processes_worth(python, tmp_path):
    """Points of a sweep are built by Hydra's launcher from the same search path."""
    said = run(str(python), "-m", "dpx", "-m", "+experiment=pond", "job=plan", "clip=smooth,flat", cwd=tmp_path)
    assert said.count("finished") >= 2
