"""Reads measurements from run folders: the mean training loss of every 100 steps, as McKenna et al. 2025 record it (section 3.3)."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from dpx.cost.measurements import Measurements
from dpx.declaration import require
from dpx.files import results
from dpx.statement import agreement
from dpx.statement.seals import STATEMENT, read_statement
from dpx.statement.statement_records import RunStatement

RECORD_EVERY = 100
# The settings that identify a run of a table.
SETTINGS = ("model", "parameters", "noise_batch_ratio", "learning_rate", "replicate", "batch_size", "sequence_length")


def record_means(losses: np.ndarray, is_drawn: np.ndarray, every: int = RECORD_EVERY) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps done, mean loss) of every whole window of `every` steps.

    A step in which no example `is_drawn` has no loss and does not count; an incomplete window, or one of such steps alone, is left out. A
    loss that is not finite makes its mean not finite.
    """
    whole = len(losses) // every
    windows, is_drawn = (values[: whole * every].reshape(whole, every) for values in (losses, is_drawn))
    drawn = is_drawn.sum(1)
    some = drawn > 0
    return (every * np.arange(1, whole + 1))[some], np.where(is_drawn, windows, 0.0).sum(1)[some] / drawn[some]


def measured(outputs: Path, match: str = "", every: int = RECORD_EVERY) -> tuple[Measurements, list[str]]:
    """Returns the measurements of every run under `outputs` whose folder begins with `match`, and a line on each omitted folder.

    A run counts as far as it went. A folder is omitted if it could not be read, or has the same settings as a run that went as far.

    Raises `ConfigError` where nothing is found.
    """
    kept: dict[tuple, tuple[str, list[dict[str, Any]]]] = {}
    left_out = []
    named = sorted(path for path in outputs.glob("*") if path.name.startswith(match))
    for folder in (path for path in named if (path / "private" / "metrics.jsonl").exists()):
        try:
            found = folder.name, _rows(folder, every)
        # A folder that cannot be read does not stop the others.
        except Exception as error:
            left_out.append(f"{folder.name}: not readable ({type(error).__name__}: {error})")
            continue
        if not found[1]:
            continue
        settings = tuple(found[1][0][name] for name in SETTINGS)
        if settings in kept:
            shorter, found = sorted((found, kept[settings]), key=lambda one: len(one[1]))
            left_out.append(f"{shorter[0]}: the settings of {found[0]}; give one of them its own replicate")
        kept[settings] = found
    rows = [row for _, rows in kept.values() for row in rows]
    require(
        bool(rows), f"{outputs}/{match}*", "no run in this folder has a record of its training loss", "Name the folder that holds the runs"
    )
    return Measurements.from_rows(rows), left_out


def shipped() -> Path:
    """Returns the table of losses that comes with dpx: `laptop/mckenna_grid`, on public text, as far as it has been trained."""
    package = Path(__file__).parent
    in_wheel = package / "laptop_grid.csv"
    return in_wheel if in_wheel.exists() else package.parents[1] / "experiments" / "mckenna2025" / "measurements.csv"


def load(place: str | Path, match: str = "") -> tuple[Measurements, list[str]]:
    """Returns the measurements of a CSV table (`Measurements.read`) or of a folder of runs (`measured`).

    Raises `ConfigError` if nothing is there.
    """
    path = Path(place)
    require(path.exists(), path, "no such file or folder", "Name a CSV table of measurements, or a folder that contains runs")
    return measured(path, match) if path.is_dir() else (Measurements.read(path), [])


def _rows(folder: Path, every: int) -> list[dict[str, Any]]:
    from dpx.config import place_of, read

    agreement.check(folder)
    config = read(place_of(folder))
    lines = results.read(folder / "private")
    steps = [line["step"] for line in lines]
    require(steps == list(range(1, len(steps) + 1)), folder.name, "the record of its losses has gaps", "Resume the run")
    losses, is_drawn = (np.array([line.get(name, math.nan) for line in lines]) for name in ("train/loss", "train/examples"))
    steps_done, means = record_means(losses, is_drawn > 0, every)
    require(
        bool(np.isfinite(means).all()),
        folder.name,
        "its losses include a value that is not a finite number",
        "Remove the run, or lower its learning rate",
    )
    same = _knobs(config, folder)
    return [same | {"step": step, "loss": loss} for step, loss in zip(steps_done, means, strict=True)]


def _knobs(config: Any, folder: Path) -> dict[str, Any]:
    """Returns the settings that identify a run; a run without privacy has ratio 0 and counts as one without noise."""
    batch_size = config.batch_schedule.size
    noise = config.noise
    if "noise_batch_ratio" in noise:
        ratio = noise.noise_batch_ratio
    elif "noise_multiplier" in noise:
        ratio = noise.noise_multiplier / batch_size
    else:
        claim = read_statement(folder / "release" / STATEMENT)
        sigma = claim.mechanism.noise_multiplier if isinstance(claim, RunStatement) else None
        ratio = 0.0 if sigma is None else sigma / batch_size
    return {
        "model": config.model.name,
        "parameters": _parameters(config),
        "noise_batch_ratio": ratio,
        "learning_rate": config.lr_schedule.learning_rate,
        "replicate": config.replicate,
        "batch_size": batch_size,
        "sequence_length": config.data.sequence_length,
    }


def _parameters(config: Any) -> int:
    """Returns the exact number of parameters of the model and its head at the declared vocabulary."""
    from dpx.config import build

    experiment, _ = build(config)
    return sum(math.prod(shape) for shape in experiment.task.parameter_shapes(experiment.model, experiment.vocabulary_size).values())
