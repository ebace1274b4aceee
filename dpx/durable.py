"""Files that are whole after a power cut: the old content or the new one, never a part."""

import os
import secrets
from pathlib import Path


def write_durably(path: Path, data: str | bytes) -> None:
    """Puts `data` at `path` atomically, making its folder where needed; content and name are on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(draft, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Makes a directory's entries durable, so that a file created in it outlives a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
