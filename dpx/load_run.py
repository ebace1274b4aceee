"""Loads a finished run in Python: its declaration, its parameters and its privacy statement."""

import dataclasses
from pathlib import Path
from typing import Any

from dpx import config
from dpx.claim.seals import STATEMENT, read_statement
from dpx.declaration import require
from dpx.experiment import Experiment
from dpx.records import to_json


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Holds a finished run.

    Attributes:
        experiment: What was declared.
        params: The released weights, a nested dict of arrays whose paths and shapes are the model's `parameter_shapes`.
        privacy: The content of `privacy.json`.
        is_checked: Whether the release was compared with the run's ledger; false for a copy of `release/` without `private/`.
    """

    experiment: Experiment
    params: Any
    privacy: dict[str, Any]
    is_checked: bool


def load(run: str | Path) -> Loaded:
    """Loads a finished run: its declaration, its weights and its statement.

    Args:
        run: The run's folder, or its name if one run under `outputs/` has it.

    Returns:
        The run, as `Loaded`.

    Raises:
        ConfigError: If the run does not exist or released no weights, if its statement is missing, or if its files disagree with its
            ledger.
    """
    cfg, path = config.load(str(run))
    require((path / "release" / "params").exists(), f"run={path}", "contains no released parameters", "Let it train to its end")
    require((path / "release" / STATEMENT).exists(), f"run={path}", "contains no statement", f"Restore its release/{STATEMENT}")
    from dpx.claim import agreement
    from dpx.training.checkpoint import released

    is_checked = agreement.check(path) is not None
    experiment, _ = config.build(cfg)
    params, privacy = released(path / "release" / "params"), to_json(read_statement(path / "release" / STATEMENT))
    return Loaded(experiment, params, privacy, is_checked)
