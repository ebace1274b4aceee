"""Holds the records of `chain.json`, the statement of a chain, and seals it as the statement of a run is sealed (`dpx.statement.seals`).

Its checksum is stored in `private/` of the chain's folder before the statement is written, and the checksums of earlier ones are dropped
after that. So a kill never makes a chain's own statement look edited, and an older statement that is put back is detected. The statement
names each stage's ledger and the checksum of each stage's own statement: a stage that was edited, or replaced by another run, is detected
too.
"""

import dataclasses
import json
import secrets
from pathlib import Path
from typing import Any, Literal

from dpx.declaration import ConfigError, require
from dpx.durable import seal
from dpx.files.records import described, from_json, record, to_json
from dpx.files.run_folder import RunFolder, read_json, write_json
from dpx.privacy.declared_privacy import UnitFacts
from dpx.statement import agreement, seals
from dpx.statement.received import CheckedBy
from dpx.statement.seals import CHAIN
from dpx.statement.statement_records import Epsilons

STATEMENT = CHAIN
# Format number of the statement of a chain; before 3 it had no release id.
FORMAT = 3


@record
class FedStage:
    """One run of a stage, and the stages that feed it."""

    stage: str = described("Name of the stage.")
    point: str = described("Its place in the sweep of the stage; empty without one.")
    folder: str = described("Name of its run folder, beside that of the chain.")
    init: str | None = described("The stage whose weights it starts from; null without one.")
    vocabulary: str | None = described("The stage whose vocabulary it reads; null where it reads or fits its own.")


@record
class StageFacts(FedStage):
    """One run of a stage, as it ran."""

    job: Literal["train", "prepare"] = described("Whether it trains, or prepares text alone.")
    provenance: str | None = described("`public` where the user vouches that none of its text needs protection.")
    disjoint_from: tuple[str, ...] = described("Stages with which it shares no unit, by the user's word.")
    state: Literal["finished", "not_run"] = described("Whether it has run to its end.")
    identity: str | None = described("Name of its ledger; null before it has one.")
    guarantee: str | None = described("The guarantee in its statement; null before it has one, and of a stage that trains nothing.")
    epsilon: Epsilons = described("The headline of its statement, by accountant.")
    compared_by: str | None = described("The rows that its points are compared by: held-out rows, or the test set itself.")
    statement: str | None = described("Checksum of its own statement; null before it has one.", default=None)


@record
class Protected:
    """What is claimed of the protected text of one stage, when everything that the chain releases is seen."""

    stage: str = described("Name of the stage.")
    protects: str = described("One unit of it, as text.")
    unit: UnitFacts = described("The record of its units.")
    delta: float = described("Delta of the claim.")
    accountant: str = described("The accountant whose epsilon is the headline.")
    composed_with: tuple[str, ...] = described("Stages that may hold the same units and whose steps are charged here too.")
    guarantee: str = described("`dp`, `none`, or `dp_by_<package>`.")
    reasons: tuple[str, ...] = described("Reasons against a guarantee; empty for a stage with one.")
    epsilon: Epsilons = described("Epsilon of all these stages together, by accountant; empty without a proof.")


@record
class ChainClaim:
    """The claim of all stages together."""

    guarantee: str = described("`dp` where every private stage has a guarantee, `none`, `dp_by_<package>`, or `not_private`.")
    reasons: tuple[str, ...] = described("Reasons against a guarantee; empty for a chain with one.")
    protects: tuple[Protected, ...] = described("One entry for each private stage.")
    assumptions: tuple[str, ...] = described("What must be true, beside the assumptions of each stage's own statement.")
    not_covered: tuple[str, ...] = described("What the claim does not cover, in sentences.")


@record
class ChainStatement:
    """The statement of a chain: what each of its stages protects."""

    kind: Literal["chain"] = "chain"
    format: int = described("Format number of this file.", default=FORMAT)
    release: str = described("Random id of the release, which its manifest repeats; empty before it is written.", default="")
    name: str = described("Name of the chain.")
    replicate: int = described("Number of the repeat.")
    claim: ChainClaim = described("What all stages together protect.")
    stages: tuple[StageFacts, ...] = described("Every run of every stage, in the order in which they run.")


SEALS = "chain_seals.json"
_AGAIN = "Restore the file, or move it away and run the chain again: it writes a new file and trains nothing that has finished"


def write(folder: RunFolder, stated: ChainStatement) -> None:
    """Seals `stated` and writes it to `release/chain.json`, with the manifest of the release."""
    release = seals.stated_id(folder.release) or secrets.token_hex(8)
    node = json.loads(json.dumps(to_json(dataclasses.replace(stated, release=release))))
    place, checksum = folder.made_private() / SEALS, seal(node)
    earlier = _sealed(folder.path)
    write_json(place, {"sealed": list(dict.fromkeys([*earlier, checksum]))})
    write_json(folder.made_release() / STATEMENT, node)
    write_json(place, {"sealed": [checksum]})
    seals.write(folder.release)


def read(folder: Path) -> tuple[ChainStatement, CheckedBy] | None:
    """Returns the statement in the folder of a chain and what it was checked against; `None` before there is one.

    It is the chain's own seal, or for a copy of `release/` alone its manifest. Raises `ConfigError` for a statement that differs from them,
    and for one whose seal is missing beside the rest of `private/`.
    """
    path = folder / "release" / STATEMENT
    if not path.is_file():
        return None
    node, sealed = read_json(path, _AGAIN), _sealed(folder)
    require(node.get("format") == FORMAT, path, f"was written with the format number {node.get('format')}, not {FORMAT}", seals.VERSION)
    if sealed:
        require(seal(node) in sealed, path, f"differs from the statement whose checksum is in private/{SEALS}", _AGAIN)
    else:
        require(not (folder / "private").is_dir(), path, f"its checksum is missing: private/{SEALS} is not there", _AGAIN)
    checked_by: CheckedBy = "ledger" if sealed else "manifest" if seals.check(path.parent) else None
    return from_json(ChainStatement, node, path, _AGAIN), checked_by


def check(folder: Path) -> tuple[ChainStatement, CheckedBy] | None:
    """Returns what `read` returns, after a check of every finished stage beside the chain's folder against what was stated of it.

    Raises `ConfigError` for a stage whose ledger, statement or headline differs; a stage whose folder is not there is not checked.
    """
    found = read(folder)
    told, again = f"{folder.name}/release/{STATEMENT}", "Restore the folder, or run the chain again: it states what is there now"
    for one in found[0].stages if found else ():
        place = folder.parent / one.folder
        if one.state != "finished" or one.job != "train" or not (place / "release").is_dir():
            continue
        entered, file = agreement.check(place), place / "release" / seals.STATEMENT
        identity = None if entered is None else entered.identity
        require(identity in (None, one.identity), place, f"holds another run than {told} names", again)
        require(file.is_file(), file, f"is missing, and {told} names it", again)
        if one.statement is not None:
            require(checksum_of(place) == one.statement, file, f"differs from the statement of this stage that {told} was made from", again)
            continue
        stated = seals.read_run_statement(file)
        alike = (stated.guarantee, dict(stated.epsilon)) == (one.guarantee, dict(one.epsilon))
        require(alike, f"{folder / 'release' / STATEMENT}: stage {one.stage}", "differs from the stage's own statement", again)
    return found


def checksum_of(stage: Path) -> str | None:
    """Returns the checksum of the statement of a stage; `None` if the stage has none."""
    file = stage / "release" / seals.STATEMENT
    return seal(seals.read_node(file)) if file.is_file() else None


def _sealed(folder: Path) -> list[str]:
    """Returns the checksums of the statements that may be in the chain's folder."""
    path = folder / "private" / SEALS
    if not path.is_file():
        return []
    held: Any = read_json(path, _AGAIN).get("sealed")
    if not isinstance(held, list) or not held or not all(isinstance(one, str) for one in held):
        raise ConfigError(path, "holds no checksum", _AGAIN)
    return held
