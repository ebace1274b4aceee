"""Seals the statement and the config: their checksums enter the ledger before they are written, and are stored beside the weights at the
end.

A job that repeats them checks them against their seals (`dpx.statement.agreement`), so that a number edited by hand is never read as a
claim. A statement is sealed, written, and noted as written. After a kill at any time, the file on disk is the one last noted or one that
was sealed since. So a kill never makes a run's own statement look edited, and an older statement that is put back is detected.
"""

import json
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.durable import write_durably
from dpx.files.file_checksums import seal
from dpx.files.records import FIX, from_json, to_json
from dpx.files.run_folder import CONFIG, RunFolder, read_json
from dpx.privacy.ledger import Ledger
from dpx.statement.statement_records import AnyRun, Statement, StudyStatement, require_sound

STATEMENT = "privacy.json"
# Format number of the statement of a run and of a study.
FORMAT = 3
VERSION = "Use the version of dpx that wrote it"


def read_node(path: Path, fix: str = FIX) -> dict[str, Any]:
    """Returns the JSON of the statement at `path`, which `seal` takes; raises `ConfigError` for another format."""
    node = read_json(path, fix)
    require(node.get("format") == FORMAT, path, f"was written with the format number {node.get('format')}, not {FORMAT}", VERSION)
    return node


def read_statement(path: Path, fix: str = FIX) -> Statement:
    """Returns the statement at `path`.

    Raises `ConfigError` for a file that is not a statement, has another format, or contradicts itself.
    """
    return statement_of(read_node(path, fix), path, fix)


def statement_of(node: dict[str, Any], path: Path, fix: str = FIX) -> Statement:
    """Returns the statement whose JSON is `node`; raises `ConfigError`, naming `path`, if it contradicts itself or has unknown fields."""
    statement = from_json(Statement, node, path, fix)
    require_sound(statement, path, fix)
    return statement


def read_run_statement(path: Path) -> AnyRun:
    """Returns the statement of a run at `path`; raises `ConfigError` as `read_statement` does, and for the statement of a search."""
    statement = read_statement(path)
    if isinstance(statement, StudyStatement):
        raise ConfigError(path, "is not the statement of one run, as that of a search's winner", "Read the file itself")
    return statement


def text_of(statement: Statement) -> str:
    """Returns the text of a statement as a file, after the same check that a reader makes."""
    require_sound(statement, "the statement")
    text = json.dumps(to_json(statement), indent=1, allow_nan=False) + "\n"
    assert from_json(Statement, json.loads(text), "the statement") == statement, "what is written would be read as something else"
    return text


def write_statement(folder: RunFolder, entered: Ledger, statement: AnyRun) -> None:
    """Seals `statement` and writes it to `release/privacy.json`."""
    text = text_of(statement)
    checksum = seal(json.loads(text))
    entered.seal_statement(checksum)
    write_durably(folder.release / STATEMENT, text)
    entered.note_stated(checksum)


def write_config(folder: RunFolder, entered: Ledger) -> None:
    """Seals the run's config and writes two files: the whole config in `private/`, and one without this machine's paths in `release/`."""
    texts = {folder.private / CONFIG: folder.config_yaml, folder.release / CONFIG: folder.released_config_yaml}
    entered.seal_configs(map(seal, texts.values()))
    for path, text in texts.items():
        write_durably(path, text)


def beside_weights(folder: RunFolder, statement: AnyRun) -> dict[str, str]:
    """Returns the seals that are stored with released weights: a copy of `release/` has no ledger to be checked against."""
    return {"statement": seal(to_json(statement)), "config": seal(folder.released_config_yaml)}
