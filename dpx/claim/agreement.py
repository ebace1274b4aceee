"""Whether the parts of a run folder agree: everything made from noisy sums names the ledger line it follows from (`dpx.privacy.chain`).

A ledger that was lost, cut short, edited or set back would charge for less than was released. It is found here: by every command that
starts, goes on with, evaluates, accounts for, explains, collects or exports a run. What cannot be found is said in the statement.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, several
from dpx.privacy.chain import RESTORE, Mark, mark_of
from dpx.privacy.ledger import Ledger, Segments, decode
from dpx.privacy.segments import SEGMENTS
from dpx.run_folder import read_json

LEDGER = "private/ledger"
# Where released files lie; those of a trial that may not be seen yet are moved away.
RELEASES = ("release", "private/withheld")
# Orbax keeps what a caller adds to a checkpoint under this name, as JSON; read here without jax.
METADATA = "_CHECKPOINT_METADATA"
OR_MOVE = "Restore the file, or move it away and start the run again"

Found = tuple[str, Mark | None, Any]


def check(folder: Path) -> Ledger | None:
    """The ledger of the run in `folder`, once every part of the folder was held against it.

    `None` where nothing of a run is in the private tree: a release/ that was handed on cannot be checked. Raises `ConfigError`, naming
    what is missing, where the ledger does not reach as far as what follows from it.
    """
    artefacts = list(_artefacts(folder))
    if not (folder / LEDGER).is_file():
        released = all(name.startswith("release/") for name, _, _ in artefacts) and not _keys(folder)
        if released:
            return None
        raise _disagreement(folder, "is not there", [name for name, _, _ in artefacts] + _keys(folder))
    ledger = Ledger(folder / LEDGER)
    for name, mark, content in artefacts:
        missing = _unmarked(ledger, content) if mark is None else ledger.missing(mark)
        if missing:
            raise _disagreement(folder, missing, [name])
    return ledger


def before_training(folder: Path) -> Ledger | None:
    """As `check`, for a run that begins or goes on: also raises where there is no ledger but anything of a run in the folder, whose
    charges would be forgotten."""
    held = [name for name, _, _ in _artefacts(folder)] + _keys(folder)
    if held and not (folder / LEDGER).is_file():
        raise _disagreement(folder, "is not there", held)
    return check(folder)


def seal(content: Any) -> str:
    """A checksum of a statement or a config, written beside the weights it was released with: a copied `release/` has no ledger to be held
    against."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _disagreement(folder: Path, missing: str, followers: list[str]) -> ConfigError:
    return ConfigError(f"{folder / LEDGER}, beside {several(followers)}", missing, RESTORE)


def _keys(folder: Path) -> list[str]:
    """Files of root secrets. Each is drawn after the ledger was made, so they show that there was one."""
    return [f"private/{path.name}" for path in sorted((folder / "private").glob("root_secret_*"))]


def _artefacts(folder: Path) -> Iterator[Found]:
    """Everything that follows from noisy sums: its place in the folder, its mark if it has one, and what else tells where it stood."""
    for place in RELEASES:
        yield from _released(folder, place)
    # One that a kill left half-written or half-deleted was never whole, and nobody can load it; only a committed one is named by its step.
    for path in sorted((folder / "private" / "checkpoints").glob(f"[0-9]*/{METADATA}")):
        if not path.parent.name.isdigit():
            continue
        yield f"private/checkpoints/{path.parent.name}", _mark_of_checkpoint(path), None


def _released(folder: Path, place: str) -> Iterator[Found]:
    statement, params, telemetry = (folder / place / name for name in ("privacy.json", "params", "telemetry.jsonl"))
    if statement.is_file():
        document = read_json(statement, OR_MOVE)
        yield f"{place}/privacy.json", mark_of(document.get("ledger", {}).get("mark")), document
    if (params / METADATA).is_file():
        yield f"{place}/params", _mark_of_checkpoint(params / METADATA), None
    if telemetry.is_file():
        # A last line cut short by a kill was not whole when it could be seen, and its step is charged with the others.
        *whole, _ = telemetry.read_text().split("\n")
        try:
            lines = [json.loads(line) for line in whole]
        except ValueError as error:
            raise ConfigError(telemetry, "was changed by hand", OR_MOVE) from error
        marks = {json.dumps(line.get("ledger")): mark_of(line.get("ledger")) for line in lines}
        yield from ((f"{place}/telemetry.jsonl", mark, None) for mark in marks.values())


def _mark_of_checkpoint(path: Path) -> Mark | None:
    return mark_of((read_json(path, OR_MOVE).get("custom_metadata") or {}).get("ledger")) if path.is_file() else None


def _unmarked(ledger: Ledger, content: Any) -> str | None:
    """Why an artefact without a mark does not follow from `ledger`, in words; `None` where it may. A statement from before there were
    chains still lists its steps."""
    if not ledger.was_unchained:
        return "is a chain, and that names no line of it"
    stated: Segments = (content or {}).get("ledger", {}).get(SEGMENTS, [])
    identity = (content or {}).get("ledger", {}).get("identity")
    if identity not in (None, ledger.identity):
        return f"is another one ({ledger.identity}) than the one it states ({identity})"
    lost = {(origin, step) for origin, step, _ in decode(stated)} - {(origin, step) for origin, step, _ in decode(ledger.segments())}
    return f"lacks {len(lost)} of the steps it states" if lost else None
