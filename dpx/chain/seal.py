"""Seals the statement of a chain, as `dpx.claim.seals` does that of a run: its checksum is stored in `private/` of the chain's folder.

A checksum is stored before the statement is written, and the checksums of earlier ones are dropped after that. So a kill never makes a
chain's own statement look edited, and an older statement that is put back is detected. The statement names each stage's ledger and the
checksum of each stage's own statement: a stage that was edited, or replaced by another run, is detected too.
"""

import dataclasses
import json
import secrets
from pathlib import Path
from typing import Any

from dpx.chain.document import FORMAT, STATEMENT, ChainStatement, StageFacts
from dpx.claim import agreement, manifest, seals
from dpx.claim.received import CheckedBy
from dpx.declaration import ConfigError, require
from dpx.records import from_json, to_json
from dpx.run_folder import RunFolder, read_json, write_json

SEALS = "chain_seals.json"
_AGAIN = "Restore the file, or move it away and run the chain again: it writes a new file and trains nothing that has finished"


def write(folder: RunFolder, stated: ChainStatement) -> None:
    """Seals `stated` and writes it to `release/chain.json`, with the manifest of the release."""
    release = manifest.stated_id(folder.release) or secrets.token_hex(8)
    node = json.loads(json.dumps(to_json(dataclasses.replace(stated, release=release))))
    place, checksum = folder.made_private() / SEALS, seals.seal(node)
    earlier = _sealed(folder.path)
    write_json(place, {"sealed": list(dict.fromkeys([*earlier, checksum]))})
    write_json(folder.made_release() / STATEMENT, node)
    write_json(place, {"sealed": [checksum]})
    manifest.write(folder.release)


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
        require(seals.seal(node) in sealed, path, f"differs from the statement whose checksum is in private/{SEALS}", _AGAIN)
    else:
        require(not (folder / "private").is_dir(), path, f"its checksum is missing: private/{SEALS} is not there", _AGAIN)
    checked_by: CheckedBy = "ledger" if sealed else "manifest" if manifest.check(path.parent) else None
    return from_json(ChainStatement, node, path, _AGAIN), checked_by


def check(folder: Path) -> tuple[ChainStatement, CheckedBy] | None:
    """Returns what `read` returns, after a check of every finished stage beside the chain's folder against what was stated of it.

    Raises `ConfigError` for a stage whose ledger, statement or headline differs; a stage whose folder is not there is not checked.
    """
    found = read(folder)
    for one in found[0].stages if found else ():
        place = folder.parent / one.folder
        if one.state == "finished" and one.job == "train" and (place / "release").is_dir():
            _require_as_stated(folder, one, place)
    return found


def checksum_of(stage: Path) -> str | None:
    """Returns the checksum of the statement of a stage; `None` if the stage has none."""
    file = stage / "release" / seals.STATEMENT
    return seals.seal(seals.read_node(file)) if file.is_file() else None


def _require_as_stated(folder: Path, one: StageFacts, place: Path) -> None:
    entered, file = agreement.check(place), place / "release" / seals.STATEMENT
    told = f"{folder.name}/release/{STATEMENT}"
    again = "Restore the folder, or run the chain again: it states what is there now"
    identity = None if entered is None else entered.identity
    require(identity in (None, one.identity), place, f"holds another run than {told} names", again)
    require(file.is_file(), file, f"is missing, and {told} names it", again)
    if one.statement is not None:
        require(checksum_of(place) == one.statement, file, f"differs from the statement of this stage that {told} was made from", again)
        return
    stated = seals.read_run_statement(file)
    alike = (stated.guarantee, dict(stated.epsilon)) == (one.guarantee, dict(one.epsilon))
    require(alike, f"{folder / 'release' / STATEMENT}: stage {one.stage}", "differs from the stage's own statement", again)


def _sealed(folder: Path) -> list[str]:
    """Returns the checksums of the statements that may be in the chain's folder."""
    path = folder / "private" / SEALS
    if not path.is_file():
        return []
    held: Any = read_json(path, _AGAIN).get("sealed")
    if not isinstance(held, list) or not held or not all(isinstance(one, str) for one in held):
        raise ConfigError(path, "holds no checksum", _AGAIN)
    return held
