"""Compiled programs are kept in a folder of the user alone, and a run of programs that were kept has the same bits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from dpx.training.opening import keep_compiled_programs
from tests.processes import environment, micro_run

# Its attributes are made when jax is imported.
CONFIG: Any = jax.config
OF_THE_USER = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch):
    """jax as the user has it who set nothing; these tests keep no program (`tests.conftest`)."""
    before = CONFIG.jax_compilation_cache_dir
    for name in OF_THE_USER:
        monkeypatch.delenv(name)
    CONFIG.update("jax_compilation_cache_dir", None)
    yield
    CONFIG.update("jax_compilation_cache_dir", before)


def test_programs_are_kept_in_a_folder_of_the_user_alone(unset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPX_CACHE", str(tmp_path / "cache"))
    keep_compiled_programs()
    (own,) = (tmp_path / "cache" / "compiled").iterdir()
    assert CONFIG.jax_compilation_cache_dir == str(own) and own.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", OF_THE_USER)
def test_a_setting_of_the_user_wins(unset, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(name, "false")
    keep_compiled_programs()
    assert CONFIG.jax_compilation_cache_dir is None and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_no_fault_of_the_run(unset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPX_CACHE", "/proc/nowhere")
    keep_compiled_programs()
    assert CONFIG.jax_compilation_cache_dir is None


@pytest.mark.slow
def test_a_run_of_programs_that_were_kept_has_the_same_bits(tmp_path: Path) -> None:
    given = environment(DPX_CACHE=str(tmp_path / "cache"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.05")
    given = {name: value for name, value in given.items() if name not in OF_THE_USER}
    sums, kept = [], []
    for name in ("first", "second"):
        command = [sys.executable, "-m", "dpx", *micro_run(2), "seed=1", f"hydra.run.dir={name}"]
        subprocess.run(command, cwd=tmp_path, env=given, check=True, capture_output=True, timeout=500)
        entries = [json.loads(line.partition(" ")[2]) for line in (tmp_path / name / "private" / "ledger").read_text().splitlines()[1:]]
        sums.append([entry["sum"] for entry in entries if entry["kind"] == "sum"])
        # The two programs of a step; smaller ones are kept or not, as long as they took to compile.
        kept.append([sorted((tmp_path / "cache" / "compiled").glob(f"*/jit_{program}-*-cache")) for program in ("accumulate", "finish")])
    assert len(sums[0]) == 2 and sums[0] == sums[1] and kept[0] == kept[1] and [*map(len, kept[0])] == [1, 1]
