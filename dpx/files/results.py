"""Stores the measurements at a run's end in `private/results.json`, and says what they show.

They depend on protected and held-out text and are never in `release/`. An accuracy is stated with its number of rows and its 95 % interval
(Wilson 1927). A row counts once, also if a model answers several of its tokens: answers within a row are not independent, so the interval
of a token accuracy is rather too wide than too narrow.

Reads the measurements of a run's steps: `private/metrics.jsonl`, one JSON object for each step that was measured.

`step` counts from 1, as on the screen, in TensorBoard and in `release/telemetry.jsonl`: it is the number of steps done. A step that drew
no example has no loss, no accuracy and no share of clipped examples.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.files.records import described, from_json, record, to_json
from dpx.files.run_folder import read_json, write_json

LINES = "metrics.jsonl"


def read(private: Path) -> list[dict[str, Any]]:
    """Returns the lines in the private tree of a run; raises `ConfigError` if they are missing, damaged, or counted from 0."""
    path = private / LINES
    require(path.is_file(), path, "holds no measurements", "Train the run on this machine, or restore its private folder")
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    except ValueError as error:
        raise ConfigError(path, f"is not one JSON object a line ({error})", "Restore the file") from error
    require(all(isinstance(line, dict) for line in lines), path, "is not one JSON object a line", "Restore the file")
    require_counted_from_one(path, lines)
    return lines


def require_counted_from_one(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Raises `ConfigError` for lines that an older dpx wrote, which counted steps from 0."""
    is_old = any(line.get("step") == 0 for line in lines)
    require(
        not is_old, path, "counts its steps from 0, as an older dpx did", "Use the dpx that wrote it, or train again under another name"
    )


RESULTS = "results.json"
_FIX = "Restore the file, or remove it and run the same command again"


@record
class Results:
    """Holds the results of a finished run."""

    steps: int = described("Number of steps that ran.")
    metric: str = described("Name of the task's metric, by which runs are compared.")
    heldout: dict[str, float] = described("Metrics of the final parameters on held-out rows.")
    baselines: dict[str, float] = described("The task's metric of trivial models and of the untrained model.")
    test: dict[str, float] | None = described("Metrics on the test set; null if the data has none.", default=None)
    rows: int | None = described("Number of held-out rows; null in older runs.", default=None)
    test_rows: int | None = described("Number of rows of the test set; null without one, and in older runs.", default=None)
    best_step: int | None = described("Number of steps after which these weights were best; null where the last ones count.", default=None)


def write_results(private: Path, results: Results) -> None:
    """Writes `results` into the private tree of a run."""
    write_json(private / RESULTS, to_json(results))


def read_results(private: Path) -> Results:
    """Returns the results in the private tree of a run; raises `ConfigError` for a file without results."""
    return from_json(Results, read_json(private / RESULTS, _FIX), private / RESULTS, _FIX)


BASELINES = {
    "most_frequent_token": "most frequent public token",
    "most_frequent_class": "always answering the most frequent class",
    "most_frequent_choice": "always answering the most frequent choice",
    "most_frequent_labels": "always answering the most frequent labels",
    "constant": "always answering the same number",
    "untrained": "same model, untrained",
    "start": "the weights that it began with",
}
# Metrics from -1 to 1, which are no share of the rows.
CORRELATIONS = ("pearson", "spearman")
_NEAR_ONE = 1.0 - 1e-12
# The 97.5 % quantile of the standard normal distribution.
_Z = 1.959963984540054


def interval(accuracy: float, rows: int) -> tuple[float, float]:
    """Returns the 95 % interval (low, high) of an accuracy on `rows` independent rows, by Wilson's score (Wilson 1927)."""
    spread = _Z * math.sqrt(accuracy * (1.0 - accuracy) / rows + _Z**2 / (4.0 * rows**2))
    centre, scale = accuracy + _Z**2 / (2.0 * rows), 1.0 + _Z**2 / rows
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def interval_of(metric: str, value: float, rows: int | None) -> tuple[float, float] | None:
    """Returns the 95 % interval of a headline metric on `rows` rows: an accuracy's, or Pearson's correlation's (Fisher 1921).

    `None` without a number of rows, for fewer than four rows of a correlation, and for a value that is no such metric.
    """
    if metric in CORRELATIONS:
        if not rows or rows < 4 or not -1.0 <= value <= 1.0:
            return None
        z, spread = math.atanh(max(-_NEAR_ONE, min(_NEAR_ONE, value))), _Z / math.sqrt(rows - 3)
        return math.tanh(z - spread), math.tanh(z + spread)
    return interval(value, rows) if rows and 0.0 <= value <= 1.0 else None


def metric_in_words(metric: str, value: float, rows: int | None = None, digits: int = 2) -> str:
    """Returns a headline metric as text, with its interval if the number of rows is known; accuracies in percent with `digits` decimals."""
    of = (lambda one, digits: f"{one:.{digits + 1}f}") if metric in CORRELATIONS else (lambda one, digits: f"{one:.{digits}%}")
    between = interval_of(metric, value, rows)
    if between is None:
        return of(value, digits)
    low, high = between
    return f"{of(value, digits)} ({of(low, 1)} to {of(high, 1)}, {rows:,} rows)"


def not_above(results: Results) -> list[str]:
    """Returns the descriptions of the baselines that the held-out metric does not exceed by its interval; empty if it exceeds all.

    Without a number of rows, as in older runs, the value itself is compared.
    """
    value = results.heldout.get(results.metric, math.nan)
    low = (interval_of(results.metric, value, results.rows) or (value, value))[0]
    rows = f", {results.rows:,} rows" if results.rows else ""
    names = {name: BASELINES.get(name, name.replace("_", " ")) for name in results.baselines}
    shown = {name: metric_in_words(results.metric, base, digits=1) for name, base in results.baselines.items()}
    return [f"{names[name]} ({shown[name]}{rows})" for name, base in results.baselines.items() if not low > base]


def late_snr(private: Path) -> float | None:
    """Returns the mean gradient-SNR over the last quarter of the steps of a run; `None` if none was measured."""
    try:
        records = read(private)
        values = [float(one["grad/snr"]) for one in records[-max(1, len(records) // 4) :] if "grad/snr" in one]
    except (OSError, ValueError, TypeError):
        return None
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def nothing_learnt(results: Results, private: Path, can_train_less: bool) -> str | None:
    """Returns one sentence if the held-out metric is not above a baseline, with the gradient-SNR and what would raise it; else `None`.

    `can_train_less` is whether the run trained all parameters of weights that it began with, so that training a part is an alternative.
    """
    baselines = not_above(results)
    if not baselines:
        return None
    snr = late_snr(private)
    measured = "" if snr is None else f"; gradient-SNR {snr:.3g} in the last quarter of the steps"
    raised = "A larger batch_schedule.size raises the SNR"
    if can_train_less:
        raised = "A larger batch_schedule.size or fewer trained parameters (train=lora, train=last_layer) raise the SNR"
    return f"not above {', nor above '.join(baselines)}{measured}. {raised}; more steps or another lr_schedule.learning_rate use it better"
