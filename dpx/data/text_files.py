"""The user's own text: `.txt` and `.jsonl` files, plain or gzipped, and folders of them."""

import glob
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from dpx.data.declarations import TextFiles
from dpx.data.documents import Document
from dpx.declaration import Refused, require

_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


class TextFilesSource:
    """Documents of text files, one file after another, a line at a time.

    Without `unit_field` a document's unit is named by its content, not by file and line: a position would rename every
    later document when one is deleted.
    """

    def __init__(self, declared: TextFiles):
        self._declared = declared
        paths = [declared.paths] if isinstance(declared.paths, str) else declared.paths
        self._files = [file for path in paths for file in _named(path)]
        require(
            bool(self._files),
            f"data.source.paths=[{', '.join(paths)}]",
            "there is no file to read",
            "Name .txt or .jsonl files, or a folder of them",
        )

    def fingerprint(self) -> str:
        """Hash of the bytes of every file, in the order read."""
        whole = hashlib.sha256()
        for file in self._files:
            with _reading(file), file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
        return whole.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Raises `Refused`, naming file and line, for text that is missing, empty or not UTF-8, and for a line that is no record."""
        for file in self._files:
            is_empty = True
            for document in self._documents(file):
                is_empty = False
                yield document
            require(not is_empty, file, "is empty", "Remove it from data.source.paths, or give it text")

    def _documents(self, file: Path) -> Iterator[Document]:
        if ".jsonl" in file.suffixes[-2:]:
            for number, line in _lines(file):
                yield self._record(f"{file}:{number}", line)
        elif self._declared.document_per == "line":
            for _, line in _lines(file):
                yield Document(paragraphs=(line,))
        else:
            text = "\n".join(line for _, line in _lines(file, keep_blank=True))
            blocks = _BLANK_LINE.split(text) if _BLANK_LINE.search(text) else text.split("\n")
            paragraphs = tuple(" ".join(block.split()) for block in blocks if block.strip())
            if paragraphs:
                yield Document(paragraphs=paragraphs)

    def _record(self, place: str, line: str) -> Document:
        declared = self._declared
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise Refused(place, f"is not JSON ({error.msg})", "Write one JSON object a line") from None
        if not isinstance(record, dict) or not isinstance(record.get(declared.text_field), str):
            raise Refused(place, f"holds no text under {declared.text_field!r}", "Name the field with data.source.text_field")
        unit_id = None
        if declared.unit_field is not None:
            if not isinstance(record.get(declared.unit_field), str | int):
                raise Refused(place, f"names no unit under {declared.unit_field!r}", "Give every record one, or unset unit_field")
            unit_id = str(record[declared.unit_field])
        paragraphs = tuple(part for part in record[declared.text_field].split("\n") if part.strip())
        return Document(paragraphs=paragraphs, unit_id=unit_id)


def _named(path: str) -> list[Path]:
    """The files that one of the declared paths names: a file, a folder, or a pattern where nothing has that very name."""
    expanded = Path(path).expanduser()
    if not expanded.exists() and glob.has_magic(path):
        found = sorted(glob.glob(str(expanded), recursive=True))
        require(bool(found), path, "no file matches", "Check data.source.paths; relative paths start at the working directory")
        return [file for one in found for file in _files(Path(one))]
    return _files(expanded)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for file in sorted(path.rglob("*")) if file.name.endswith(_SUFFIXES) and file.is_file()]
    require(path.exists(), path, "no such file", "Check data.source.paths; relative paths start at the working directory")
    require(path.name.endswith(_SUFFIXES), path, "not a kind of file that is read", f"Use one of {', '.join(_SUFFIXES)}")
    return [path]


def _lines(file: Path, *, keep_blank: bool = False) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, from 1, without their ends; blank ones are left out unless kept."""
    number = 0
    with _reading(file), _opened(file) as opened:
        for number, raw in enumerate(opened, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                place = f"{file}:{number}"
                raise Refused(place, f"byte {error.start + 1} of the line is not UTF-8", "Convert the file to UTF-8") from None
            if keep_blank or line.strip():
                yield number, line


def _opened(file: Path) -> io.BufferedIOBase:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


class _reading:
    """Turns what the operating system or gzip says about `file` into one line."""

    def __init__(self, file: Path):
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
            raise Refused(self._file, f"is not a whole gzip file ({error})", "Copy it again") from None
        if isinstance(error, FileNotFoundError):
            raise Refused(self._file, "no such file", "Check data.source.paths") from None
        if isinstance(error, OSError):
            raise Refused(self._file, f"cannot be read ({error.strerror or error})", "Check the file and its permissions") from None
