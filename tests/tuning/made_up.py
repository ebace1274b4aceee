"""Trials that never trained: run folders with a ledger and a statement, as a run would leave them."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from dp_accounting import dp_event

from dpx import config
from dpx.claim import calibration, claim_checks
from dpx.claim.search_record import TrialDistribution
from dpx.claim.study import Study
from dpx.config import recipes
from dpx.config.experiment import Experiment
from dpx.data.protected_units import unit_facts
from dpx.files.run_folder import RunFolder
from dpx.launch.search import search_of
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.ledger import Ledger
from dpx.statement import seals
from tests.made_statement import made_statement

# So much noise keeps privacy loss distributions short, and tests fast.
SIZE, SIGMA, STEPS, BATCH = 1000, 4.0, 5, 100
DRAWN = "optimizer.weight_decay=1"


@functools.cache
def experiment(charge: str, trials: int = 3, *overrides: str) -> Experiment:
    plain = [
        "+experiment=laptop/anil_tune_32k",
        "hydra/sweeper=basic",
        "model=micro",
        f"steps={STEPS}",
        "lr_schedule.warmup_steps=0",
        f"batch_schedule.size={BATCH}",
    ]
    noise = ["noise=multiplier", "~noise.epsilon", f"noise.noise_multiplier={SIGMA}", f"data.declared_size={SIZE}", "privacy.delta=1e-4"]
    built, _ = config.build(recipes.compose([*plain, *noise, f"tune.charge={charge}", f"tune.trials={trials}", *overrides]))
    return built


def distribution(**fixed: object) -> TrialDistribution:
    """A search over one setting, which every made-up point draws."""
    sampler = {"_target_": claim_checks._SWEEPER, "sampler": {"_target_": claim_checks._SAMPLER, "seed": None}}
    space = {"optimizer.weight_decay": {"type": "float", "low": 0.0, "high": 10.0, "step": None, "is_log": False}}
    return TrialDistribution(sampler=sampler, space=space, fixed=dict(fixed))


def begin(study: Study, of: Experiment, folder: Path, point: tuple[str, ...] = (DRAWN,), settles: bool = True) -> None:
    """A trial that a launch of the search draws: what it settles is settled first."""
    assert of.tune is not None
    if settles and of.tune.charge == "repeat_and_select":
        study.settle(of.tune, distribution())
    study.begin(search_of(of), folder, point, lambda others: {})


def folder_of(study: Study, number: int) -> Path:
    return study.outputs / f"laptop_anil_tune_32k-{number}"


def units_of(of: Experiment, vocabulary: str = "a" * 64) -> UnitFacts:
    """What a trial's steps protect, on data with a vocabulary of that checksum."""
    return unit_facts(of.data, of.privacy, SimpleNamespace(vocabulary_source="public_split", vocabulary_checksum=vocabulary))


def enter(folder: Path, of: Experiment, steps: Iterable[int], epoch: int = 0, units: UnitFacts | None = None) -> None:
    """What training `steps` leaves in a run folder: ledger entries, and a statement that names the last of them."""
    (folder / "release").mkdir(parents=True, exist_ok=True)
    (folder / "private").mkdir(exist_ok=True)
    ledger, batch = Ledger(folder / "private" / "ledger"), of.batch_schedule.at(0)
    ledger.note_units(units or units_of(of))
    for step in steps:
        ledger.append(step, calibration.Entries.of(of.claim).of_step(SIZE, getattr(of.noise, "noise_multiplier", SIGMA), batch, epoch))
    seals.write_statement(RunFolder(folder), ledger, made_statement(ledger))
    ledger.close()


def trial(
    study: Study, of: Experiment, number: int, accuracy: float | None, steps: int | None = None, units: UnitFacts | None = None
) -> Path:
    """A trial that entered all its steps, or the first `steps`, and then finished with `accuracy`, or failed."""
    folder = folder_of(study, number)
    begin(study, of, folder, (f"optimizer.weight_decay={number}",))
    enter(folder, of, range(of.steps if steps is None else steps), units=units)
    study.end(search_of(of), folder, "failed" if accuracy is None else "finished", accuracy)
    return folder


def stated(study: Study) -> dict:
    return json.loads((study.release / "privacy.json").read_text())


def steps_of(said: dict) -> int:
    """How many steps a study's statement charges for the trials that began."""
    return sum(count for run in said["ledger"]["segments"] for _, count in run["steps"])


def event(count: int, q: float = BATCH / SIZE, sigma: float = SIGMA) -> dp_event.DpEvent:
    """`count` steps as dp-accounting composes them."""
    return dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma)), count)
