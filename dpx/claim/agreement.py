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
# Under `private/`; each checkpoint is a folder named by the number of steps done.
CHECKPOINTS = "checkpoints"
# So begins the name of a damaged checkpoint that training moved aside.
DAMAGED = "damaged-"
SEAL = "seal"
OR_MOVE = "Restore the file, or move it away and start the run again"

Found = tuple[str, Mark | None, Any]


def check(folder: Path) -> Ledger | None:
    """The ledger of the run in `folder`, once every part of the folder was held against it.

    `None` where nothing of a run is in the private tree: a release/ that was handed on cannot be checked. Raises `ConfigError`, naming
    what is missing, where the ledger does not reach as far as what follows from it.
    """
    artefacts = list(_artefacts(folder))
    if not (folder / LEDGER).is_file():
        held = [name for name, _, _ in artefacts] + _held_in_private(folder)
        if all(name.startswith("release/") for name in held):
            return None
        raise _disagreement(folder, "is not there", held)
    ledger = Ledger(folder / LEDGER)
    for name, mark, content in artefacts:
        missing = _unmarked(ledger, content) if mark is None else ledger.missing(mark)
        if missing:
            raise _disagreement(folder, missing, [name])
    return ledger


def before_training(folder: Path) -> Ledger | None:
    """As `check`, for a run that begins or goes on: also raises where there is no ledger but anything of a run in the folder, whose
    charges would be forgotten."""
    held = [name for name, _, _ in _artefacts(folder)] + _held_in_private(folder)
    if held and not (folder / LEDGER).is_file():
        raise _disagreement(folder, "is not there", held)
    return check(folder)


def seal(content: Any) -> str:
    """A checksum of a statement or a config, written beside the weights it was released with: a copied `release/` has no ledger to be held
    against."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sealed(facts: dict[str, Any]) -> dict[str, Any]:
    """`facts` (JSON) with a checksum of their own, as they are saved beside a checkpoint."""
    return facts | {SEAL: seal(facts)}


def facts_of_checkpoint(checkpoint: Path) -> dict[str, Any] | None:
    """The facts that were saved beside a checkpoint; `None` where they are missing, cut short, or not as `sealed` made them."""
    try:
        facts = dict(json.loads((checkpoint / METADATA).read_text())["custom_metadata"])
        return facts if facts.pop(SEAL) == seal(facts) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _disagreement(folder: Path, missing: str, followers: list[str]) -> ConfigError:
    return ConfigError(f"{folder / LEDGER}, beside {several(followers)}", missing, RESTORE)


def _held_in_private(folder: Path) -> list[str]:
    """Root secrets and damaged checkpoints. Each was made after the ledger, so they show that there was one."""
    private = folder / "private"
    keys = [f"private/{path.name}" for path in sorted(private.glob("root_secret_*"))]
    return keys + [f"private/{CHECKPOINTS}/{path.name}" for path in _checkpoints(folder) if facts_of_checkpoint(path) is None]


def _checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, each named by its step alone, and damaged ones that were moved aside: their facts may still be whole."""
    found = (folder / "private" / CHECKPOINTS).glob("*")
    return sorted(path for path in found if path.name.isdigit() or path.name.startswith(DAMAGED))


def _artefacts(folder: Path) -> Iterator[Found]:
    """Everything that follows from noisy sums: its place in the folder, its mark if it has one, and what else tells where it stood."""
    for place in RELEASES:
        yield from _released(folder, place)
    # A checkpoint whose facts are damaged is never loaded: what it names is no longer known, and training goes on from the one before.
    for path in _checkpoints(folder):
        facts = facts_of_checkpoint(path)
        if facts is not None:
            yield f"private/{CHECKPOINTS}/{path.name}", mark_of(facts.get("ledger")), None


def _released(folder: Path, place: str) -> Iterator[Found]:
    statement, params, telemetry = (folder / place / name for name in ("privacy.json", "params", "telemetry.jsonl"))
    if statement.is_file():
        document = read_json(statement, OR_MOVE)
        yield f"{place}/privacy.json", mark_of(document.get("ledger", {}).get("mark")), document
    if (params / METADATA).is_file():
        yield f"{place}/params", _mark_of_params(params / METADATA), None
    if telemetry.is_file():
        # A last line cut short by a kill was not whole when it could be seen, and its step is charged with the others.
        *whole, _ = telemetry.read_text().split("\n")
        try:
            lines = [json.loads(line) for line in whole]
        except ValueError as error:
            raise ConfigError(telemetry, "was changed by hand", OR_MOVE) from error
        marks = {json.dumps(line.get("ledger")): mark_of(line.get("ledger")) for line in lines}
        yield from ((f"{place}/telemetry.jsonl", mark, None) for mark in marks.values())


def _mark_of_params(path: Path) -> Mark | None:
    return mark_of((read_json(path, OR_MOVE).get("custom_metadata") or {}).get("ledger"))


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
