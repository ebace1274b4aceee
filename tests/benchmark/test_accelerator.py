"""`experiments/benchmarks/accelerator.sh`, at its small sizes on a CPU: every file it promises, and a run that survives a stop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dpx_papers.benchmark import tables
from tests.processes import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_one_command_leaves_every_kind_of_evidence(tmp_path: Path):
    command = ["bash", str(ROOT / "experiments/benchmarks/accelerator.sh"), str(tmp_path), "small"]
    ended = subprocess.run(command, env=environment(PYTHON=sys.executable), capture_output=True, text=True, timeout=590)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    steps = found["accelerator_micro_16"]
    assert {row["dtype"] for row in steps["rows"]} == {"bfloat16", "float32"} == set(steps["matrix_rate"])
    assert {row["clipping"] for row in steps["rows"]} == {"autodiff", "plain", "book_keeping"}
    assert all(row["is_exact"] for row in steps["rows"] if row["clipping"] == "book_keeping")
    assert any(row["is_automatic_batch"] for row in steps["rows"]) and steps["left_out"] == []
    assert all(0 < row["share_of_matrix_rate"] for row in steps["rows"]) and steps["device"]
    assert found["accelerator_noise"]["kind"] == "noise"
    restart = found["accelerator_restart"]
    assert restart["bytes_that_differ"] == 0 and restart["exit_status_when_stopped"] in (0, 143)
    (tmp_path / "README.md").write_text(f"{tables.BEGIN}\n{tables.END}\n")
    assert tables.write(tmp_path) == len(found)
