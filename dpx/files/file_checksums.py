"""Computes checksums of files, which are compared before a file's content is used.

Files are read in blocks, so memory does not grow with their size.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_BYTES = 2**22

# {"bytes": size, "sha256": 64 hexadecimal digits}
Known = dict[str, Any]


def of_file(path: Path, read: Callable[[int], None] = lambda count: None) -> Known:
    """Returns the size and the SHA-256 of the file at `path`; calls `read` after each block with its number of bytes. Raises `OSError`."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            read(len(block))
    return {"bytes": size, "sha256": digest.hexdigest()}


def of_folder(folder: Path, without: str) -> dict[str, Known]:
    """Returns the size and the SHA-256 of every file below `folder`, by its relative path; `without` names one file to leave out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: of_file(path) for name, path in named.items() if name != without}


def seal(content: Any) -> str:
    """Returns the checksum of a statement, over the value of its JSON, or of the text of a config."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
