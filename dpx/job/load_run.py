"""Loads a finished run in Python: its declaration, its parameters and its privacy statement."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from dpx import config
from dpx.config.experiment import Experiment
from dpx.declaration import require
from dpx.files.records import to_json
from dpx.pages import run_table
from dpx.statement.seals import STATEMENT


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

    def metrics(self) -> run_table.Records:
        """Returns the measurements of training, one record for each step that was measured, with `to_pandas()`.

        They are private: they depend on the data without noise. Raises `ConfigError` for a copy of `release/` alone.
        """
        return run_table.metrics(self.folder)


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
