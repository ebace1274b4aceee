"""Checks that the parts of a run folder agree.

Every file made from noisy sums names the ledger line that it follows from (`dpx.privacy.hash_chain`), and the statement and the config must
match their seals (`dpx.statement.seals`).

A ledger that was lost, cut short, edited or rolled back would charge for less than was released, and an edited statement or config would
claim what was not charged. Every command that starts, resumes, reads, accounts for, explains, collects or exports a run detects both, also
for a copy of its `release/`. The statement lists what cannot be detected.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from dpx.declaration import ConfigError, require, several
from dpx.durable import seal, write_durably
from dpx.files.run_folder import CONFIG, read_json
from dpx.files.weights import DAMAGED, METADATA, facts_of_checkpoint
from dpx.privacy.hash_chain import RESTORE, Mark, mark_of
from dpx.privacy.ledger import FORMAT, Ledger
from dpx.statement import seals
from dpx.statement.seals import STATEMENT, read_node

LEDGER = "private/ledger"
# The folders of released files; files of a trial that may not be published yet are moved to the second one.
RELEASES = ("release", "private/withheld")
# Under `private/`; each checkpoint is a folder named by the number of steps done.
CHECKPOINTS = "checkpoints"
OR_MOVE = "Restore the file, or move it away and start the run again"
OR_COPY = "Copy the whole release/ folder again"

Found = tuple[str, Mark | None, Any]


def check(folder: Path) -> Ledger | None:
    """Returns the ledger of the run in `folder`, after a check of every part of the folder against it.

    Returns `None` if the private tree holds nothing of a run: a copied release/ is checked only against its manifest and the seals beside
    its weights. Raises `ConfigError`, naming the file, if the ledger ends before a line that another file names, or if a statement or a
    config was not sealed.
    """
    return checked(folder)[0]


def checked(folder: Path) -> tuple[Ledger | None, Literal["ledger", "manifest"] | None]:
    """Returns what `check` does, and what the folder was checked against: `None` for a copied release/ without a manifest."""
    artefacts = list(_artefacts(folder))
    if not (folder / LEDGER).is_file():
        held = [name for name, _, _ in artefacts] + _held_in_private(folder)
        if all(name.startswith("release/") for name in held):
            return None, "manifest" if check_copy(folder / "release") else None
        raise _disagreement(folder, "is missing", held)
    ledger = Ledger(folder / LEDGER)
    for name, mark, _ in artefacts:
        missing = ledger.missing(mark)
        if missing:
            raise _disagreement(folder, missing, [name])
    # A statement or a config that was edited, or replaced by an older one. A run in progress may have written a new one since the ledger
    # was read.
    for name, _, content in artefacts:
        fits = content is None or seal(content) in ledger.statements
        fits = fits or seal(read_json(folder / name, OR_MOVE)) in Ledger(folder / LEDGER).statements
        require(fits, folder / name, "differs from the statement whose checksum is in private/ledger", OR_MOVE)
    for path in (folder / place / CONFIG for place in (*RELEASES, "private")):
        sealed = None if not path.is_file() else seal(path.read_text(errors="replace"))
        fits = sealed is None or sealed in ledger.configs or sealed in Ledger(folder / LEDGER).configs
        require(fits, path, "differs from the config whose checksum is in private/ledger", OR_MOVE)
    return ledger, "ledger"


def before_training(folder: Path) -> Ledger | None:
    """Checks a run that begins or resumes, as `check` does.

    It also raises `ConfigError` if the ledger is missing but the folder holds any other part of a run, whose charges would be forgotten,
    and for a ledger of an older format: its steps would be drawn otherwise than before.
    """
    held = [name for name, _, _ in _artefacts(folder)] + _held_in_private(folder)
    if held and not (folder / LEDGER).is_file():
        raise _disagreement(folder, "is missing", held)
    ledger = check(folder)
    require(
        ledger is None or ledger.format == FORMAT,
        folder / LEDGER,
        f"is in format {ledger.format if ledger else None}, not {FORMAT}: it is read, but this version draws the rows of a step otherwise",
        "Continue with the version of dpx that wrote it, or add replicate=1 for a new run",
    )
    return ledger


def check_copy(release: Path) -> bool:
    """Returns whether a copy of `release/`, or an export, agrees with its manifest; `False` without one.

    Raises `ConfigError` if it does not, and if the statement or the config of a copy is not the one that its weights were released with.
    """
    weights, statement, config = release / "params", release / STATEMENT, release / CONFIG
    told = _facts_beside(weights) if weights.is_dir() else None
    if told is None:
        return seals.check(release)
    if statement.is_file():
        fits = told.get("statement") == seal(read_node(statement, OR_COPY))
        require(fits, statement, "differs from the statement that was released with these weights", OR_COPY)
    if config.is_file():
        fits = told.get("config") == seal(config.read_text(errors="replace"))
        require(fits, config, "differs from the config that these weights were trained with", OR_COPY)
    return seals.check(release)


def seal_winner(release: Path, document: dict[str, Any]) -> None:
    """Records `document`, the statement of a search as JSON, as the statement of the weights in `release`.

    The statement of the trial itself does not charge for the choice among the trials.
    """
    metadata = release / "params" / METADATA
    if metadata.is_file():
        told = read_json(metadata)
        facts = _dict(told, "custom_metadata") | {"statement": seal(document)}
        write_durably(metadata, json.dumps(told | {"custom_metadata": facts}))
        seals.write(release)


def _disagreement(folder: Path, missing: str, followers: list[str]) -> ConfigError:
    return ConfigError(f"{folder / LEDGER}, beside {several(followers)}", missing, RESTORE)


def _held_in_private(folder: Path) -> list[str]:
    """Returns the root secrets, the whole config and damaged checkpoints. Each was made after the ledger, so it shows that a ledger
    existed."""
    private = folder / "private"
    kept = [f"private/{path.name}" for name in ("root_secret_*", CONFIG) for path in sorted(private.glob(name))]
    return kept + [f"private/{CHECKPOINTS}/{path.name}" for path in _checkpoints(folder) if facts_of_checkpoint(path) is None]


def _checkpoints(folder: Path) -> list[Path]:
    """Returns the committed checkpoints, each named by its step alone, and damaged ones that were moved aside but may still have their
    facts."""
    found = (folder / "private" / CHECKPOINTS).glob("*")
    return sorted(path for path in found if path.name.isdigit() or path.name.startswith(DAMAGED))


def _artefacts(folder: Path) -> Iterator[Found]:
    """Yields everything that follows from noisy sums: its path in the folder, its mark if it has one, and for a statement its content."""
    for place in RELEASES:
        statement, params, telemetry = (folder / place / name for name in (STATEMENT, "params", "telemetry.jsonl"))
        if statement.is_file():
            node = read_node(statement, OR_MOVE)
            # Not read as a record yet: an edited file may not be a valid record, and its seal shows that.
            yield f"{place}/{STATEMENT}", mark_of(_dict(node, "ledger").get("mark")), node
        if (params / METADATA).is_file():
            yield f"{place}/params", mark_of(_facts_beside(params).get("ledger")), None
        if telemetry.is_file():
            # A last line cut short by a kill was never visible as a whole line, and its step is charged with the others.
            try:
                *whole, _ = telemetry.read_text().split("\n")
                lines = [json.loads(line) for line in whole]
                marks = {json.dumps(line.get("ledger")): mark_of(line.get("ledger")) for line in lines}
            except (ValueError, AttributeError) as error:
                raise ConfigError(telemetry, "was changed by hand", OR_MOVE) from error
            yield from ((f"{place}/telemetry.jsonl", mark, None) for mark in marks.values())
    # A checkpoint whose facts are damaged is never loaded: the line it names is lost, and training resumes from the checkpoint before it.
    for path in _checkpoints(folder):
        facts = facts_of_checkpoint(path)
        if facts is not None:
            yield f"private/{CHECKPOINTS}/{path.name}", mark_of(facts.get("ledger")), None


def _facts_beside(weights: Path) -> dict[str, Any]:
    """Returns the facts written beside a tree of weights; empty if the file is missing."""
    return _dict(read_json(weights / METADATA, OR_MOVE), "custom_metadata") if (weights / METADATA).is_file() else {}


def _dict(document: dict[str, Any], name: str) -> dict[str, Any]:
    held = document.get(name)
    return held if isinstance(held, dict) else {}
