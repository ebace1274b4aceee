"""Brings the outcomes of points that a launcher such as `processes` or submitit runs in other processes to the command that launched them.

Such a launcher pickles the function that runs a point. The copy carries what the point needs to know of the command, and each point leaves
one file, on a file system that all processes share: in the folder of the sweep, since a refused point keeps no folder.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from dpx import console
from dpx.config.command_line import as_refused
from dpx.declaration import ConfigError
from dpx.durable import make_private, write_durably
from dpx.files.run_folder import Status
from dpx.launch.refused import NoteFolders
from dpx.launch.sweep import Outcome


class PointFailed(Exception):
    """An error of a point in another process, as text with the name of its class."""


class PointLost(PointFailed):
    """A point whose process ended before it told anything."""


@dataclasses.dataclass(frozen=True)
class Told:
    """What one point told: its outcome, the answer of its job for `--json`, and its error."""

    outcome: Outcome
    answer: Any
    error: Exception | None
    is_trial: bool


@dataclasses.dataclass(frozen=True)
class Command:
    """What other processes know of the command that launched them. `outcomes` is the folder for their files."""

    outcomes: Path
    form: console.Form
    existing: frozenset[Path]
    listed: frozenset[Path]

    @classmethod
    def of_this_process(cls) -> "Command":
        """Returns this command, after Hydra's callback at its start, and makes the folder for outcomes."""
        (sweep,) = NoteFolders.listed
        outcomes = sweep / f".launch-{secrets.token_hex(4)}"
        make_private(outcomes)
        return cls(outcomes, console.form(), NoteFolders.existing, NoteFolders.listed)

    def adopt(self) -> None:
        """Lets this process print and remove files as the process of the command does."""
        console.set_form(self.form)
        NoteFolders.existing, NoteFolders.listed = self.existing, self.listed

    def begin(self, number: int, folder: Path) -> None:
        """Notes that this process runs point `number` in `folder`, so that the command can say so if it is killed."""
        if self.outcomes.is_dir():
            write_durably(self.outcomes / f"{number}.begun", json.dumps([str(folder), os.getpid()]))

    def tell(self, number: int, told: Told) -> None:
        """Leaves the file of point `number`; nothing if the command has ended."""
        error = told.error
        refused = None if error is None else as_refused(error)
        node = {
            "outcome": dataclasses.asdict(told.outcome) | {"folder": str(told.outcome.folder)},
            "answer": told.answer,
            "refused": None if refused is None else [str(refused.value), refused.reason, refused.fix],
            "failed": None if error is None or refused is not None else _in_one_line(error),
            "is_lost": isinstance(error, PointLost),
            "is_trial": told.is_trial,
        }
        if self.outcomes.is_dir():
            write_durably(self.outcomes / f"{number}.json", json.dumps(node))

    def returned(self, composed: DictConfig, how: str) -> JobReturn:
        """Returns what Hydra wants to know of a point whose process has ended; one that told nothing has failed as `how` says."""
        number = composed.hydra.job.num
        # Listed, since a file system of several machines may remember for a while that a file was not there.
        left = os.listdir(self.outcomes)
        if f"{number}.json" not in left:
            begun = self.outcomes / f"{number}.begun"
            self.tell(number, _lost(composed, how, json.loads(begun.read_text()) if begun.name in left else None))
        score = json.loads((self.outcomes / f"{number}.json").read_text())["outcome"]["score"]
        overrides: Any = OmegaConf.to_container(composed.hydra.overrides.task)
        # A search maximises the score: 0 without one.
        return JobReturn(overrides=overrides, hydra_cfg=composed, status=JobStatus.COMPLETED, _return_value=score or 0.0)

    def gathered(self) -> Iterator[Told]:
        """Yields what the points told, in the order of the launch, and then removes the folder."""
        for path in sorted(self.outcomes.glob("*.json"), key=lambda path: int(path.stem)):
            node = json.loads(path.read_text())
            outcome = Outcome(**node["outcome"] | {"folder": Path(node["outcome"]["folder"]), "point": tuple(node["outcome"]["point"])})
            failed = PointLost if node["is_lost"] else PointFailed
            error = ConfigError(*node["refused"]) if node["refused"] else failed(node["failed"]) if node["failed"] else None
            yield Told(outcome, node["answer"], error, node["is_trial"])
        with contextlib.suppress(OSError):
            shutil.rmtree(self.outcomes)


def composed(context: HydraContext, config: DictConfig, number: int, overrides: Sequence[str]) -> DictConfig:
    """Returns the config of point `number`, with Hydra's own node."""
    found = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(found):
        found.hydra.job.id = found.hydra.job.num = number
    return found


def _lost(composed: DictConfig, how: str, begun: list[Any] | None) -> Told:
    """Returns what a point came to whose process ended as `how` says; `begun` are its folder and process, if it had begun."""
    hydra = composed.hydra
    path, job = Path(hydra.sweep.dir, str(hydra.sweep.subdir)).absolute(), str(hydra.runtime.choices.get("job"))
    path = path if begun is None else Path(begun[0])
    error = PointLost(f"{path.name}: its process ended ({how})")
    status = Status(path, job)
    # Another command may have begun there since.
    if begun is not None and (status.read().get("state"), status.read().get("pid")) == ("running", begun[1]):
        with contextlib.suppress(OSError):
            status.write("failed", error=str(error))
    outcome = Outcome(path, tuple(hydra.overrides.task), "failed", error=str(error), job=job)
    return Told(outcome, None, error, is_trial=composed.get("tune") is not None and job == "train")


def _in_one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, PointLost) else f"{type(error).__name__}: {words}"
