"""Of parameters that were drawn from a run's secret, those are known that no random number decides; and the noise of each step is."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dpx.claim import statement
from dpx.claim.calibration import calibrate
from dpx.config.experiment import Experiment
from dpx.declaration import ConfigError
from dpx.job.change import _deviations
from dpx.mechanism.clip import AdaptiveClip
from dpx.models.trained import Adapters, Biases, Everything, LastLayer, Trained
from dpx.sampler.batch_schedule import Staged
from dpx.statement.statement_records import RunStatement
from dpx.training.change_measured import known_start

from .conftest import declare

ADAPTED = Adapters(rank=2, alpha=4.0, targets=("query", "down"))


def stated_of(experiment: Experiment) -> RunStatement:
    stated = statement.build(experiment.claim, None, calibrate(experiment.claim, 1000))
    assert isinstance(stated, RunStatement)
    return stated


@pytest.mark.parametrize(
    ("train", "names"),
    [
        (ADAPTED, {"b"}),
        (Biases(), {"bias", "output_bias"}),
        (LastLayer(), {"bias", "scale", "output_bias"}),
        (Everything(), {"bias", "scale", "output_bias"}),
    ],
)
def test_zeros_and_ones_are_known_and_draws_are_not(train: Trained, names: set[str]):
    experiment = declare(train=train)
    known = known_start(experiment.init, experiment.receiver, ())
    assert {path.split("/")[-1] for path in known} <= names and known
    for path, leaf in known.items():
        np.testing.assert_array_equal(leaf, 1.0 if path.endswith("scale") else 0.0)
    assert not any(path.endswith(("kernel", "/a")) for path in known)


def deviations(experiment, release: Path, stated):
    return _deviations(experiment.mechanism.name, experiment.clip, experiment.batch_schedule, experiment.steps, release, stated)


def test_the_noise_of_a_step_is_that_of_its_batch(tmp_path: Path):
    experiment = declare(batch_schedule=Staged(sizes=[10, 20], stage_steps=2))
    np.testing.assert_allclose(deviations(experiment, tmp_path, stated_of(experiment)), 0.5 * 0.1 / np.array([10, 10, 20, 20]))


def test_a_norm_that_adapts_is_read_from_what_was_released(tmp_path: Path):
    clip = AdaptiveClip(clipping_norm=0.1, target_quantile=0.5, learning_rate=0.2, count_noise_multiplier=20.0)
    experiment = declare(clip=clip, batch_schedule=Staged(sizes=[10], stage_steps=1))
    stated = stated_of(experiment)
    lines = [{"epoch": 0, "step": 1, "clipping_norm": 0.1}, {"epoch": 1, "step": 2, "clipping_norm": 0.4}]
    lines += [{"epoch": 0, "step": step, "clipping_norm": 0.2} for step in (2, 3)]
    telemetry = tmp_path / "telemetry.jsonl"
    telemetry.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=r"telemetry.jsonl: does not hold the clipping norm of every step"):
        deviations(experiment, tmp_path, stated)
    sigma = stated.mechanism.noise_multiplier
    assert sigma is not None
    found = deviations(dataclasses.replace(experiment, steps=3), tmp_path, stated)
    np.testing.assert_allclose(found, sigma * np.array([0.1, 0.4, 0.2]) / 10)
