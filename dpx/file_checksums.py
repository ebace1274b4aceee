"""Checksums of files: what a file held when it was written, to be compared before anything reads meaning into its bytes.

Files are read in blocks, so memory does not grow with their size.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_BYTES = 2**22

# {"bytes": size, "sha256": 64 hexadecimal digits}
Known = dict[str, Any]


def of_file(path: Path, read: Callable[[int], None] = lambda count: None) -> Known:
    """Size and SHA-256 of the file at `path`; `read` is told after each block how many bytes it had. Raises `OSError`."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            read(len(block))
    return {"bytes": size, "sha256": digest.hexdigest()}


def of_folder(folder: Path, without: str) -> dict[str, Known]:
    """Those of every file in `folder` and the folders in it, by its path from there; `without` names one to leave out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: of_file(path) for name, path in named.items() if name != without}
