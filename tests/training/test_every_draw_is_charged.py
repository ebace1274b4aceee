"""A run with a growing batch, several noise slices and several noise epochs: every draw, charge and key is held against the ledger."""

import collections
import contextlib

import jax
import numpy as np
import pytest

from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.files.run_folder import RunFolder
from dpx.mechanism import noise
from dpx.mechanism.noise import row_blocks
from dpx.privacy import ledger as ledgers
from dpx.privacy.ledger import Ledger
from dpx.randomness import RootSecret, path_name
from dpx.sampler import Poisson, draw
from dpx.sampler.batch_schedule import Staged
from dpx.training import loop, session
from dpx.training.opening import open_run

from .conftest import declare

STEPS = 6


class Killed(Exception):
    """Stands for a SIGKILL after a chosen step was computed."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Three noise epochs: steps 0 to 3, 2 to 5 and 4 to 5; what was drawn with which secret, and the ledger."""
    source = Synthetic(documents=60, words_per_document=80, states=16)
    directory = str(tmp_path_factory.getbasetemp() / "data")
    data = Data(name="synthetic", source=source, vocabulary=Vocabulary(size=256), sequence_length=16, directory=directory)
    folder, seen = RunFolder(tmp_path_factory.mktemp("run"), "name: micro\n"), collections.defaultdict(list)
    key, whole, one_draw = RootSecret.key, loop.one_step, loop.draw

    def watched_key(self, purpose, *parts):
        found = key(self, purpose, *parts)
        seen["keys"].append((self.tag, purpose, parts, bytes(found)))
        return found

    def watched_draw(sampler, size, q, generator_for, step, *rest):
        found = one_draw(sampler, size, q, generator_for, step, *rest)
        seen["draws"].append((seen["now"][-1], step, size, q, found))
        return found

    def train(die_after):
        def mortal(runtime, epoch, secret, step, state):
            seen["now"].append(secret.tag)
            found = whole(runtime, epoch, secret, step, state)
            if step == die_after:
                raise Killed
            return found

        experiment = declare(
            data=data,
            steps=STEPS,
            batch_schedule=Staged(sizes=[6, 10, 14], stage_steps=2),
            schedule=Schedule(evaluation_rows=32, checkpoint_every=2),
        )
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed), folder.claimed():
            patch.setattr(RootSecret, "key", watched_key)
            patch.setattr(loop, "draw", watched_draw)
            patch.setattr(loop, "one_step", mortal)
            patch.setattr(noise, "SLICE_ELEMENTS", 1 << 11)
            with open_run(experiment, folder) as run:
                seen["shapes"] = [(path_name(p), leaf.shape) for p, leaf in jax.tree_util.tree_leaves_with_path(run.start.state.params)]
                seen["blocks"] = {name: len(row_blocks(shape)) for name, shape in seen["shapes"]}  # type: ignore[assignment]
                session.train(run)
        return experiment

    train(3)
    # A lost secret begins a noise epoch; the tests below still want to know it.
    for number, die_after in enumerate((5, None)):
        secret = folder.private / f"root_secret_{number}"
        kept = secret.rename(secret.with_name("kept"))
        experiment = train(die_after)
        kept.rename(secret)
    return experiment, folder, seen, Ledger(folder.private / "ledger")


def _charged(ledger):
    """{(tag of the secret, step): entry}, one for each charged release."""
    tags = {epoch.name: epoch.secret_tag for epoch in ledger.noise_epochs}
    charged = {(tags[entry.epoch_name], step): entry for step, entry in ledger.entries()}
    assert len(charged) == sum(count for _, count in ledgers.releases(ledger.segments()))
    return charged


def test_the_three_epochs_are_there(watched):
    *_, ledger = watched
    assert [(epoch.number, epoch.from_step) for epoch in ledger.noise_epochs] == [(0, 0), (1, 2), (2, 4)]
    assert [ledger.steps(number) for number in (0, 1, 2)] == [set(range(4)), set(range(2, 6)), {4, 5}]


def test_whoever_draws_rows_or_noise_is_charged_and_nobody_else(watched):
    _, _, seen, ledger = watched
    with_noise = {(tag, parts[0]) for tag, purpose, parts, _ in seen["keys"] if purpose == "noise"}
    with_rows = {(tag, step) for tag, step, *_ in seen["draws"]}
    assert with_noise == with_rows == set(_charged(ledger)) and len(with_noise) == 4 + 4 + 2


def test_every_step_is_charged_at_the_batch_size_of_its_own(watched):
    experiment, _, seen, ledger = watched
    charged = _charged(ledger)
    for tag, step, size, q, _ in seen["draws"]:
        entry, batch = charged[tag, step], experiment.batch_schedule.at(step)
        assert (entry.expected_batch_size, entry.q, entry.q) == (batch, q, batch / size)
    assert {entry.expected_batch_size for entry in charged.values()} == {6, 10, 14}


def test_draws_are_those_of_the_secret_and_the_step_and_differ(watched):
    _, folder, seen, ledger = watched
    secrets = {epoch.secret_tag: RootSecret.load(folder.private / f"root_secret_{epoch.number}") for epoch in ledger.noise_epochs}
    drawn = set()
    for tag, step, size, q, indices in seen["draws"]:
        expected = draw(Poisson(), size, q, lambda *place, tag=tag: secrets[tag].generator("sample", *place), step)
        np.testing.assert_array_equal(indices, expected)
        drawn.add(indices.tobytes())
    assert len(drawn) == len(seen["draws"])


def test_every_slice_of_every_leaf_has_a_key_that_no_other_has(watched):
    _, _, seen, _ = watched
    blocks = seen["blocks"]
    assert max(blocks.values()) > 2, "some leaves are cut into several slices"
    keys = {(tag, *parts): value for tag, purpose, parts, value in seen["keys"] if purpose == "noise"}
    assert len(set(keys.values())) == len(keys) == 10 * sum(blocks.values())
    for (_, _, path, index), _ in keys.items():
        assert 0 <= index < blocks[path]


def test_every_shown_step_has_the_checksum_of_its_sum_in_the_ledger(watched):
    *_, ledger = watched
    shown = [(epoch.name, step) for epoch, steps in zip(ledger.noise_epochs, [(0, 1), (2, 3), (4, 5)], strict=True) for step in steps]
    sums = [ledger.sum_of(name, step) for name, step in shown]
    assert all(len(found or "") == 16 for found in sums) and len(set(sums)) == len(sums)
