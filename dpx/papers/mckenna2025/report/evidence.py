"""What the page is drawn from beside results.csv: one tidy table of measured losses, and the tables of analyses.

`measurements.csv` is of the laptop's grid (`dpx.scaling.measurements`); `analyses/<name>.json` are the tables of the latest run of each.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dpx.declaration import ConfigError
from dpx.durable import write_durably
from dpx.run_folder import read_json
from dpx.scaling.measurements import NUMBERS, TEXT, Measurements
from dpx.scaling.runs import measured
from dpx.table import Table

GRID = "laptop_mckenna_grid-"
_RUN = ("model", "noise_batch_ratio", "learning_rate", "replicate", "batch_size", "sequence_length")


def fill_measurements(outputs: Path, home: Path) -> list[str]:
    """Runs of the grid under `outputs` replace their own rows; rows of runs that are gone stay. Returns what could not be read."""
    try:
        fresh, left_out = measured(outputs, GRID)
    except ConfigError:
        return []
    place = home / "measurements.csv"
    (merged(Measurements.read(place), fresh) if place.exists() else fresh).write(place)
    return left_out


def merged(kept: Measurements, fresh: Measurements) -> Measurements:
    """The measurements of both, in the order of runs; of a run that both have, those of `fresh`."""
    new = set(_runs(fresh))
    stays = kept.where(np.array([run not in new for run in _runs(kept)], bool))
    both = Measurements(**{name: np.concatenate([getattr(stays, name), getattr(fresh, name)]) for name in (*TEXT, *NUMBERS)})
    return both.where(_order(both))


def _order(table: Measurements) -> np.ndarray:
    keys = (table.step, table.sequence_length, table.batch_size, table.replicate, table.learning_rate, table.noise_batch_ratio)
    return np.lexsort((*keys, table.parameters))


def _runs(table: Measurements) -> list[tuple[Any, ...]]:
    return list(zip(*(getattr(table, name).tolist() for name in _RUN), strict=True))


def fill_analyses(outputs: Path, home: Path) -> list[str]:
    """The latest run of every analysis of the paper; a line on each that could not be read. One that broke wrote no tables."""
    left_out = []
    for path in sorted(outputs.glob("mckenna_*/release/analysis.json"), key=lambda path: path.stat().st_mtime):
        try:
            document = read_json(path)
        except ConfigError as error:
            left_out.append(str(error))
            continue
        (home / "analyses").mkdir(parents=True, exist_ok=True)
        write_durably(home / "analyses" / f"{document['name']}.json", json.dumps(document, indent=1) + "\n")
    return left_out


def tables(home: Path, name: str) -> dict[str, Table]:
    """Tables of an analysis by name, those without rows left out; none where it has not run."""
    path = home / "analyses" / f"{name}.json"
    if not path.exists():
        return {}
    by_name = {}
    for table in read_json(path)["tables"]:
        if table["rows"]:
            rows = tuple(tuple(row.values()) for row in table["rows"])
            by_name[table["name"]] = Table(table["name"], tuple(table["rows"][0]), rows, table["title"], tuple(table["notes"]))
    return by_name
