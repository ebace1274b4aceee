"""What the loop hands to the step: every drawn row, the declared rate and divisor, the stated deviation, after the ledger's entry."""

import dataclasses

import numpy as np
import pytest

from dpx.batch_schedule import Constant
from dpx.data.declarations import Data, Synthetic, Vocabulary
from dpx.experiment import Schedule
from dpx.privacy.declarations import Privacy
from dpx.run_folder import RunFolder
from dpx.training import loop
from dpx.training.session import Session

from .conftest import declare

DECLARED, BATCH = 120, 40


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """One step of a run whose draw is larger than a chunk and whose data is smaller than declared."""
    source = Synthetic(documents=60, words_per_document=80, states=16)
    directory = str(tmp_path_factory.getbasetemp() / "data")
    data = Data(
        name="synthetic", source=source, vocabulary=Vocabulary(size=256), sequence_length=16, directory=directory, declared_size=DECLARED
    )
    experiment = declare(
        data=data,
        steps=1,
        batch_schedule=Constant(size=BATCH),
        privacy=Privacy(delta=1e-4, adjacency="add_remove"),
        microbatch=1,
        seed=4,
        schedule=Schedule(evaluation_rows=32),
    )
    calls = {"rows": 0, "order": []}
    draw = loop.draw

    def watched_draw(sampler, size, q, *rest):
        calls["q"], calls["size"] = q, size
        calls["drawn"] = draw(sampler, size, q, *rest)
        return calls["drawn"]

    path, patch = tmp_path_factory.mktemp("loop"), pytest.MonkeyPatch()
    folder = RunFolder(path, "name: micro\n")
    with patch.context(), folder.claimed(), Session.open(experiment, folder) as session:
        patch.setattr(loop, "draw", watched_draw)
        step = session.runtime.step

        def accumulate(params, sums, rows, is_padding, count, *keys, **norm):
            calls["rows"] += int(np.sum(~is_padding[: int(count)]))
            return step.accumulate(params, sums, rows, is_padding, count, *keys, **norm)

        def finish(state, sums, keys, deviation, expected, rate, *count):
            calls["order"].append(sorted(session.runtime.ledger.steps(0)))
            calls["deviation"], calls["expected"] = float(deviation), float(expected)
            return step.finish(state, sums, keys, deviation, expected, rate, *count)

        runtime = dataclasses.replace(session.runtime, step=dataclasses.replace(step, accumulate=accumulate, finish=finish))
        loop.run(runtime, session.beginning, lambda *_: None, session._renew)
        calls["rows_in_store"], calls["capacity"] = runtime.store.manifest.rows["protected"], step.chunk * step.rows
        calls["calibrated"], calls["clip"] = runtime.calibrated, experiment.clip
        calls["entry"] = next((entry for _, entry in runtime.ledger.entries()), None)
    patch.undo()
    return calls


def test_no_drawn_row_is_left_out(seen):
    assert seen["rows"] == len(seen["drawn"]) > seen["capacity"]


def test_the_rate_and_the_charge_follow_the_declared_size(seen):
    assert seen["q"] == seen["entry"].q == BATCH / DECLARED
    assert seen["calibrated"].size == DECLARED != seen["rows_in_store"] == seen["size"]


def test_the_divisor_is_the_expected_size(seen):
    assert seen["expected"] == BATCH != len(seen["drawn"])


def test_the_deviation_is_of_the_sum(seen):
    assert seen["deviation"] == pytest.approx(seen["calibrated"].noise_multiplier * seen["clip"].clipping_norm)


def test_the_ledger_is_written_before_the_noise_is_drawn(seen):
    assert seen["order"] == [[0]]
