"""Reads a release in one place: a run's own folder, a copy of its `release/`, or an export, for every job that repeats its guarantee.

There are three answers. A run's own folder is checked against its ledger. A release that was copied or exported is *consistent* if every
file is the one in its manifest (`dpx.statement.seals`): what it says is the word of its sender. Without a manifest it is *unchecked*,
which is printed beside its guarantee. A release that contradicts its manifest, its seals or its ledger is refused.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import dp_accounting

from dpx.declaration import require
from dpx.files.run_folder import read_json
from dpx.privacy.events import restore
from dpx.statement import agreement, seals
from dpx.statement.seals import STATEMENT, read_statement
from dpx.statement.statement_records import Statement

# What a release was checked against; `None` if nothing was there to check it against.
CheckedBy = Literal["ledger", "manifest"] | None
# The key of the mark in the files of an export. transformers keeps it in config.json and tokenizer_config.json when it saves the model or
# the tokenizer. PEFT drops a key that it does not know from adapter_config.json, with a warning, and keeps `auto_mapping`, which it reads
# only for a model without a task.
MARK = "dpx"
OF_ADAPTERS = "auto_mapping"
_MARKED = ("config.json", "tokenizer_config.json", "adapter_config.json")
_SAID: dict[CheckedBy, str] = {
    "ledger": "",
    "manifest": " (as its sender states: all files agree with the sender's manifest, and no ledger is here to compare them with)",
    None: " (unchecked: no manifest shows that this statement belongs to these weights)",
}


@dataclasses.dataclass(frozen=True)
class Received:
    """What was read: the statement, `None` if the folder has none, and what its files were checked against."""

    statement: Statement | None
    checked_by: CheckedBy

    @property
    def guarantee(self) -> str | None:
        return None if self.statement is None else self.statement.guarantee

    @property
    def facts(self) -> dict[str, Any]:
        """The guarantee and what it was checked against, for the answer of a job."""
        return {"guarantee": self.guarantee, "is_checked": self.checked_by == "ledger", "checked_by": self.checked_by}

    def in_words(self) -> str:
        """Returns the guarantee as text; where no ledger was compared with it, with a remark that says so."""
        return f"{self.guarantee}{said(self.checked_by)}"


def weakest(found: Iterable[CheckedBy]) -> CheckedBy:
    """Returns what all of several releases were checked against, at least."""
    every = set(found)
    return None if None in every else "manifest" if "manifest" in every else "ledger"


# What precedes a whole explanation or account of a release, where no ledger was compared with it.
HEADS: dict[CheckedBy, tuple[str, ...]] = {
    "ledger": (),
    "manifest": (
        "AS ITS SENDER STATES: the private/ folder of the run is missing; the files agree with the sender's manifest, but the statement is "
        "trusted without a ledger, and steps may be missing from it.",
    ),
    None: (
        "UNCHECKED: the private/ folder of the run is missing, so its statement is trusted without a check; steps may be missing from it.",
    ),
}


def said(checked_by: CheckedBy) -> str:
    """Returns the remark that follows a guarantee wherever it is printed; empty if it was checked against the run's ledger."""
    return _SAID[checked_by]


def read(folder: Path) -> Received:
    """Returns what the release in `folder` states and what it was checked against.

    `folder` is a run's folder, with its private tree or as a copy that has `release/` alone, or the folder of an export. Raises
    `ConfigError`, naming the file, if its parts contradict each other.
    """
    place = folder / "release" / STATEMENT
    if place.parent.is_dir():
        _, checked_by = agreement.checked(folder)
    else:
        # No file of the folder has the mark of another release than its statement.
        stated = seals.stated_id(folder)
        for name, one in marks(folder).items():
            reason = f"is of the release {one.get('release')}, but {STATEMENT} beside it is of {stated}"
            require(stated is None or one.get("release") == stated, folder / name, reason, seals.AGAIN)
        place, checked_by = folder / STATEMENT, "manifest" if agreement.check_copy(folder) else None
    return Received(read_statement(place) if place.is_file() else None, checked_by)


def mark(run: str, folder: Path) -> dict[str, Any]:
    """Returns the mark of an export of `run`, whose statement is in `folder`."""
    return {MARK: {"run": run, "release": seals.stated_id(folder)}}


def marks(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the marks of dpx in the files of `folder`, by file; files that another program saved again count too."""
    found = {}
    for name in _MARKED:
        # Reads regular files only: a named pipe in a folder from elsewhere may never end.
        facts = read_json(folder / name, seals.AGAIN) if (folder / name).is_file() else {}
        mapped = facts.get(OF_ADAPTERS)
        held = facts.get(MARK) or (mapped.get(MARK) if isinstance(mapped, dict) else None)
        if held is not None:
            found[name] = held if isinstance(held, dict) else {"run": str(held)}
    return found


def require_not_of_dpx(folder: Path, asked: str, has_card: bool) -> None:
    """Raises `ConfigError` for weights that a run of dpx trained, in an export or saved again from one: their cost must be charged.

    `has_card` says whether the model card beside them is an export's.
    """
    runs = [one.get("run") for one in marks(folder).values()]
    runs += [None for name in (seals.MANIFEST, STATEMENT) if (folder / name).is_file()] + [None] * has_card
    run = next((one for one in runs if one), None)
    fix = f"Use init=run init.run={run}" if run else "Use init=run with that run, or with a copy of its release/"
    require(not runs, asked, "contains weights that a run of dpx trained and exported", fix)


def recompute(document: dict[str, Any], epsilon_of: Callable[[dp_accounting.DpEvent], float]) -> float:
    """Returns the epsilon of the composed event that the statement lists; it needs only the JSON, no code of dpx."""
    parts: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(restore(item["event"]), item["count"]) for item in document["ledger"]["events"]
    ]
    return epsilon_of(dp_accounting.ComposedDpEvent(parts))
