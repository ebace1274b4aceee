"""Writes and checks the manifest of a release: the size and the SHA-256 of every file that a run released, or of every file of an export.

The digests are those of released files alone: none is of data, of rows or of a prepared store. The statement is among these files, and the
manifest repeats the random id that the statement holds, so a statement beside other weights than its own is detected. A file that a job
adds to `release/` later, such as `account.json`, can be made again from these files, and is not listed.

It shows accidents and edits. Somebody who writes another statement can also write its manifest: what a consistent release says is the
word of its sender.
"""

from pathlib import Path, PurePosixPath
from typing import Any

from dpx.declaration import require
from dpx.files import file_checksums
from dpx.files.records import described, from_json, record, to_json
from dpx.files.run_folder import CONFIG, read_json, write_json
from dpx.statement.seals import STATEMENT

MANIFEST = "dpx_manifest.json"
# The statement of a chain, whose folder releases nothing else: each of its stages is a run with its own folder.
CHAIN = "chain.json"
FORMAT = 1
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
    digests = {name: FileDigest(**file_checksums.of_file(folder / name)) for name in _released(folder)}
    write_json(folder / MANIFEST, to_json(ReleaseManifest(format=FORMAT, release=stated_id(folder), files=digests)))


def check(folder: Path) -> bool:
    """Returns whether every file of a release is the one that its manifest lists; `False` without a manifest.

    Raises `ConfigError`, naming the file, if one differs, is missing, or is read beside the listed ones, and if the statement has another
    id than the manifest.
    """
    place = folder / MANIFEST
    if not place.is_file():
        return False
    node = read_json(place, AGAIN)
    require(node.get("format") == FORMAT, place, f"is in format {node.get('format')}, not {FORMAT}", "Use the version of dpx that wrote it")
    manifest = from_json(ReleaseManifest, node, place, AGAIN)
    require(_statement(folder).name in manifest.files, place, f"does not list {_statement(folder).name}", AGAIN)
    for name, known in manifest.files.items():
        is_inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        require(is_inside, place, f"lists {name}, which is not in this folder", AGAIN)
        require((folder / name).is_file(), folder / name, f"is missing, and {MANIFEST} lists it", AGAIN)
        is_same = FileDigest(**file_checksums.of_file(folder / name)) == known
        require(
            is_same, folder / name, f"differs from the file that was released with its statement ({MANIFEST} has another checksum)", AGAIN
        )
    added = [name for name in _released(folder) if name not in manifest.files and _is_read(folder, name)]
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


def _is_read(folder: Path, name: str) -> bool:
    return (folder / PARAMS).is_dir() or name in _READ_FROM_AN_EXPORT or (name.endswith(".safetensors") and "/" not in name)
