"""What the loop hands to the step: every drawn row, the declared rate and divisor, the stated deviation, after the ledger's entry."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.files.run_folder import RunFolder
from dpx.privacy.declared_privacy import Privacy
from dpx.sampler.batch_schedule import Constant
from dpx.training import loop
from dpx.training.features import WithFeatures
from dpx.training.opening import open_run
from dpx.training.session import renew

from .conftest import declare

DECLARED, BATCH = 480, 120


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A run whose draw is larger than a chunk and whose data is smaller than declared, before its first step."""
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
        seed=4,
        schedule=Schedule(evaluation_rows=32),
    )
    folder = RunFolder(tmp_path_factory.mktemp("loop"), "name: micro\n")
    with folder.claimed(), open_run(experiment, folder) as run:
        yield run


@pytest.fixture(scope="module")
def seen(opened):
    """What passed through the run's one step."""
    calls, step, draw = {"rows": 0, "order": []}, opened.step, loop.draw

    def watched_draw(sampler, size, q, *rest):
        calls["q"], calls["size"] = q, size
        calls["drawn"] = draw(sampler, size, q, *rest)
        return calls["drawn"]

    def accumulate(sums, chunk, inputs):
        calls["rows"] += int(np.sum(~chunk.is_padding_KB[: int(chunk.count)]))
        return step.accumulate(sums, chunk, inputs)

    def finish(state, reduced, drawn, deviation, expected, *others):
        calls["order"].append(sorted(opened.ledger.steps(0)))
        calls["deviation"], calls["expected"] = float(deviation), float(expected)
        state, calls["values"] = step.finish(state, reduced, drawn, deviation, expected, *others)
        return state, calls["values"]

    run = dataclasses.replace(opened, step=dataclasses.replace(step, accumulate=accumulate, finish=finish))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw", watched_draw)
        loop.run_steps(run, [lambda _done, _state, metrics: calls.update(metrics=metrics)], lambda *given: renew(opened, *given))
    calls["rows_in_store"], calls["capacity"] = run.store.manifest.rows["protected"], step.chunk * step.rows
    calls["calibrated"], calls["clip"] = run.calibrated, run.experiment.clip
    calls["entry"] = next((entry for _, entry in run.ledger.entries()), None)
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


def test_example_norms_are_told_as_the_mean_over_examples_and_not_over_padding(seen):
    units = len(seen["drawn"])
    assert seen["metrics"]["grad/example_norm"] == pytest.approx(float(seen["values"]["count/norm"]) / units)
    assert seen["metrics"]["grad/clipped_fraction"] == pytest.approx(float(seen["values"]["count/clipped"]) / units)


def test_tokens_are_counted_with_the_padding_of_texts_and_without_that_of_chunks(seen, opened):
    lengths = opened.store.lengths("protected", seen["drawn"], 1)
    assert seen["metrics"]["train/tokens"] == lengths.sum() < seen["metrics"]["train/padded_tokens"] == 16 * len(seen["drawn"])


def test_an_empty_draw_has_no_loss_and_features_have_no_tokens(seen, opened):
    values = {name: value * 0 if name.startswith("count/") else value for name, value in seen["values"].items()}
    values |= {"learning_rate": 0.1, "expected_batch_size": BATCH, "tokens": loop.Tokens()}
    run = dataclasses.replace(opened, store=WithFeatures(opened.store, np.zeros((1, 2), np.float32)))
    empty = loop._readable(run, values, 0.5)
    missing = {
        "train/loss",
        "train/mlm_accuracy",
        "train/next_sentence_accuracy",
        "grad/clipped_fraction",
        "grad/example_norm",
        "train/tokens",
        "train/padded_tokens",
    }
    assert seen["metrics"].keys() - empty.keys() == missing and empty["train/examples"] == empty["train/examples_per_s"] == 0.0
    assert {"train/tokens", "train/padded_tokens"} <= loop._readable(opened, values, 0.5).keys()


def test_rows_without_text_count_no_tokens_and_texts_of_a_choice_each_their_own():
    is_padding_B = np.array([False, True])
    choices = {"tokens": np.ones((2, 3, 8), np.int32), "length": np.array([[8, 5, 2], [0, 0, 0]])}
    assert loop.Tokens.count(choices, is_padding_B) == (15, 24)
    assert loop.Tokens.count({"label": np.ones(2)}, is_padding_B) == (0, 0)


def test_a_sum_once_entered_stays_and_a_run_without_noise_enters_none(seen, opened):
    name = opened.start.noise_epoch.name
    first, mark = opened.ledger.sum_of(name, 0), opened.ledger.mark
    loop._record(opened, opened.start.noise_epoch, 0, "another")
    plain = dataclasses.replace(opened, calibrated=dataclasses.replace(opened.calibrated, noise_multiplier=None))
    loop._record(plain, opened.start.noise_epoch, 1, "another")
    assert opened.ledger.sum_of(name, 0) == first is not None and opened.ledger.mark == mark


def test_nothing_runs_ahead_of_an_evaluation_a_checkpoint_or_the_end():
    schedule = Schedule(evaluate_every=3, checkpoint_every=4)
    assert [done for done in range(1, 11) if loop._pauses(schedule, 10, done)] == [3, 4, 6, 8, 9, 10]


def test_before_a_new_epoch_the_step_before_is_shown_in_its_own(opened, monkeypatch):
    """Metrics are read one step late: those of the first step are still pending when the second gives another sum."""
    first, order = opened.start.noise_epoch, []
    second = dataclasses.replace(first, number=first.number + 1, name="second")

    def one_step(_, noise_epoch, secret, step, state):
        if step == 1 and noise_epoch is first:
            raise loop.AnotherSum(step, "it has another sum than before")
        return state, {}

    def renew(step, state, why):
        order.append(("renewed", why))
        return second, opened.start.secret, state

    monkeypatch.setattr(loop, "one_step", one_step)
    monkeypatch.setattr(loop, "_show", lambda _, noise_epoch, step, *rest: order.append((noise_epoch.number, step)) or 0.0)
    experiment = dataclasses.replace(opened.experiment, steps=3, schedule=Schedule(evaluate_every=100, checkpoint_every=100))
    loop.run_steps(dataclasses.replace(opened, experiment=experiment), (), renew)
    assert order == [(0, 0), ("renewed", "step 2: it has another sum than before"), (1, 1), (1, 2)]


def test_before_noise_is_added_all_devices_hold_one_sum(monkeypatch):
    reduced = {"checksum": jax.device_put(np.array([1, 2], np.uint32))}
    for before, other, reason in ((None, "1", "devices hold different sums"), ("1", ONE_SUM, "it has another sum than before")):
        monkeypatch.setattr(loop, "team", lambda other=other: SimpleNamespace(agree=lambda own: own | {other}))
        with pytest.raises(loop.AnotherSum, match=f"^step 8: {reason}"):
            loop._require_same(7, before, reduced)
    for before in (None, ONE_SUM):
        loop._require_same(7, before, reduced)


ONE_SUM = "0000000100000002"
