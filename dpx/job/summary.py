"""Reads state, held-out metric and epsilon of the runs in a folder from their own files: for the table of a sweep and `job=list`."""

import dataclasses
from pathlib import Path

from dpx.claim.document import headline
from dpx.claim.seals import STATEMENT, read_run_statement
from dpx.console import figure
from dpx.results import BASELINES, accuracy_in_words, read_results
from dpx.run_folder import CONFIG, Status

# Jobs that train, the one that trains most often first.
_TRAINING = ("train", "resume", "chain")


@dataclasses.dataclass(frozen=True)
class Summary:
    """Describes one run as text; an entry is empty if the run's folder does not hold it."""

    folder: Path
    state: str
    metric: str
    epsilon: str

    @classmethod
    def of(cls, folder: Path) -> "Summary":
        """Reads a run's folder. What is missing or damaged is left empty: a table of runs does not check them."""
        return cls(folder, state_of(folder), accuracy_of(folder), epsilon_of(folder))


def runs_in(outputs: Path) -> list[Path]:
    """Returns the folders of runs below `outputs`, by name: those with a config in `release/`."""
    return sorted(path.parent.parent for path in outputs.glob(f"*/release/{CONFIG}"))


def accuracy_of(folder: Path) -> str:
    """Returns the held-out metric of a finished run with its interval; empty without one."""
    try:
        results = read_results(folder / "private")
        return accuracy_in_words(results.heldout[results.metric], results.rows)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def baselines_of(folder: Path) -> str:
    """Returns the metric of trivial models on the same held-out rows of a finished run; empty without any."""
    try:
        found = read_results(folder / "private").baselines
    except (OSError, ValueError, TypeError):
        return ""
    return ", ".join(f"{value:.2%} ({BASELINES.get(name, name.replace('_', ' '))})" for name, value in found.items())


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
