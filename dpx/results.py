"""Stores the measurements at a run's end in `private/results.json`: they depend on protected and held-out text and are never in
`release/`."""

import json
from pathlib import Path

from dpx.durable import write_durably
from dpx.records import described, from_json, record, to_json
from dpx.run_folder import read_json

RESULTS = "results.json"
_FIX = "Restore the file, or remove it and run the same command again"


@record
class Results:
    """Holds the results of a finished run."""

    steps: int = described("Number of steps.")
    metric: str = described("Name of the task's metric, by which runs are compared.")
    heldout: dict[str, float] = described("Metrics of the final parameters on held-out rows.")
    baselines: dict[str, float] = described("The task's metric of trivial models and of the untrained model.")
    test: dict[str, float] | None = described("Metrics on the test set; null if the data has none.", default=None)


def write_results(private: Path, results: Results) -> None:
    """Writes `results` into the private tree of a run."""
    write_durably(private / RESULTS, json.dumps(to_json(results), indent=2) + "\n")


def read_results(private: Path) -> Results:
    """Returns the results in the private tree of a run; raises `ConfigError` for a file without results."""
    return from_json(Results, read_json(private / RESULTS, _FIX), private / RESULTS, _FIX)
