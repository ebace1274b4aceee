"""A run whose batch grows: the rows of each step are its own draw, and each step is charged at its own batch size."""

import itertools

import numpy as np
import pytest

from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.data.store import Store
from dpx.files.run_folder import RunFolder
from dpx.mechanism import noise
from dpx.privacy.ledger import Ledger
from dpx.randomness import RootSecret
from dpx.sampler import draw
from dpx.sampler.batch_schedule import Staged
from dpx.training import session
from dpx.training.opening import open_run

from .conftest import declare

SIZES = (8, 8, 20, 20, 32)
SEED = 6


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(experiment, N, rows read of the protected split in order, its ledger) of a short run."""
    data = Data(
        name="synthetic",
        source=Synthetic(documents=60, words_per_document=80, states=16),
        vocabulary=Vocabulary(size=256),
        sequence_length=16,
        directory=str(tmp_path_factory.getbasetemp() / "data"),
    )
    # One chunk holds the largest draw, so each step reads its rows at once.
    schedule = Staged(sizes=SIZES[::2], stage_steps=2)
    experiment = declare(data=data, steps=5, batch_schedule=schedule, seed=SEED, schedule=Schedule(evaluation_rows=32))
    path, read, examples = tmp_path_factory.mktemp("grows"), [], Store.examples

    def watched(self, split, indices, *form):
        if split == "protected":
            read.append(np.array(indices))
        return examples(self, split, indices, *form)

    with pytest.MonkeyPatch.context() as patch:
        # As in test_every_draw_is_charged.py, so that both take one compiled step.
        patch.setattr(noise, "SLICE_ELEMENTS", 1 << 11)
        folder = RunFolder(path, "name: micro\n")
        with folder.claimed(), open_run(experiment, folder) as run:
            patch.setattr(Store, "examples", watched)
            session.train(run)
            population = run.store.population(experiment.privacy)
    return experiment, population, read, Ledger(path / "private" / "ledger")


def test_each_step_has_the_draw_of_its_own_number_and_rate(ran):
    experiment, population, read, _ = ran
    secret = RootSecret.from_seed(SEED)
    assert len(read) == len(SIZES)
    for step, (rows, size) in enumerate(zip(read, SIZES, strict=True)):
        own = draw(experiment.sampler, population, size / population, lambda *place: secret.generator("sample", *place), step)
        np.testing.assert_array_equal(rows, own)


def test_no_two_steps_draw_the_same_rows(ran):
    for first, second in itertools.combinations(ran[2], 2):
        assert len(np.intersect1d(first, second)) < min(len(first), len(second)) / 2


def test_each_step_is_charged_at_its_own_batch_size(ran):
    _, population, _, ledger = ran
    charged = [(step, entry.expected_batch_size, entry.q) for step, entry in ledger.entries()]
    assert charged == [(step, size, size / population) for step, size in enumerate(SIZES)]
