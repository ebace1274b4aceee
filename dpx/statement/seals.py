"""Seals the statement and the config: their checksums enter the ledger before they are written, and are stored beside the weights at the
end.

A job that repeats them checks them against their seals (`dpx.statement.agreement`), so that a number edited by hand is never read as a
claim. A statement is sealed, written, and noted as written. After a kill at any time, the file on disk is the one last noted or one that
was sealed since. So a kill never makes a run's own statement look edited, and an older statement that is put back is detected.

The manifest of a release has the size and the SHA-256 of every file that a run released, or of every file of an export. The digests are
those of released files alone: none is of data, of rows or of a prepared store. The statement is among these files, and the manifest repeats
the random id that the statement holds, so a statement beside other weights than its own is detected. A file that a job adds to `release/`
later, such as `account.json`, can be made again from these files, and is not listed.

It shows accidents and edits. Somebody who writes another statement can also write its manifest: what a consistent release says is the
word of its sender.
"""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from dpx import durable
from dpx.declaration import ConfigError, require
from dpx.durable import seal, write_durably
from dpx.files.records import FIX, described, from_json, record, to_json
from dpx.files.run_folder import CONFIG, RunFolder, read_json, write_json
from dpx.privacy.ledger import Ledger
from dpx.statement.statement_records import AnyRun, Statement, StudyStatement, require_sound

STATEMENT = "privacy.json"
# Format number of the statement of a run and of a study.
FORMAT = 4
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


MANIFEST = "dpx_manifest.json"
# The statement of a chain, whose folder releases nothing else: each of its stages is a run with its own folder.
CHAIN = "chain.json"
MANIFEST_FORMAT = 1
PARAMS = "params"
TELEMETRY = "telemetry.jsonl"
AGAIN = "Copy the whole folder again from where it was made, or name other weights"
# In an export, beside the weights and files that are listed, what dpx, transformers and PEFT would read if it were there.
_READ_FROM_AN_EXPORT = frozenset(
    {
        *("config.json", "adapter_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
        *("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "dpx_config.yaml"),
        *("generation_config.json", "vocabulary_learnt_from.json"),
    }
)


@record
class FileDigest:
    """The size and the SHA-256 of a released file."""

    bytes: int = described("Its size in bytes.")
    sha256: str = described("Its SHA-256.")


@record
class ReleaseManifest:
    """Lists the files of a release."""

    format: int = described("Format number of this file.")
    release: str | None = described("Random id of the release, which is in its statement: the name of the ledger, or of a search's record.")
    files: dict[str, FileDigest] = described("Every released file, by its path in the folder.")


def release_id(statement: Any) -> str | None:
    """Returns the random id that a statement holds (its JSON): the name of the run's ledger, of the search's record, or a chain's own.

    It was drawn when the run, the search or the chain began, is kept by every resume, and does not depend on data.
    """
    if isinstance(statement, dict) and isinstance(statement.get("release"), str):
        return statement["release"]
    for holder in ("ledger", "record"):
        held = statement.get(holder) if isinstance(statement, dict) else None
        mark = held.get("mark") if isinstance(held, dict) else None
        if isinstance(mark, dict) and isinstance(mark.get("chain"), str):
            return mark["chain"]
    return None


def write(folder: Path) -> None:
    """Writes the manifest of a run's `release/`, or of an export, and is done when it is on disk. The statement must be there."""
    digests = {name: FileDigest(**durable.of_file(folder / name)) for name in _released(folder)}
    write_json(folder / MANIFEST, to_json(ReleaseManifest(format=MANIFEST_FORMAT, release=stated_id(folder), files=digests)))


def check(folder: Path) -> bool:
    """Returns whether every file of a release is the one that its manifest lists; `False` without a manifest.

    Raises `ConfigError`, naming the file, if one differs, is missing, or is read beside the listed ones, and if the statement has another
    id than the manifest.
    """
    place = folder / MANIFEST
    if not place.is_file():
        return False
    node = read_json(place, AGAIN)
    require(
        node.get("format") == MANIFEST_FORMAT,
        place,
        f"is in format {node.get('format')}, not {MANIFEST_FORMAT}",
        "Use the version of dpx that wrote it",
    )
    manifest = from_json(ReleaseManifest, node, place, AGAIN)
    require(_statement(folder).name in manifest.files, place, f"does not list {_statement(folder).name}", AGAIN)
    for name, known in manifest.files.items():
        is_inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        require(is_inside, place, f"lists {name}, which is not in this folder", AGAIN)
        require((folder / name).is_file(), folder / name, f"is missing, and {MANIFEST} lists it", AGAIN)
        is_same = FileDigest(**durable.of_file(folder / name)) == known
        require(
            is_same, folder / name, f"differs from the file that was released with its statement ({MANIFEST} has another checksum)", AGAIN
        )
    added = [name for name in _released(folder) if name not in manifest.files]
    if not (folder / PARAMS).is_dir():
        added = [name for name in added if name in _READ_FROM_AN_EXPORT or (name.endswith(".safetensors") and "/" not in name)]
    require(not added, folder / added[0] if added else folder, f"was not released with the other files: {MANIFEST} does not list it", AGAIN)
    own = stated_id(folder)
    require(own == manifest.release, _statement(folder), f"has the release id {own}, but {MANIFEST} has {manifest.release}", AGAIN)
    return True


def stated_id(folder: Path) -> str | None:
    """Returns the release id in the statement of `folder`; `None` without one."""
    place = _statement(folder)
    return release_id(read_json(place, AGAIN)) if place.is_file() else None


def _statement(folder: Path) -> Path:
    return folder / (CHAIN if (folder / CHAIN).is_file() else STATEMENT)


def _released(folder: Path) -> list[str]:
    """Returns the paths of what a run or a chain released in its `release/`, or of all files of an export."""
    params = folder / PARAMS
    if (folder / CHAIN).is_file():
        found = [folder / CHAIN]
    elif not params.is_dir():
        found = [path for path in folder.rglob("*") if path.is_file()]
    else:
        found = [path for name in (STATEMENT, CONFIG, TELEMETRY) if (path := folder / name).is_file()]
        found += [path for path in params.rglob("*") if path.is_file()]
    return sorted(name for path in found if (name := path.relative_to(folder).as_posix()) != MANIFEST)
