"""Random combinations that train three steps: what they state afterwards is what their ledger recomputes to.

Combinations of one clip, mechanism, telemetry, unit and audit share their compiled step, and `PROGRAMS` of those are drawn.
"""

import functools
import importlib.util
import itertools
import json
import random

import dp_accounting
import pytest
from dp_accounting import pld

from dpx.claim import calibration
from dpx.claim.calibration import calibrate
from dpx.claim.combined_ledgers import read
from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.mechanism.banded import Banded
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.privacy import accounting, ledger, loss_grid
from dpx.statement import received
from dpx.training import opening, session

from ..privacy.combinations import COARSE, check, drawn
from .conftest import declare

# Single declarations are in tests/privacy/test_combinations.py.
pytestmark = pytest.mark.slow
STEPS = 3
TRAINED = 11
PROGRAMS = 4


@pytest.fixture(scope="module")
def combinations(tmp_path_factory):
    """The first `TRAINED` combinations, in an order chosen by seed, that stand with the data as it is."""
    directory = str(tmp_path_factory.mktemp("data"))
    source = Synthetic(documents=140, words_per_document=60, states=16)
    data = Data(name="synthetic", source=source, vocabulary=Vocabulary(size=256), sequence_length=16, directory=directory)
    base = declare(data=data, schedule=Schedule(evaluate_every=STEPS, evaluation_rows=32, checkpoint_every=STEPS))
    size_of = functools.cache(lambda data, privacy: privacy.population(prepare(data, privacy).manifest))
    return list(itertools.islice(_standing(base, size_of), TRAINED))


def _program(experiment):
    return experiment.audit, experiment.mechanism, experiment.clip, experiment.telemetry, experiment.privacy.rows_per_example


def _standing(base, size_of):
    programs = set()
    for seed in random.Random(1).sample(range(500), 500):
        try:
            experiment = drawn(base, seed, size_of, STEPS)
            can_run = not isinstance(experiment.mechanism, Banded) or importlib.util.find_spec("jax_privacy")
            if not can_run or (len(programs) == PROGRAMS and _program(experiment) not in programs):
                continue
            calibrate(experiment.claim, size_of(experiment.data, experiment.privacy))
        except ConfigError:
            continue
        programs.add(_program(experiment))
        yield experiment


@pytest.mark.parametrize("number", range(TRAINED))
def test_what_is_stated_after_training_is_what_the_ledger_recomputes_to(combinations, number, tmp_path):
    experiment = combinations[number]
    folder = RunFolder(tmp_path, "")
    with folder.claimed(), opening.open_run(experiment, folder) as run:
        session.train(run)
        calibrated = run.calibrated
    document = json.loads((tmp_path / "release" / "privacy.json").read_text())
    segments = read(tmp_path).segments if experiment.is_private else []
    check(experiment, calibrated, document, segments)
    if not experiment.is_private:
        return
    assert document["spent"]["steps"] == document["spent"]["charged_steps"] == STEPS
    assert document["ledger"]["segments"] == segments
    own = calibration.accountant_of(experiment.accountant)[0]
    if own == "pld" and document["epsilon"]:
        relation = {"zero_out": "REPLACE_SPECIAL", "add_remove": "ADD_OR_REMOVE_ONE", "replace_one": "REPLACE_ONE"}[document["adjacency"]]

        width = loss_grid.coarser(accounting.bucketed(ledger.releases(segments)), document["adjacency"], COARSE)

        def by_dp_accounting_alone(event):
            composed = pld.PLDAccountant(dp_accounting.NeighboringRelation[relation], width).compose(event)
            return composed.get_epsilon(document["delta"])

        assert received.recompute(document, by_dp_accounting_alone) == document["epsilon"]["pld"]


def test_the_trained_combinations_are_not_all_alike(combinations):
    kinds = {(experiment.sampler.name, experiment.clip.kind, experiment.accountant.name) for experiment in combinations}
    assert len({sampler for sampler, *_ in kinds}) >= 4 and len({clip for _, clip, _ in kinds}) >= 3
    assert any(isinstance(experiment.noise, TargetEpsilon) for experiment in combinations)
