"""Tables of runs and of their measurements, with numbers as numbers: for `dpx.runs`, `list.to` and the table beside a sweep.

State, held-out metric and epsilon of a run come from its own files. `load` gives a finished run in Python: its declaration, its parameters
and its privacy statement.
"""

import contextlib
import csv
import dataclasses
import fnmatch
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from dpx import config
from dpx.config.experiment import Experiment
from dpx.console import figure
from dpx.declaration import require
from dpx.durable import write_durably
from dpx.files import results
from dpx.files.records import to_json
from dpx.files.results import BASELINES, interval_of, metric_in_words, read_results
from dpx.files.run_folder import CONFIG, Status
from dpx.packages import is_installed, missing
from dpx.statement.seals import STATEMENT, read_run_statement
from dpx.statement.statement_records import headline

# Jobs that train, the one that trains most often first.
_TRAINING = ("train", "resume", "chain")


def runs_in(outputs: Path) -> list[Path]:
    """Returns the folders of runs below `outputs`, by name: those with a config in `release/`."""
    return sorted(path.parent.parent for path in outputs.glob(f"*/release/{CONFIG}"))


def accuracy_of(folder: Path) -> str:
    """Returns the held-out metric of a finished run with its interval; empty without one."""
    try:
        results = read_results(folder / "private")
        return metric_in_words(results.metric, results.heldout[results.metric], results.rows)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def baselines_of(folder: Path) -> str:
    """Returns the metric of trivial models on the same held-out rows of a finished run; empty without any."""
    try:
        results = read_results(folder / "private")
    except (OSError, ValueError, TypeError):
        return ""
    shown = {name: metric_in_words(results.metric, value) for name, value in results.baselines.items()}
    return ", ".join(f"{value} ({BASELINES.get(name, name.replace('_', ' '))})" for name, value in shown.items())


def epsilon_of(folder: Path) -> str:
    """Returns the epsilon that a run's statement gives by its own accountant, or its guarantee without one; empty without a statement."""
    try:
        stated = read_run_statement(folder / "release" / STATEMENT)
    except (OSError, ValueError):
        return ""
    epsilon = headline(stated)
    return f"guarantee {stated.guarantee}" if epsilon is None else figure(epsilon)


def state_of(folder: Path) -> str:
    """Returns the state of the newest job that trained in a run's folder."""
    entries = [Status(folder, job).read() for job in _TRAINING]
    states = [(str(entry.get("at", "")), str(entry.get("state", ""))) for entry in entries if entry]
    return max(states)[1] if states else "not trained"


# Differences in these do not make two runs different experiments.
_LEFT_OUT = ("job", "hydra", "mesh", "schedule", "microbatch", "profile", "run", "list", "plan", "point")
FORMATS = (".csv", ".json", ".parquet")


class Records(list[dict[str, Any]]):
    """A list of records, one dict each, of numbers, texts, truth values and None."""

    def to_pandas(self) -> Any:
        """Returns the records as a `pandas.DataFrame`; raises `ConfigError` where pandas is not installed."""
        if not is_installed("pandas"):
            raise missing("to_pandas()", "hub", "pandas")
        import pandas

        return pandas.DataFrame.from_records(self, columns=self.columns)

    @property
    def columns(self) -> list[str]:
        """The keys of all records, in the order in which they first appear."""
        return list(dict.fromkeys(key for record in self for key in record))


def runs(outputs: str | Path = "outputs", match: str = "*") -> Records:
    """Reads the runs of a folder, one record each.

    A record holds `run`, `state`, `steps`, `metric`, its `value` on `rows` held-out rows with the ends `low` and `high` of the 95 %
    interval, `guarantee`, `epsilon` by the run's accountant and `delta`, then each key of the config that differs between the runs. What
    a run does not have is None. Metrics depend on held-out rows and are not protected.

    Args:
        outputs: The folder of the runs.
        match: Pattern of the names of runs.

    Raises:
        ConfigError: If no run matches.
    """
    folders = [folder for folder in runs_in(Path(outputs)) if fnmatch.fnmatchcase(folder.name, match)]
    require(bool(folders), f"match={match}", f"{outputs} holds no run of this name", "Use match='*', or start a run")
    return records_of(folders)


def records_of(folders: Iterable[Path]) -> Records:
    """Returns the records of the runs in `folders`, as `runs` does. What is missing or damaged is None: a table does not check runs."""
    records, configs = Records(), []
    for folder in folders:
        record: dict[str, Any] = {"run": folder.name, "state": state_of(folder)}
        record |= dict.fromkeys(("steps", "metric", "value", "low", "high", "rows", "guarantee", "epsilon", "delta"))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            results = read_results(folder / "private")
            value, rows = results.heldout[results.metric], results.rows
            low, high = interval_of(results.metric, value, rows) or (None, None)
            record |= {"steps": results.steps, "metric": results.metric, "value": value, "low": low, "high": high, "rows": rows}
        with contextlib.suppress(OSError, ValueError):
            stated = read_run_statement(folder / "release" / STATEMENT)
            record |= {"guarantee": stated.guarantee, "epsilon": headline(stated), "delta": getattr(stated, "delta", None)}
        try:
            plain = OmegaConf.to_container(OmegaConf.load(folder / "release" / CONFIG), resolve=False)
        except Exception:
            plain = {}
        records.append(record)
        configs.append(_flat(plain))
    keys = list(dict.fromkeys(key for one in configs for key in one))
    differing = [key for key in keys if any(one.get(key) != configs[0].get(key) for one in configs)]
    for record, one in zip(records, configs, strict=True):
        record |= {key: one.get(key) for key in differing}
    return records


def metrics(folder: Path) -> Records:
    """Returns the measurements of a run (`dpx.files.results`); raises `ConfigError` for a run without any."""
    return Records(results.read(folder / "private"))


def write(records: Records, path: Path) -> None:
    """Writes `records` to `path`, whose ending is one of `FORMATS`.

    Raises `ConfigError` for another ending, a folder that does not exist, or where pyarrow is missing.
    """
    ending = path.suffix.lower()
    require_format(path)
    require(path.absolute().parent.is_dir(), path, "is in a folder that does not exist", "Name a file in an existing folder")
    if ending == ".json":
        write_durably(path, json.dumps(records, indent=1).encode() + b"\n")
    elif ending == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records.columns)
            writer.writeheader()
            writer.writerows(records)
    else:
        import pyarrow
        from pyarrow import parquet

        columns = {name: [one.get(name) for one in records] for name in records.columns}
        for name, values in columns.items():
            # A key may hold numbers in one run and a text in another; a column has one type.
            kinds = {type(value) for value in values if value is not None}
            if len(kinds) > 1:
                kind = float if kinds <= {int, float} else str
                columns[name] = [None if value is None else kind(value) for value in values]
        parquet.write_table(pyarrow.table(columns), path)


def require_format(path: Path, given: str | None = None) -> None:
    """Raises `ConfigError`, which begins with `given` or the path, for a table that cannot be written here."""
    ending = path.suffix.lower()
    require(ending in FORMATS, given or path, "is not a table that dpx writes", f"End the name with {', '.join(FORMATS)}")
    if ending == ".parquet" and not is_installed("pyarrow"):
        raise missing(given or str(path), "hub", "pyarrow")


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """Returns the values below a node by dotted key; a list is one text."""
    if isinstance(node, dict):
        kept = {str(key): value for key, value in node.items() if path or key not in _LEFT_OUT}
        return {full: value for key, one in kept.items() for full, value in _flat(one, f"{path}.{key}".lstrip(".")).items()}
    return {path: json.dumps(node) if isinstance(node, list) else node}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Holds a finished run.

    Attributes:
        experiment: What was declared.
        params: The released weights, a nested dict of arrays whose paths and shapes are the model's `parameter_shapes`.
        privacy: The content of `privacy.json`.
        is_checked: Whether the release was compared with the run's ledger; false for a copy of `release/` without `private/`.
        folder: The run's folder.
        checked_by: What it was compared with: "ledger", in a copy "manifest" (then it is the word of its sender), or `None`.
    """

    experiment: Experiment
    params: Any
    privacy: dict[str, Any]
    is_checked: bool
    checked_by: Literal["ledger", "manifest"] | None
    folder: Path

    def metrics(self) -> Records:
        """Returns the measurements of training, one record for each step that was measured, with `to_pandas()`.

        They are private: they depend on the data without noise. Raises `ConfigError` for a copy of `release/` alone.
        """
        return metrics(self.folder)


def load(run: str | Path) -> Loaded:
    """Loads a finished run: its declaration, its weights and its statement.

    Args:
        run: The run's folder, or its name if one run under `outputs/` has it.

    Returns:
        The run, as `Loaded`.

    Raises:
        ConfigError: If the run does not exist or released no weights, if its statement is missing, or if its files disagree with its
            ledger, or a copy of them with its manifest.
    """
    cfg, path = config.load(str(run))
    require((path / "release" / "params").exists(), f"run={path}", "contains no released parameters", "Let it train to its end")
    require((path / "release" / STATEMENT).exists(), f"run={path}", "contains no statement", f"Restore its release/{STATEMENT}")
    from dpx.files.orbax_checkpoints import released
    from dpx.statement import received

    found = received.read(path)
    experiment, _ = config.build(cfg)
    params, privacy = released(path / "release" / "params"), to_json(found.statement)
    return Loaded(experiment, params, privacy, found.checked_by == "ledger", found.checked_by, path)
