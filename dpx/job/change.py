"""Says whether a run moved what it trained by more than its noise would have, for `job=explain` and the model card.

It reads the released weights, the weights that the run began from, its config and its statement: it is post-processing, and costs no
epsilon. Initial values that were drawn from the run's secret are not known, so those parameters are left out: of LoRA's factors A is,
and B, which begins at zero, is not.
"""

import json
from pathlib import Path

import numpy as np

from dpx.config.experiment import Experiment
from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import on_host
from dpx.files.weights import PARAMS, by_path
from dpx.mechanism.clip import Clip
from dpx.models.trainable import split
from dpx.sampler.batch_schedule import BatchSchedule
from dpx.statement.statement_records import RunStatement, Statement
from dpx.training import change_measured
from dpx.training.change_measured import Change, NotCompared, compare, known_start

# In `release/`: the released values of each step.
TELEMETRY = "telemetry.jsonl"


def sentences_of(experiment: Experiment, release: Path, stated: Statement) -> tuple[list[str], Change | None]:
    """Compares released weights with the initial ones; returns what was found in sentences, and the change.

    Where it cannot be compared (no initial value is known, or the noise is of a kind that is not simulated) they say why, and the change is
    `None`. They are empty for a run without noise and for a search.

    Args:
        experiment: The run's declarations.
        release: Its `release/`, with `params`.
        stated: Its statement.

    Returns:
        The sentences, and the change of every trained parameter whose initial values are known.
    """
    if not isinstance(stated, RunStatement):
        return [], None
    optimizer, steps, trained = experiment.optimizer, experiment.steps, experiment.trained
    try:
        deviation_T = _deviations(experiment.mechanism.name, experiment.clip, experiment.batch_schedule, steps, release, stated)
        if not change_measured.is_coordinatewise(optimizer):
            raise NotCompared(f"optimizer={optimizer.name}", "its update of a number reads other numbers, which is not simulated")
        known = known_start(experiment.init, experiment.receiver, stated.init.of_weights)
        if not known:
            raise NotCompared(f"init={experiment.init.kind}", "all trained parameters were drawn from the run's secret")
        try:
            tree = on_host(release / PARAMS)
        except ConfigError:
            raise NotCompared("release/params", "these weights are incomplete or damaged", "Restore the folder") from None
        released = by_path(tree if trained.is_all else split(tree, trained.selection())[0])
        rate_T = np.array([experiment.lr_schedule.at(step, steps) for step in range(steps)], np.float32)
        found = compare(known, released, change_measured.moments(optimizer, known, deviation_T, rate_T))
    except NotCompared as reason:
        return [f"What training changed is not compared with noise alone: {reason.value}: {reason.reason}."], None
    return [found.sentence()], found


def _deviations(mechanism: str, clip: Clip, schedule: BatchSchedule, steps: int, release: Path, stated: RunStatement) -> np.ndarray:
    """Returns the standard deviation of the noise in the gradient of each step. Raises `NotCompared` for noise that is not simulated."""
    facts = stated.mechanism
    if mechanism not in ("dp_sgd", "discrete_gaussian") or facts.noise_multiplier is None:
        raise NotCompared(f"mechanism={mechanism}", "its noise is not independent noise on gradients, and is not simulated")
    norm_T = np.full(steps, clip.clipping_norm)
    if clip.is_adaptive:
        # Of a step that ran in several noise epochs, the norm of the last one.
        telemetry = release / TELEMETRY
        lines = [json.loads(line) for line in telemetry.read_text().splitlines()] if telemetry.is_file() else []
        norms = {line["step"]: line["clipping_norm"] for line in sorted(lines, key=lambda line: line["epoch"])}
        if not all(step in norms for step in range(1, steps + 1)):
            raise NotCompared(f"release/{TELEMETRY}", "does not hold the clipping norm of every step", "Restore it")
        norm_T = np.array([norms[step] for step in range(1, steps + 1)])
    batch_T = np.array([schedule.at(step) for step in range(steps)])
    return facts.noise_multiplier * (1 + facts.grid_margin) * norm_T / batch_T
