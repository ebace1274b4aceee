"""Stores and reads what a run measured: at its end (`private/results.json`), and at its steps (`private/metrics.jsonl`, one object each).

They depend on protected and held-out text and are never in `release/`. An accuracy is stated with its number of rows and its 95 % interval
(Wilson 1927). A row counts once, also if a model answers several of its tokens: answers within a row are not independent, so the interval
of a token accuracy is rather too wide than too narrow.

The `step` of a measurement counts from 1, as on the screen, in TensorBoard and in `release/telemetry.jsonl`: it is the number of steps
done. A step that drew no example has no loss, no accuracy and no share of clipped examples.
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
    "constant_labels": "always answering the same labels",
    "untrained": "same model, untrained",
    "start": "the weights that it began with",
}
# Metrics from -1 to 1, which are no share of the rows.
CORRELATIONS = ("pearson", "spearman")
# Metrics of which less is better.
ERRORS = ("rmse",)
_NEAR_ONE = 1.0 - 1e-12
# The 97.5 % quantile of the standard normal distribution.
Z_95 = 1.959963984540054


def interval(accuracy: float, rows: int) -> tuple[float, float]:
    """Returns the 95 % interval (low, high) of an accuracy on `rows` independent rows, by Wilson's score (Wilson 1927)."""
    spread = Z_95 * math.sqrt(accuracy * (1.0 - accuracy) / rows + Z_95**2 / (4.0 * rows**2))
    centre, scale = accuracy + Z_95**2 / (2.0 * rows), 1.0 + Z_95**2 / rows
    # At the ends the difference is zero, but for rounding.
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return low if accuracy > 0.0 else 0.0, high if accuracy < 1.0 else 1.0


def interval_of(metric: str, value: float, rows: int | None) -> tuple[float, float] | None:
    """Returns the 95 % interval of a headline metric on `rows` rows: an accuracy's, or Pearson's correlation's (Fisher 1921).

    `None` without a number of rows, for fewer than four rows of a correlation, and for a value that is no such metric.
    """
    if metric in CORRELATIONS:
        if not rows or rows < 4 or not -1.0 <= value <= 1.0:
            return None
        z, spread = math.atanh(max(-_NEAR_ONE, min(_NEAR_ONE, value))), Z_95 / math.sqrt(rows - 3)
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


def shown_metrics(metrics: Mapping[str, float], headline: str, rows: int | None) -> dict[str, str]:
    """Returns each metric as text, the headline first; a metric with measured ends (`rmse_low`, `rmse_high`) has them beside it."""
    ends = {f"{name}_{end}" for name in metrics for end in ("low", "high")}
    shown = {headline: metric_in_words(headline, metrics[headline], rows)}
    for name in (name for name in metrics if name != headline and name not in ends):
        low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
        shown[name] = f"{metrics[name]:.4g}" + ("" if low is None or high is None else f" ({low:.4g} to {high:.4g})")
    return shown


def not_better(results: Results) -> dict[str, list[str]]:
    """Returns, by metric, the descriptions of the baselines that the held-out value is not better than, by its interval.

    Looked at are the headline, the other correlations (a constant has none), and each metric whose constant answer was measured beside it
    (`constant_<metric>`). Of an F1 the interval is an approximation, since F1 is not a share of rows. Without a number of rows, as in
    older runs, the value itself is compared.
    """
    rows = f", {results.rows:,} rows" if results.rows else ""
    found: dict[str, list[str]] = {}
    for metric, name, base in _baselines(results):
        value = results.heldout.get(metric, math.nan)
        if metric in ERRORS:
            is_better = results.heldout.get(f"{metric}_high", value) < base
        else:
            is_better = (interval_of(metric, value, results.rows) or (value, value))[0] > base
        if not is_better:
            shown = f"{base:.4g}" if metric in ERRORS else metric_in_words(metric, base, digits=1)
            by = "" if metric == results.metric else f" by {metric.replace('_', ' ')}"
            found.setdefault(metric, []).append(f"{BASELINES.get(name, name.replace('_', ' '))}{by} ({shown}{rows})")
    return found


def _baselines(results: Results) -> Iterable[tuple[str, str, float]]:
    """Yields (metric, name of a baseline, its value)."""
    yield from ((results.metric, name, base) for name, base in results.baselines.items())
    if results.metric in CORRELATIONS:
        yield from ((name, "constant", 0.0) for name in CORRELATIONS if name in results.heldout and name != results.metric)
    for name, base in results.heldout.items():
        if (metric := name.removeprefix("constant_")) != name:
            yield metric, "constant" if metric in ERRORS else "constant_labels", base


def late_snr(private: Path) -> float | None:
    """Returns the mean gradient-SNR over the last quarter of the steps of a run; `None` if none was measured."""
    try:
        records = read(private)
        values = [float(one["grad/snr"]) for one in records[-max(1, len(records) // 4) :] if "grad/snr" in one]
    except (OSError, ValueError, TypeError):
        return None
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def nothing_learnt(results: Results, private: Path, can_train_less: bool) -> tuple[str, str] | None:
    """Returns a heading and one sentence if a held-out metric is not better than a baseline of it; else `None`.

    The sentence has the gradient-SNR and what would raise it. The heading names the metrics, unless the headline is one of them.
    `can_train_less` is whether the run trained all parameters of weights that it began with, so that training a part is an alternative.
    """
    worse = not_better(results)
    if not worse:
        return None
    heading = "learnt nothing" if results.metric in worse else f"learnt nothing by {', '.join(worse).replace('_', ' ')}"
    compared = ", nor than ".join(base for bases in worse.values() for base in bases)
    snr = late_snr(private)
    measured = "" if snr is None else f"; gradient-SNR {snr:.3g} in the last quarter of the steps"
    raised = "A larger batch_schedule.size raises the SNR"
    if can_train_less:
        raised = "A larger batch_schedule.size or fewer trained parameters (train=lora, train=last_layer) raise the SNR"
    better = "more steps or another lr_schedule.learning_rate use it better"
    return heading, f"not better than {compared}{measured}. {raised}; {better}"
