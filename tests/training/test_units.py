"""Whole documents drawn and clipped as one, end to end: the draw, the sums, the divisor, the ledger and the statement."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.audit.canaries import Audited
from dpx.clipping import ClippingMethod
from dpx.clipping.clipped_sum import clipped_sum
from dpx.clipping.rounding import MARGINS
from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.files.run_folder import RunFolder
from dpx.privacy.declared_privacy import Privacy
from dpx.sampler.batch_schedule import Constant
from dpx.training import loop, session
from dpx.training.opening import open_run
from dpx.training.step import StepInputs, as_chunk, make_step

from .conftest import declare

MOST = 4


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Three steps, everything that was drawn and summed in them, and the run's statement."""
    source = Synthetic(documents=60, words_per_document=45, states=16)
    directory = str(tmp_path_factory.getbasetemp() / "data")
    experiment = declare(
        data=Data(name="synthetic", source=source, vocabulary=Vocabulary(size=256), sequence_length=16, directory=directory),
        privacy=Privacy(delta=1e-4, unit="document", rows_per_unit_max=MOST, unit_mode="sample_units"),
        clipping_method=ClippingMethod(name="book_keeping"),
        batch_schedule=Constant(size=20),
        steps=3,
        microbatch=2,
        schedule=Schedule(evaluation_rows=32),
    )
    calls: dict[str, Any] = {"drawn": [], "units": [], "expected": []}
    draw, patch = loop.draw, pytest.MonkeyPatch()

    def watched(sampler, size, q, *rest):
        calls["size"], calls["q"] = size, q
        calls["drawn"].append(draw(sampler, size, q, *rest))
        return calls["drawn"][-1]

    folder = RunFolder(tmp_path_factory.mktemp("units"), "name: micro\n")
    with patch.context(), folder.claimed(), open_run(experiment, folder) as run:
        patch.setattr(loop, "draw", watched)
        step, seen = run.step, calls

        def accumulate(sums, chunk, inputs):
            found = step.accumulate(sums, chunk, inputs)
            if len(seen["drawn"]) == 1 and "first" not in seen:
                seen["first"] = jax.tree.map(np.array, (chunk, inputs, found["gradient"]))
            seen["units"].append(float(np.sum(found["count"]["units"])))
            return found

        def finish(state, reduced, drawn, deviation, expected, *others):
            seen["expected"].append(float(expected))
            return step.finish(state, reduced, drawn, deviation, expected, *others)

        watching = dataclasses.replace(run, step=dataclasses.replace(step, accumulate=accumulate, finish=finish))
        session.train(watching)
        calls |= {"store": watching.store, "experiment": experiment, "entries": [entry for _, entry in watching.ledger.entries()]}
    patch.undo()
    calls["statement"] = json.loads((folder.release / "privacy.json").read_text())
    return calls


def test_units_are_drawn_and_counted(ran):
    units = ran["store"].manifest.units["protected"]
    assert ran["size"] == units != ran["store"].manifest.rows["protected"]
    assert ran["q"] == 20 / units and ran["expected"] == [20.0] * 3
    assert len(ran["drawn"]) == 3 and max(drawn.max() for drawn in ran["drawn"]) < units
    assert ran["units"] == [float(len(drawn)) for drawn in ran["drawn"]]


def test_the_ledger_and_the_statement_say_so(ran):
    entry = ran["entries"][0]
    assert (entry.unit_mode, entry.rows_per_unit, entry.size) == ("sample_units", MOST, ran["size"]) and len(ran["entries"]) == 3
    assert ran["statement"]["guarantee"] == "dp" and ran["statement"]["unit_mode"] == "sample_units"
    assert ran["statement"]["ledger"]["events"][0]["event"]["class"] == "PoissonSampledDpEvent"


# Slow: the step is held to the clipped sum of a unit's rows below.
@pytest.mark.slow
def test_each_unit_moves_the_sum_by_the_clipped_sum_of_its_rows(ran):
    """The first chunk, unit by unit through the reference: all rows of a document in one example."""
    (rows, is_padding, count), (params, mask, dropout, *_), gradient = ran["first"]
    from dpx.task.objective import objective

    experiment, store = ran["experiment"], ran["store"]
    subject = objective(experiment.model, experiment.task, store.manifest.vocabulary_size, store.manifest)
    flat = {name: value[:count].reshape(-1, *value.shape[3:]) for name, value in rows.items()}
    padding = jnp.asarray(is_padding[:count].reshape(-1))
    assert is_padding.shape[2] == MOST and not is_padding[0, 0].all() and padding.any()
    run = jax.jit(
        lambda p, b: clipped_sum(
            lambda p, b: subject.losses(p, b, dropout),
            p,
            b,
            weights=experiment.clip.weights(experiment.clip.clipping_norm * (1 - MARGINS["float32"])),
            is_padding_B=padding,
            method="vmap",
            rows_per_unit=MOST,
        )
    )
    reference = run(jax.tree.map(jnp.asarray, params), jax.jit(subject.batch)(mask, flat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.sum(0), b, rtol=1e-4, atol=1e-6), gradient, reference.total)


@pytest.mark.parametrize("method", ["vmap", "ghost", "book_keeping"])
def test_the_step_clips_the_sum_of_a_units_rows(method):
    """Rows along one coordinate each (ten norms long): together they leave the step with one norm, padding rows with nothing."""
    privacy = Privacy(delta=1e-4, unit="document", rows_per_unit_max=3, unit_mode="sample_units")
    experiment = declare(privacy=privacy, clipping_method=ClippingMethod(name=method))
    norm = experiment.clip.clipping_norm
    step = make_step(experiment.one_step, Audited(None, 6, 10 * norm, experiment.task.counts), experiment.mesh.make(), 2, chunk=2)
    canary = np.array([[0, 0, 5], [1, 2, 3], [4, 5, 5]], np.int32)
    is_padding = np.array([[False, False, True], [False, False, False], [False, True, True]])
    chunk = as_chunk({"canary": canary, "is_padding": is_padding}, step)
    assert chunk.is_padding_KB.shape == (2, 2, 3) and chunk.count == 2
    key = np.zeros(2, np.uint32)
    sums = step.accumulate(step.zero(), chunk, StepInputs(step.gather(step.init(key, None).params), key, key))
    total = np.asarray(sums["gradient"]["canaries"]["table"]).sum(0).ravel()[:6] / norm
    np.testing.assert_allclose(total / (1 - MARGINS["float32"]), [1, *[3**-0.5] * 3, 1, 0], rtol=1e-5)
    counted = {name: float(np.sum(value)) for name, value in sums["count"].items()}
    assert (counted["examples"], counted["units"], counted["clipped"]) == (6, 3, 3)
    assert counted["norm"] == pytest.approx(norm * 10 * (2 + 3**0.5 + 1), rel=1e-5)
