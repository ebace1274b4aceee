"""Reads files of records: it finds the files of a declared path and their lines, and reports an error with the line."""

import contextlib
import glob
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require

# A longer record is a damaged file, or a corpus in one line: it would be held in memory several times.
LONGEST_LINE = 4 * 2**20


def named(paths: str | Sequence[str], suffixes: tuple[str, ...], key: str) -> list[Path]:
    """Returns the files that declared paths name: files, folders, and patterns if no file has that exact name.

    Each file is returned once, however often it is named: a pattern such as `texts/**` names a folder and every file in it. Raises
    `ConfigError` if no file is found, and for an empty path, which would be the working directory.
    """
    declared = [paths] if isinstance(paths, str) else paths
    require(
        all(path.strip() for path in declared), f"{key}=[{', '.join(declared)}]", "a path is empty", "Name a file, a folder or a pattern"
    )
    files = [file for path in declared for file in _of_path(path, suffixes, key)]
    kinds = " or ".join((", ".join(suffixes[:-1]), suffixes[-1]))
    require(bool(files), f"{key}=[{', '.join(declared)}]", "no file was found", f"Name {kinds} files, or a folder of them")
    once: dict[Path, Path] = {}
    for file in files:
        once.setdefault(file.resolve(), file)
    return list(once.values())


def _of_path(path: str, suffixes: tuple[str, ...], key: str) -> list[Path]:
    expanded = Path(path).expanduser()
    if not expanded.exists() and glob.has_magic(path):
        matches = sorted(glob.glob(str(expanded), recursive=True))
        require(bool(matches), path, "no file matches", f"Check {key}; relative paths start at the working directory")
        return [file for one in matches for file in _files(Path(one), suffixes, key)]
    return _files(expanded, suffixes, key)


def _files(path: Path, suffixes: tuple[str, ...], key: str) -> list[Path]:
    if path.is_dir():
        return [file for file in sorted(path.rglob("*")) if file.name.endswith(suffixes) and file.is_file()]
    require(path.exists(), path, "no such file", f"Check {key}; relative paths start at the working directory")
    fix = f"Use one of {', '.join(suffixes)}"
    if path.name.endswith((".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")):
        fix = f"Write data=table for labelled rows, or prompts and answers. {fix}"
    require(path.name.endswith(suffixes), path, "dpx cannot read this kind of file", fix)
    return [path]


def lines(file: Path, *, keep_blank: bool = False, keep_ends: bool = False, longest: int | None = None) -> Iterator[tuple[int, str]]:
    """Yields the numbered lines of a UTF-8 file, from 1; blank lines are left out unless they are kept, and so are line ends.

    Raises `ConfigError` for a line that is not UTF-8, or has more than `longest` bytes; no more than that is read.
    """
    number = 0
    with reading(file), _opened(file) as opened:
        while raw := opened.readline() if longest is None else opened.readline(longest + 1):
            number += 1
            if longest is not None and len(raw) > longest:
                raise ConfigError(
                    f"{file}:{number}", f"the line has more than {longest} bytes", "Write one record on each line, or shorten the record"
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"{file}:{number}"
                raise ConfigError(place, f"byte {error.start + 1} of the line is not UTF-8", "Convert the file to UTF-8") from None
            if keep_blank or line.strip():
                yield number, line if keep_ends else line.rstrip("\r\n")


def parsed(place: str, line: str) -> Any:
    """Returns the JSON value of a line; `place` names the line. Raises `ConfigError` for a line that is not JSON, or that Python cannot
    read."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(place, f"is not JSON ({error.msg})", "Write one JSON object on each line") from None
    except (ValueError, RecursionError):
        raise ConfigError(
            place, "contains a number with too many digits, or lists that are nested too deeply", "Shorten the record"
        ) from None


def require_characters(place: str, text: str) -> None:
    """Raises `ConfigError` for a lone surrogate, half of a character, which a JSON escape can name and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ConfigError(place, f"contains {half}, which is only half of a character", "Write the other half too, or remove it") from None


def digest_of(file: Path) -> bytes:
    """Returns the SHA-256 of the bytes of a file; raises `ConfigError` if it cannot be read."""
    with reading(file), file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _opened(file: Path) -> io.BufferedIOBase:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Converts an error of the operating system or gzip about `file` to a `ConfigError` of one line."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(file, f"is not a complete gzip file ({error})", "Copy it again") from None
    except FileNotFoundError:
        raise ConfigError(file, "no such file", "Check data.source.paths") from None
    except OSError as error:
        raise ConfigError(file, f"cannot be read ({error.strerror or error})", "Check the file and its permissions") from None
