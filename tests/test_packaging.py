"""The promises of the repository as a product: the lock, the two commands, and that CI runs the second."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from dpx import packages

CHECKOUT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
LOCK = (CHECKOUT / "requirements.lock").read_text()


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=~! ;]", requirement, maxsplit=1)[0].lower().replace("_", "-").replace(".", "-")


def _commands() -> list[str]:
    return [line for line in (CHECKOUT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]


def test_the_name_of_the_distribution_is_in_one_place_of_the_code() -> None:
    assert PROJECT["name"] == packages.DISTRIBUTION
    named = [path.name for path in (CHECKOUT / "dpx").rglob("*.py") if packages.DISTRIBUTION in path.read_text()]
    assert named == ["packages.py"]


def test_lock_pins_every_declared_requirement() -> None:
    pinned = {_name(line) for line in LOCK.splitlines()}
    declared = PROJECT["dependencies"] + [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    assert {_name(requirement) for requirement in declared} <= pinned


def test_lock_holds_exact_versions_and_no_address() -> None:
    assert all(re.match(r"[\w.-]+==[\w.]+( ;|$)", line) for line in LOCK.splitlines())
    assert "://" not in LOCK and "--" not in LOCK


def test_the_command_of_the_lock_is_stated() -> None:
    (command,) = [line for line in (CHECKOUT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("uv pip compile")]
    assert {"--universal", "--all-extras", "--no-emit-index-url", "-o", "requirements.lock"} <= set(command.split())


def test_extras_and_script_are_there() -> None:
    extras = {"cuda", "tpu", "hub", "chat", "tune", "launchers", "plots", "papers", "bench", "parity", "correlated", "docs", "dev"}
    extras |= {"wandb", "mlflow"}
    assert PROJECT["optional-dependencies"].keys() == extras
    assert PROJECT["scripts"] == {"dpx": "dpx.__main__:main", "dpx-launch": "dpx.processes.launch:main"}


def test_readme_has_two_commands_of_one_line() -> None:
    first, second = _commands()
    assert first.endswith("-m dpx") and second.endswith("-m pytest")
    assert all("-c requirements.lock" in command for command in (first, second))


def test_ci_runs_the_second_command(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((CHECKOUT / ".ci" / "run").read_text())
    (tmp_path / "README.md").write_text("true && echo requirements.lock -m pytest\n")
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True, env=os.environ | {"CI": "true"})
    assert done.stdout.splitlines()[-1] == "requirements.lock -m pytest"
    assert os.access(CHECKOUT / ".ci" / "run", os.X_OK)


def test_the_workflow_runs_every_python_with_the_lock_and_the_newest() -> None:
    jobs = yaml.safe_load((CHECKOUT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    for name in ("locked", "newest"):
        assert jobs[name]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == ">=3.11"
    locked, newest, checks = ([step.get("run", "") for step in jobs[name]["steps"]] for name in ("locked", "newest", "checks"))
    assert ".ci/run" in locked and "requirements.lock" not in newest[-1] and "'.[dev]' && .venv/bin/python -m pytest" in newest[-1]
    slow = {Path(word) for line in checks for word in line.split() if word.startswith("tests/")}
    assert len(slow) == 2 and all((CHECKOUT / path).is_file() for path in slow)
    (command,) = [step["run"] for step in jobs["nightly"]["steps"] if "pytest" in step.get("run", "")]
    assert "-m '${{ matrix.part }}'" in command and jobs["nightly"]["strategy"]["matrix"]["part"] == ["slow", "parity", "soak"]
