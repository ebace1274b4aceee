"""A real search by Optuna on the micro model: it counts down when launched again, and is charged as declared."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.released_digests import unexplained

CHECKOUT = Path(__file__).resolve().parents[2]
MICRO = ["model=micro", "steps=2", "batch_schedule.size=16", "data.vocabulary.size=256", "lr_schedule.warmup_steps=1"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs the extra tune"),
]


def _search(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]), "COLUMNS": "200"}
    command = [sys.executable, "-m", "dpx", "+experiment=laptop/anil_tune_32k", *MICRO, "schedule.evaluation_rows=64", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False)


def _study(folder: Path) -> Path:
    return folder / "outputs" / "studies" / "laptop_anil_tune_32k"


def _runs(folder: Path) -> list[Path]:
    return sorted((folder / "outputs").glob("laptop_anil_tune_32k-*"))


BUDGET = ("tune.charge=composition", "tune.budget.epsilon=20", "tune.budget.order=3")


def test_a_search_launched_again_goes_on_to_its_number_and_not_past_it(tmp_path: Path) -> None:
    first = _search(tmp_path, "tune.trials=1", *BUDGET)
    assert first.returncode == 0, first.stderr
    assert len(_runs(tmp_path)) == 1
    again = _search(tmp_path, "tune.trials=3", *BUDGET)
    assert again.returncode == 0, again.stderr
    assert len(_runs(tmp_path)) == 3 and again.stdout.count(" finished ") == 3, "the table has the trials of both launches"
    nothing = _search(tmp_path, "tune.trials=3", *BUDGET)
    assert nothing.returncode == 0, nothing.stderr
    assert len(_runs(tmp_path)) == 3
    said = json.loads((_study(tmp_path) / "release" / "privacy.json").read_text())
    alone = json.loads((_runs(tmp_path)[0] / "release" / "privacy.json").read_text())
    assert said["guarantee"] == "dp" and said["trials"]["begun"] == 3
    assert sum(count for run in said["ledger"]["segments"] for _, count in run["steps"]) == 6, "entered steps are those of the plans"
    assert said["epsilon"] == {"rdp": 20.0} and alone["tuning"]["charge"] == "composition"


def test_a_sum_is_of_the_declared_trials_and_more_of_them_have_no_guarantee(tmp_path: Path) -> None:
    declared = _search(tmp_path, "tune.trials=1", "tune.charge=composition")
    assert declared.returncode == 0, declared.stderr
    said = json.loads((_study(tmp_path) / "release" / "privacy.json").read_text())
    alone = json.loads((_runs(tmp_path)[0] / "release" / "privacy.json").read_text())
    assert said["guarantee"] == "dp" and said["epsilon"] == alone["epsilon"]
    raised = _search(tmp_path, "tune.trials=2", "tune.charge=composition")
    assert raised.returncode == 0, raised.stderr
    said = json.loads((_study(tmp_path) / "release" / "privacy.json").read_text())
    assert said["guarantee"] == "none" and "raised from 1 to 2" in said["reasons"][0]


def test_adaptive_trials_stop_with_one_line_and_random_ones_release_a_winner(tmp_path: Path) -> None:
    adaptive = _search(tmp_path, "tune.trials=1", "tune.charge=repeat_and_select")
    assert adaptive.returncode == 2
    assert "error: tune.charge=repeat_and_select with TPESampler" in adaptive.stderr
    assert not list(tmp_path.glob("outputs/*/private/ledger")), "refused before anything ran"
    random = ("tune.trials=1", "tune.charge=repeat_and_select", "hydra/sweeper/sampler=random")
    drawn = _search(tmp_path, *random)
    assert drawn.returncode == 0, drawn.stderr
    said = json.loads((_study(tmp_path) / "release" / "privacy.json").read_text())
    assert said["guarantee"] == "dp" and list(said["epsilon"]) == ["rdp"]
    assert said["draws_from"]["space"]["clip.clipping_norm"] == {"type": "float", "low": 1e-6, "high": 2.0, "step": None, "is_log": True}
    assert (_study(tmp_path) / "release" / "winner" / "privacy.json").is_file()
    privates = [_study(tmp_path) / "private", *(run / "private" for run in _runs(tmp_path))]
    (words,) = {json.loads(file.read_text())["files"]["vocabulary.txt"]["sha256"] for file in tmp_path.glob("outputs/data/*/manifest.json")}
    # The vocabulary is of the public split.
    assert unexplained(_study(tmp_path) / "release", privates, [words]) == {}
    assert not list(tmp_path.glob("outputs/laptop_anil_tune_32k-*/release"))
    assert (_study(tmp_path) / "private" / "optimization_results.yaml").is_file() and not list(tmp_path.glob("outputs/*.yaml"))
    again = _search(tmp_path, *random)
    assert again.returncode == 0 and len(_runs(tmp_path)) == 1, again.stderr
    changed = {"optimizer.weight_decay=0.3": "hydra.sweeper.params.optimizer.weight_decay", "tune.trials=2": "trials"}
    for override, named in changed.items():
        refused = _search(tmp_path, *random, override)
        assert refused.returncode == 2 and f"began with another {named}" in refused.stderr.splitlines()[-1], refused.stderr
