"""Accidents of a search: what is lost, cut or deleted on disk never makes it cheaper."""

import json
import shutil
from pathlib import Path

from dpx import config
from dpx.claim import calibration
from dpx.claim.study import Study
from dpx.config import recipes
from dpx.config.experiment import Experiment
from dpx.launch.search import search_of
from dpx.privacy.ledger import Ledger
from tests.tuning import made_up

SIZE, SIGMA, STEPS = 1000, 4.0, 5


def _experiment(*overrides: str) -> Experiment:
    plain = [
        "+experiment=laptop/anil_tune_32k",
        "hydra/sweeper=basic",
        "model=micro",
        f"steps={STEPS}",
        "lr_schedule.warmup_steps=0",
        "batch_schedule.size=100",
    ]
    noise = ["noise=multiplier", "~noise.epsilon", f"noise.noise_multiplier={SIGMA}", f"data.declared_size={SIZE}", "privacy.delta=1e-4"]
    built, _ = config.build(recipes.compose([*plain, *noise, "tune.charge=composition", "tune.trials=3", *overrides]))
    return built


def _trial(study: Study, experiment: Experiment, number: int, accuracy: float) -> Path:
    """A trial that entered all its steps and came to `accuracy`."""
    folder = study.outputs / f"{experiment.name}-{number}"
    study.begin(search_of(experiment), folder, (f"optimizer.weight_decay={number}",), lambda others: {})
    (folder / "private").mkdir(parents=True, exist_ok=True)
    ledger = Ledger(folder / "private" / "ledger")
    ledger.note_units(made_up.units_of(experiment))
    for step in range(STEPS):
        ledger.append(step, calibration.Entries.of(experiment.claim).of_step(SIZE, SIGMA, 100))
    ledger.close()
    study.end(search_of(experiment), folder, "finished", accuracy)
    return folder


def _epsilon(study: Study) -> float:
    said = json.loads((study.release / "privacy.json").read_text())
    assert said["guarantee"] == "dp"
    return said["epsilon"]["pld"]


def test_epsilon_stays_when_the_folders_of_losing_trials_are_deleted(tmp_path: Path) -> None:
    """Accident 4: it fell, from all trials' epsilon to the winner's."""
    study, experiment = Study(tmp_path, "s"), _experiment()
    folders = [_trial(study, experiment, number, accuracy) for number, accuracy in enumerate((0.1, 0.3, 0.2))]
    before = _epsilon(study)
    for loser in (folders[0], folders[2]):
        shutil.rmtree(loser)
        study.close(search_of(experiment))
        assert _epsilon(study) == before
