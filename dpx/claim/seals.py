"""The statement and the config are sealed: their checksums are in the ledger before they are written, and beside the weights at the end.

A job that repeats them checks them against their seals (`dpx.claim.agreement`), so that a number edited by hand is never read as a claim. A
statement is sealed, written, and noted as written. After a kill at any time, the file on disk is the one last noted or one that was sealed
since. So a kill never makes a run's own statement look edited, and an older statement that is put back is detected.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from dpx.declaration import require
from dpx.durable import write_durably
from dpx.privacy.ledger import Ledger
from dpx.run_folder import CONFIG, RunFolder, read_json

STATEMENT = "privacy.json"
# Format number of the statement of a run and of a study.
FORMAT = 2


def seal(content: Any) -> str:
    """A checksum of a statement, as the value of its JSON, or of the text of a config."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_statement(path: Path, fix: str = "Restore the file") -> dict[str, Any]:
    """The statement at `path`; raises `ConfigError` for a file that is not a statement, or has another format."""
    document = read_json(path, fix)
    found = document.get("format", FORMAT)
    require(found == FORMAT, path, f"is in format {found}, not {FORMAT}", "Use the version of dpx that wrote it")
    return document


def write_statement(folder: RunFolder, entered: Ledger, document: dict[str, Any]) -> None:
    """Seals `document` and writes it to `release/privacy.json`."""
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    checksum = seal(json.loads(text))
    entered.seal_statement(checksum)
    write_durably(folder.release / STATEMENT, text)
    entered.note_stated(checksum)


def write_config(folder: RunFolder, entered: Ledger) -> None:
    """Seals the run's config and writes it twice: whole under `private/`, without the paths of this machine in `release/`."""
    texts = {folder.private / CONFIG: folder.config_yaml, folder.release / CONFIG: folder.released_config_yaml}
    entered.seal_configs(map(seal, texts.values()))
    for path, text in texts.items():
        write_durably(path, text)


def beside_weights(folder: RunFolder, document: dict[str, Any]) -> dict[str, str]:
    """The seals that released weights carry: a copy of `release/` has no ledger to be checked against."""
    return {"statement": seal(document), "config": seal(folder.released_config_yaml)}
