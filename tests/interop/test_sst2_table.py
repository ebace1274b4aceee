"""The table of experiments/fine_tuning reads run folders and what was noted of others, and its rate is that of the lowest held-out loss."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "experiments" / "fine_tuning"


def _finished(work: Path, name: str, loss: float, accuracy: float, epsilon: float | None) -> None:
    folder = work / "outputs" / f"{name}-0123456789"
    (folder / "private").mkdir(parents=True)
    (folder / "release").mkdir()
    (folder / "private" / "results.json").write_text(
        json.dumps({"heldout": {"loss": loss, "accuracy": accuracy, "macro_f1": accuracy / 2}})
    )
    claim = {"guarantee": "none", "epsilon": {}} if epsilon is None else {"guarantee": "dp", "epsilon": {"pld": epsilon}}
    (folder / "release" / "privacy.json").write_text(json.dumps(claim))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for rate, loss in (("1e-3", 0.5), ("3e-4", 0.4), ("1e-4", 0.6)):
        _finished(tmp_path, f"rate_last_layer_{rate}", loss, 0.75, 8.0)
    for replicate, accuracy in ((1, 0.8), (2, 0.82)):
        _finished(tmp_path, f"sst2_last_layer_8_{replicate}", 0.4, accuracy, 7.9999)
    _finished(tmp_path, "sst2_all_none_1", 0.4, 0.9, None)
    _finished(tmp_path, "mrpc_lora_8_5", 0.6, 0.7, 8.0)
    (tmp_path / "outputs" / "sst2_lora_8_1-0123456789" / "private").mkdir(parents=True)
    # Interrupted once, and resumed.
    (tmp_path / "times.tsv").write_text("sst2_all_none_1\t60\t50\t10\t2000000\t1\nsst2_all_none_1\t120\t100\t20\t1000000\t0\n")
    return tmp_path


def _table(work: Path, *flags: str) -> str:
    command = [sys.executable, str(HOME / "table.py"), str(work), "--kept", str(work), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_means_and_costs_of_what_is_finished(work: Path):
    table = _table(work)
    assert "| sst2 | last_layer | 8 | 2 | 81.00 ± 1.41 | 40.50 ± 0.71 | dp, 8.000 | – | – | – |" in table
    assert "| sst2 | all | none | 1 | 90.00 | 45.00 | none | 3.0 | 3.0 | 2.0 |" in table
    assert "| mrpc | lora | 8 | 1 | 70.00 | 35.00 | dp, 8.000 |" in table and "| sst2 | lora |" not in table


def test_what_is_noted_stands_on_the_next_machine(work: Path):
    table = _table(work, "--keep")
    assert _table(work) == table and not (work / "results.csv").read_text().count("sst2_lora")
    shutil.rmtree(work / "outputs")
    (work / "times.tsv").unlink()
    assert _table(work) == table
    _finished(work, "sst2_last_layer_8_2", 0.4, 0.9, 7.9999)
    assert "| sst2 | last_layer | 8 | 2 | 85.00 ± 7.07 |" in _table(work)


def test_the_rate_is_that_of_the_lowest_loss(work: Path):
    assert _table(work, "--rate", "last_layer") == "3e-4\n"
    with pytest.raises(subprocess.CalledProcessError):
        _table(work, "--rate", "bias")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/time").exists(), reason="there is no /usr/bin/time")
def test_grids_skip_what_is_finished_and_begin_no_run_without_a_rate(work: Path):
    """A fake python records the name of each run that is requested, and finishes none."""
    fake = work / "python"
    asked = 'for one in "$@"; do case $one in name=*) echo "${one#name=}" >> asked.txt; esac; done'
    fake.write_text(f'#!/usr/bin/env bash\ncase $1 in *.py) exec {sys.executable} "$@";; esac\n{asked}\n')
    fake.chmod(0o755)
    (work / "results.csv").write_text("name,task\nsst2_last_layer_none_2,sst2\n")
    for script in ("sst2.sh", "small_tasks.sh"):
        command = ["bash", str(HOME / script), str(work), str(work)]
        subprocess.run(command, env=os.environ | {"PYTHON": str(fake), "kept": str(work)}, check=True, capture_output=True)
    names = (work / "asked.txt").read_text().split()
    assert "rate_lora_1e-3" in names and "rate_last_layer_3e-2" in names and "sst2_last_layer_none_1" in names
    assert names.count("rate_lora_1e-3") == 1
    assert not {"rate_last_layer_1e-3", "rate_last_layer_3e-4", "sst2_last_layer_8_1", "sst2_last_layer_none_2"} & set(names)
    assert "mrpc_last_layer_none_5" in names and "mrpc_lora_8_5" not in names
