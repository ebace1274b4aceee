"""The package: what importing it loads, and the wheel and the source distribution as somebody else gets them."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.processes import CHECKOUT, environment, micro_run

# Tracked files that no test and no build reads.
LEFT_OUT = {".gitignore", ".pre-commit-config.yaml", "outputs/.gitkeep"}


def test_importing_dpx_loads_no_large_library() -> None:
    program = "import sys, dpx; print([name for name in ('jax', 'scipy', 'dp_accounting', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(PYTHONPATH=""), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder of a wheel and a source distribution of the last commit, made by the build backend in a separate environment."""
    root = tmp_path_factory.mktemp("built")
    _run("git", "clone", "-q", "--depth=1", f"file://{CHECKOUT}", str(root / "dpx"), cwd=root)
    _run(sys.executable, "-m", "venv", str(root / "backend"), cwd=root)
    python = str(root / "backend" / "bin" / "python")
    _run(python, "-m", "pip", "install", "-q", "hatchling>=1.27", cwd=root)
    made = "import hatchling.build as backend; backend.build_wheel('..'); backend.build_sdist('..')"
    _run(python, "-c", made, cwd=root / "dpx")
    return root


@pytest.mark.slow
def test_the_wheel_is_small_and_trains_from_another_folder(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.stat().st_size < 1.5e6
    _run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env"), cwd=tmp_path)
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    # A path named so is searched, and the files in it that name other paths, such as this checkout's, are not read.
    (site / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = str(tmp_path / "env" / "bin" / "python")
    assert str(site) in _run(python, "-c", "import dpx; print(dpx.__file__)", cwd=tmp_path)
    assert "epsilon (rdp)" in _run(python, "-m", "dpx", *micro_run(2), cwd=tmp_path)
    assert str(site / "dpx" / "docs") in _run(python, "-m", "dpx", "--help", cwd=tmp_path)
    explained = _run(python, "-m", "dpx", "+experiment=anil_nonprivate_baseline", "job=explain", cwd=tmp_path)
    assert "How the recipe reads its paper:" in explained and "warm-up: the paper says 7.5K steps" in explained


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_plans_and_trains_in_an_empty_environment(version: str, built: Path, tmp_path: Path) -> None:
    interpreter = shutil.which(f"python{version}")
    if interpreter is None:
        pytest.skip(f"python{version} is not on the path")
    (wheel,) = built.glob("*.whl")
    _run(interpreter, "-m", "venv", str(tmp_path / "env"), cwd=tmp_path)
    python = str(tmp_path / "env" / "bin" / "python")
    _run(python, "-m", "pip", "install", "-q", "-c", str(CHECKOUT / "requirements.lock"), str(wheel), cwd=tmp_path)
    assert "epsilon" in _run(python, "-m", "dpx", "+experiment=anil_2m_batch", "job=plan", cwd=tmp_path)
    assert "epsilon (rdp)" in _run(python, "-m", "dpx", *micro_run(10), cwd=tmp_path)
    assert "No broken requirements" in _run(python, "-m", "pip", "check", cwd=tmp_path)


@pytest.mark.slow
def test_the_source_distribution_holds_what_the_tests_read(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    tracked = set(_run("git", "ls-files", cwd=built / "dpx").splitlines())
    assert tracked - held - LEFT_OUT == set()
