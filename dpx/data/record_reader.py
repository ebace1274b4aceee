"""Reads records of `.tsv`, `.csv`, `.jsonl` and `.parquet` files and of data sets (`hub_rows`), a row at a time.

It finds the files of a declared path and their lines. Each record has its place, for error messages, and its fields by column. A data set
of the `datasets` library (extra `hub`) is a folder that it saved on this machine, or a name on the hub.
"""

import contextlib
import csv
import glob
import gzip
import hashlib
import importlib
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.packages import require_extra

# As in paths of other tools: hf://datasets/<name>, with an optional @<revision>.
HUB = "hf://datasets/"
_OF_ONE, _OF_SEVERAL = "dataset_info.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Returns whether `save_to_disk` of the library wrote the folder."""
    return (folder / _OF_ONE).is_file() or (folder / _OF_SEVERAL).is_file()


def load(
    name: str, *, asked: object, split: str = "train", config: str | None = None, revision: str | None = None, streaming: bool = False
) -> Iterable[Mapping[str, Any]]:
    """Returns the rows of a split. Raises `ConfigError`, naming the config value `asked`, without the extra, or if the split cannot be
    loaded."""
    require_extra(asked, "hub")
    datasets = importlib.import_module("datasets")
    try:
        if is_saved(Path(name)):
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)
    except Exception as error:  # the library raises whatever its storage and network layers raise
        reason = f"could not be loaded ({type(error).__name__}: {' '.join(str(error)[:200].split())})"
        raise ConfigError(name, reason, "Check name, config, split and network") from error


def content_of(folder: Path) -> bytes:
    """Returns a hash of every file below a folder."""
    whole = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.digest()


@dataclass(frozen=True)
class HubRows:
    """Reads one split of the data set `name`, a folder or a name on the hub; `config` names one of several configurations of a data set."""

    name: str
    split: str
    config: str | None = None
    revision: str | None = None

    @staticmethod
    def of_path(path: str, split: str, config: str | None) -> "HubRows | None":
        """Returns the rows that a path names, if it is a data set and not a file."""
        if path.startswith(HUB):
            name, _, revision = path.removeprefix(HUB).partition("@")
            require(bool(name), path, "does not name a data set", f"Write {HUB}<name>")
            return HubRows(name, split, config, revision or None)
        folder = Path(path).expanduser()
        return HubRows(str(folder), split if (folder / _OF_SEVERAL).is_file() else "") if is_saved(folder) else None

    @property
    def identity(self) -> str:
        """The identity of the rows, equal for equal rows."""
        name = str(Path(self.name).resolve()) if is_saved(Path(self.name)) else HUB + self.name
        return json.dumps([name, self.split, self.config, self.revision])

    def digest(self) -> bytes:
        """Returns a checksum of the content of a folder, or the name and revision of a data set on the hub.

        So a prepared store opens without a network.
        """
        if is_saved(Path(self.name)):
            return hashlib.sha256(content_of(Path(self.name)) + self.split.encode()).digest()
        return hashlib.sha256(self.identity.encode()).digest()

    def records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields each row with its place, for error messages."""
        shown = f"{self.name}[{self.split}]" if self.split else self.name
        loaded = load(self.name, asked=shown, split=self.split or "train", config=self.config, revision=self.revision)
        number = 0
        for number, record in enumerate(loaded, start=1):
            yield f"{shown} row {number}", record
        require(number > 0, shown, "contains no row", "Name another split, or remove it")


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
    files: list[Path] = []
    for path in declared:
        places = [Path(path).expanduser()]
        if not places[0].exists() and glob.has_magic(path):
            places = [Path(one) for one in sorted(glob.glob(str(places[0]), recursive=True))]
            require(bool(places), path, "no file matches", f"Check {key}; relative paths start at the working directory")
        for place in places:
            if place.is_dir():
                files += [file for file in sorted(place.rglob("*")) if file.name.endswith(suffixes) and file.is_file()]
                continue
            require(place.exists(), place, "no such file", f"Check {key}; relative paths start at the working directory")
            fix = f"Use one of {', '.join(suffixes)}"
            if place.name.endswith((".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")):
                fix = f"Write data=table for labelled rows, or prompts and answers. {fix}"
            require(place.name.endswith(suffixes), place, "dpx cannot read this kind of file", fix)
            files.append(place)
    kinds = " or ".join((", ".join(suffixes[:-1]), suffixes[-1]))
    require(bool(files), f"{key}=[{', '.join(declared)}]", "no file was found", f"Name {kinds} files, or a folder of them")
    once: dict[Path, Path] = {}
    for file in files:
        once.setdefault(file.resolve(), file)
    return list(once.values())


def lines(file: Path, *, keep_blank: bool = False, keep_ends: bool = False, longest: int | None = None) -> Iterator[tuple[int, str]]:
    """Yields the numbered lines of a UTF-8 file, from 1; blank lines are left out unless they are kept, and so are line ends.

    Raises `ConfigError` for a line that is not UTF-8, or has more than `longest` bytes; no more than that is read.
    """
    number = 0
    with reading(file), gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as opened:
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


SUFFIXES = (".tsv", ".tsv.gz", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".parquet")
Record = tuple[str, Mapping[str, Any]]  # the place of a record, and its fields


@dataclass(frozen=True)
class FileRows:
    """Reads the rows of one file; `separator` is between the fields of a .csv file, `None` if its header decides."""

    file: Path
    separator: str | None = None

    @property
    def identity(self) -> str:
        """The identity of the rows, equal for equal rows."""
        return str(self.file.resolve())

    def digest(self) -> bytes:
        """Returns a hash of the file's bytes."""
        return digest_of(self.file)

    def records(self) -> Iterator[Record]:
        return records(self.file, self.separator)


RowSet = FileRows | HubRows


def row_sets(paths: str | Sequence[str], key: str, split: str, config: str | None, separator: str | None = None) -> list[RowSet]:
    """Returns the files or data sets that declared paths name, each once, in order: files of rows, or splits of data sets.

    Raises `ConfigError` if no file is found, and for a `separator` if no file is a .csv.
    """
    sets: list[RowSet] = []
    for path in [paths] if isinstance(paths, str) else paths:
        of_library = HubRows.of_path(path, split, config)
        sets += [FileRows(file, separator) for file in named(path, SUFFIXES, key)] if of_library is None else [of_library]
    require(bool(sets), f"{key}=[]", "no file was found", f"Name {', '.join(SUFFIXES)} files, or a folder of them")
    has_csv = any(isinstance(one, FileRows) and one.file.name.removesuffix(".gz").endswith(".csv") for one in sets)
    value = f"data.source.separator={separator!r}"
    require(separator is None or has_csv, value, f"{key} names no .csv file, and only these have separators", "Leave it out")
    once: dict[str, RowSet] = {}
    for one in sets:
        once.setdefault(one.identity, one)
    return list(once.values())


def value_of(where: str, record: Mapping[str, Any], field: str) -> Any:
    """Returns the value of a record in the column `field`. Raises `ConfigError`, naming the place `where`, for a record without that
    column."""
    if field not in record:
        there = ", ".join(str(one) if str(one) == str(one).strip() else repr(one) for one in list(record)[:8])
        fix = "Name the columns with data.source.text_field, label_field, unit_field, messages_field, ..."
        fix += ", or what separates them in a .csv file with data.source.separator" if len(record) == 1 else ""
        raise ConfigError(where, f"has no column {field!r}; its columns are {there}", fix)
    return record[field]


def label_of(where: str, record: Mapping[str, Any], field: str) -> str:
    """Returns a record's label as text (`label_text`). Raises `ConfigError` if it is missing, or neither text nor a whole number."""
    value = value_of(where, record, field)
    require(value is not None and value != "", where, f"has no label under {field!r}", "Give every row its label")
    is_label = (isinstance(value, str | int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    require(is_label, where, f"has the label {value!r}, which is not text and not a whole number", "Write labels as text")
    return label_text(value)


def label_text(value: object) -> str:
    """Returns a label as text; a whole number that was written as a float (`1.0`), as pandas does, is that number."""
    return re.sub(r"^-0$", "0", re.sub(r"^(-?\d+)\.0$", r"\1", str(value)))


def text_of(where: str, record: Mapping[str, Any], field: str) -> str:
    """Returns a record's text. Raises `ConfigError` if it is missing, not text, empty or longer than `LONGEST_LINE` characters."""
    value: Any = value_of(where, record, field)
    is_text = value is None or isinstance(value, str)
    require(is_text, where, f"has {str(value)[:40]} under {field!r}, which is not text", "Write it in quotation marks, or remove the row")
    require(value is not None and value.strip() != "", where, f"has an empty text under {field!r}", "Give it text, or remove the row")
    text = str(value)
    require(len(text) <= LONGEST_LINE, where, f"has a text of more than {LONGEST_LINE} characters", "Cut it, or remove the row")
    require_characters(where, text)
    return text


@dataclass(frozen=True)
class TextColumns:
    """Names the columns of a record's texts: `text`, or `text` and `pair` read together, or `text` with each of `count` texts listed in
    `choices`."""

    text: str = "text"
    pair: str | None = None
    choices: str | None = None
    count: int | None = None

    def read_texts(self, where: str, record: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
        """Returns the texts of one row: one text or one pair, or a pair for each choice. Raises `ConfigError` if one is missing."""
        text = text_of(where, record, self.text)
        if self.choices is not None:
            value, count = value_of(where, record, self.choices), self.count
            is_list = isinstance(value, list) and len(value) == count and all(isinstance(one, str) and one.strip() for one in value)
            reason = f"does not have {count} texts under {self.choices!r}"
            require(is_list, where, reason, f"Give every row {count} texts that are not empty")
            for one in value:
                require_characters(where, one)
            return tuple((text, choice) for choice in value)
        return ((text,) if self.pair is None else (text, text_of(where, record, self.pair)),)


def records(file: Path, separator: str | None = None) -> Iterator[Record]:
    """Yields the records of a file in order. Raises `ConfigError` for a file without records, or if one cannot be read."""
    kind = file.name.removesuffix(".gz").rpartition(".")[2]
    is_empty = True
    match kind:
        case "csv":
            found = _csv(file, separator)
        case "tsv":
            # Without quoting: a quotation mark is text.
            found = _under_header(file, ((number, line.split("\t")) for number, line in lines(file, longest=LONGEST_LINE)))
        case "jsonl":
            found = _jsonl(file)
        case _:
            found = _parquet(file)
    for record in found:
        is_empty = False
        yield record
    require(not is_empty, file, "contains no row", "Remove it, or add rows to it")


def _jsonl(file: Path) -> Iterator[Record]:
    for number, line in lines(file, longest=LONGEST_LINE):
        where = f"{file}:{number}"
        record = parsed(where, line)
        require(isinstance(record, dict), where, "is not a JSON object", "Write one JSON object on each line")
        yield where, record


def _csv(file: Path, separator: str | None) -> Iterator[Record]:
    """Yields rows of fields between separators; without one, of commas, semicolons or tabs, whichever separates the header into most names.

    A field in quotation marks may hold the separator, line ends and doubled quotation marks.
    """
    csv.field_size_limit(LONGEST_LINE)
    # A line end within quotation marks is part of the text.
    of_file = lines(file, keep_blank=True, keep_ends=True, longest=LONGEST_LINE)
    first = list(itertools.islice(of_file, 1))
    header, whole = [line for _, line in first], (line for _, line in itertools.chain(first, of_file))

    def rows() -> Iterator[tuple[int, list[str]]]:
        read = None
        try:
            between = separator or max(",;\t", key=lambda one: len(next(csv.reader(header, delimiter=one), [])))
            read = csv.reader(whole, strict=True, delimiter=between)
            yield from ((read.line_num, row) for row in read if row)
        except csv.Error as error:
            place, reason = f"{file}:{read.line_num if read else 1}", f"is not a valid row of a .csv file ({error})"
            raise ConfigError(place, reason, "Correct its quotation marks and line ends") from None

    yield from _under_header(file, rows(), ", or name what separates the fields with data.source.separator")


def _under_header(file: Path, rows: Iterator[tuple[int, list[str]]], or_else: str = "") -> Iterator[Record]:
    _, header = next(rows, (0, []))
    _require_names_once(file, header)
    for number, row in rows:
        where = f"{file}:{number}"
        require(len(row) == len(header), where, f"has {len(row)} fields, but the header has {len(header)}", f"Correct the row{or_else}")
        yield where, dict(zip(header, row, strict=True))


def _require_names_once(file: Path, names: Sequence[str]) -> None:
    repeated = [name for name in names if names.count(name) > 1]
    require(not repeated, file, f"has two columns {(repeated or [''])[0]!r}", "Give each column its own name")


class _ParquetRow(Mapping[str, Any]):
    """Holds one row of a batch of `columns`, by name; a field is converted when it is read."""

    def __init__(self, where: str, columns: Mapping[str, Any], place: int):
        self._where, self._columns, self._place = where, columns, place

    def __getitem__(self, field: str) -> Any:
        value = self._columns[field][self._place]
        try:
            return value.as_py()
        except (ValueError, OverflowError) as error:
            reason = f"has a value under {field!r} that cannot be read ({error})"
            raise ConfigError(self._where, reason, "Correct the row, or write the column as text") from None

    def __contains__(self, field: object) -> bool:
        return field in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _parquet(file: Path) -> Iterator[Record]:
    """Yields the rows of a Parquet file.

    A field that is not read is not converted either: a column of dates may hold a date that Python cannot represent.
    """
    require_extra(file, "hub", "pyarrow")
    parquet, arrow = importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow")
    number = 0
    try:
        with reading(file), parquet.ParquetFile(file) as opened:
            _require_names_once(file, opened.schema_arrow.names)
            for batch in opened.iter_batches(batch_size=1024):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                for place in range(batch.num_rows):
                    number += 1
                    where = f"{file} row {number}"
                    yield where, _ParquetRow(where, columns, place)
    except arrow.ArrowException as error:
        raise ConfigError(file, f"is not a complete .parquet file ({str(error).splitlines()[0]})", "Copy it again") from None
