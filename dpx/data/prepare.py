"""Prepares a store from a declared corpus, once: it splits by unit, fits or reads the vocabulary, cuts rows, writes and renames.

The rows of a unit depend on that unit alone (given the vocabulary): its split, its draws and the choice of surplus rows to drop are keyed
by its id, and no row holds text of two units.
"""

import errno
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from dpx.console import stage
from dpx.data import left_out, unit_names
from dpx.data.declared_data import Data, Hub, TextFiles
from dpx.data.documents import Document, Example, Prompted, Source
from dpx.data.labelled import Table
from dpx.data.learnt_from import learnt_from
from dpx.data.left_out import LeftOut
from dpx.data.protected_units import unit_facts
from dpx.data.rows import COUNTED, RowCutter, UnitDocument
from dpx.data.schema import as_json
from dpx.data.sources import open_source, parts_of
from dpx.data.store import LEARNT_FROM, MANIFEST, VOCABULARY, HashedFile, Manifest, SplitWriter, Store, open_store
from dpx.data.tokenizer import (
    AS_IT_CAME,
    BUILT_AS,
    DEFINITION,
    TextTokenizer,
    as_lines,
    class_at,
    files_of,
    fingerprint,
    fit,
    of_path,
    of_vocabulary,
)
from dpx.data.unit_names import KeyedHash, Split
from dpx.declaration import ConfigError, require
from dpx.durable import draft_folder_of, make_folder, make_private, put_in_place, remove_drafts
from dpx.files.records import to_json
from dpx.files.weights import folder_of, is_hub_id
from dpx.privacy.declared_privacy import Privacy
from dpx.statement.seals import STATEMENT, read_statement
from dpx.statement.statement_records import StudyStatement

Progress = Callable[[str, int], None]  # (stage, documents so far): "vocabulary" and "rows", each from 0 on
_REPORTED_DOCUMENTS = 200
# Raised whenever the same text under the same settings gives other rows or another manifest: the text is then prepared again.
FORMAT = 9
_NEEDED: tuple[Split, ...] = ("protected", "heldout", "test")


def say_stage(name: str, documents: int) -> None:
    """Names each stage as it begins; it is a `Progress`."""
    if documents == 0:
        stage({"vocabulary": "reading the text for its vocabulary", "rows": "cutting the text into rows"}[name])


def prepare(data: Data, privacy: Privacy, progress: Progress | None = None) -> Store:
    """Returns the store of a declared corpus: opened if it exists in `data.directory`, else prepared there.

    Raises `ConfigError` for input that cannot be used, and for an existing store that is incomplete. Names of units that are nearly equal
    are reported on standard error and listed beside the rows; they change nothing else. Two processes may prepare the same store at once:
    the first to finish gives it its name and the other uses that one. Text is streamed; memory grows by about 100 bytes a document (its
    hash, or its unit's name).
    """
    source = open_source(data.source)
    settings = _settings(data, privacy, source)
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = Path(data.directory) / f"{data.name}-{key[:12]}"
    # What preparations of this store left that were killed: it holds protected text.
    for draft in remove_drafts(folder):
        stage(f"{draft}: removed the text that a preparation left which was killed")
    if folder.exists():
        return open_store(folder, key)
    try:
        with draft_folder_of(folder, make_private, _put_first) as unfinished:
            preparation = _Preparation(data, privacy, source, unfinished, progress)
            manifest = preparation.run(key, settings)
            manifest.write(unfinished / MANIFEST)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(folder, "the disk is full", "Free some space, or move data.directory") from None
    if preparation.near_equal:
        stage(unit_names.in_words(folder, preparation.near_equal))
    return open_store(folder, key)


class _Preparation:
    def __init__(self, data: Data, privacy: Privacy, source: Source, folder: Path, progress: Progress | None):
        self._data, self._privacy, self._source, self._folder = data, privacy, source, folder
        self._progress = progress or (lambda name, done: None)
        self._keyed = KeyedHash(data.split_salt)
        # How many documents at the beginning are held out, for which the source is read once more; 0 with a hash.
        is_first = data.heldout_by == "first"
        self._first_heldout = int(data.heldout_fraction * sum(1 for _ in source.documents())) if is_first else 0
        self._read, self._is_read_whole = 0, False  # documents in the current pass, and whether the pass reached the end
        self._first_unit, self._has_several_units = "", False
        self._keeps_equal = isinstance(data.source, Table | TextFiles | Hub) and data.source.equal_rows == "keep"
        self.repeated: Counter[Split] = Counter()  # documents left out because an equal one was read before them
        self.near_equal: list[list[tuple[str, str]]] = []  # (split, name of a unit) in groups

    def run(self, key: str, settings: dict[str, Any]) -> Manifest:
        tokenizer = self._tokenizer()
        special = tokenizer.special
        columns = self._data.columns
        assert columns is not None
        cutter = RowCutter(self._data, self._keyed, tokenizer)
        writers: dict[Split, SplitWriter] = {}
        for split in self._data.splits:
            limit = self._privacy.rows_per_unit_max if split == "protected" and self._privacy.unit != "row" else None
            size = self._data.vocabulary.size
            writers[split] = SplitWriter(self._folder, split, schema=columns, vocabulary_size=size, limit=limit)
        with ExitStack() as opened:
            for writer in writers.values():
                opened.callback(writer.release)
            self.near_equal = unit_names.near_equal(self._write_rows(cutter, writers))
            files = {name: known for writer in writers.values() for name, known in writer.finish().items()}
        files[VOCABULARY] = self._write(VOCABULARY, as_lines(tokenizer.vocabulary).encode())
        if tokenizer.definition is not None:
            files[DEFINITION] = self._write(DEFINITION, tokenizer.definition.encode())
        given = {} if self._data.vocabulary.path is None else files_of(vocabulary_place(self._data.vocabulary.path))
        for name, file in given.items():
            name = f"{AS_IT_CAME}/{name}"
            make_folder((self._folder / name).parent)
            files[name] = self._write(name, file.read_bytes())
        unit_names.write_near_equal(self._folder, self.near_equal)
        self._require_usable(writers, cutter)
        data, counts = self._data, dict[Split, LeftOut]()
        for split, writer in writers.items():
            told = {name: cutter.counts[split][name] for name in COUNTED}
            told |= {"rows": writer.row_count + writer.dropped_rows, "rows_dropped": writer.dropped_rows}
            counts[split] = LeftOut(texts_repeated=self.repeated[split], **told)
        left_out.write(self._folder, counts)
        public_V = writers["public"].token_counts.copy()
        public_V[list(asdict(special).values())] = 0
        return Manifest(
            key=key,
            name=secrets.token_hex(8),
            rows={split: writer.row_count for split, writer in writers.items()},
            units={split: writer.unit_count for split, writer in writers.items()},
            columns=as_json(columns),
            sequence_length=data.sequence_length,
            vocabulary_size=data.vocabulary.size,
            vocabulary_source="protected" if data.vocabulary.fit_on == "protected" else "file" if data.vocabulary.path else "public_split",
            ids_in_use=len(tokenizer.vocabulary),
            **asdict(special),
            most_frequent_public_token_id=int(public_V.argmax()) if public_V.any() else None,
            documents_per_row=2 if data.pairs == "cross_document" else 1,
            unit=self._privacy.unit,
            rows_per_unit_max=self._privacy.rows_per_unit_max,
            settings=settings,
            protects=to_json(unit_facts(data, self._privacy)),
            read_from=parts_of(self._source),
            files=files,
        ).with_checksum()

    def _documents(self, name: str) -> Iterator[tuple[Split, UnitDocument]]:
        """Yields documents with the split and the name of their unit.

        Of equal documents that are named by their content, one is yielded, or all where `equal_rows` keeps them.
        """
        self._progress(name, 0)
        self._is_read_whole = False
        seen: Counter[int] = Counter()
        for number, document in enumerate(self._source.documents(), start=1):
            if number % _REPORTED_DOCUMENTS == 0:
                self._progress(name, number)
            content, self._read = document.content(), number
            unit_id = content if document.unit_id is None else document.unit_id
            if document.unit_id is not None:
                where, fix = f" in document {number}", "Give every document a name of its unit, or give none of them a name"
                unit_names.require_name(f"data={self._data.name}", unit_id, where, fix)
            self._first_unit = self._first_unit or unit_id
            self._has_several_units |= unit_id != self._first_unit
            split = self._split(unit_id, document, number)
            if document.unit_id is None and not _is_test(document):
                seen[int(content, 16)] += 1
                again = seen[int(content, 16)]
                if again > 1 and not self._keeps_equal:
                    self.repeated[split] += name == "rows"
                    continue
                # The split of an equal row is that of the first, so that no text is both protected and held out. Equal rows may
                # exchange their names: without one of them, the others are the same set of units.
                unit_id = content if again == 1 else f"{content}-{again}"
            yield split, UnitDocument(unit_id, content, document)
        self._is_read_whole = True

    def _split(self, unit_id: str, document: Document | Example | Prompted, number: int) -> Split:
        """Returns the split of a document, the `number`-th of the source, from 1."""
        data = self._data
        if data.heldout_by == "first":
            if number <= self._first_heldout:
                return "heldout"
            return self._keyed.split(unit_id, public_fraction=data.public_fraction, heldout_fraction=0.0)
        if _is_test(document):
            assert data.test_split is not None
            return data.test_split
        heldout_fraction = 0.0 if data.test_split == "heldout" else data.heldout_fraction
        return self._keyed.split(unit_id, public_fraction=data.public_fraction, heldout_fraction=heldout_fraction)

    def _tokenizer(self) -> TextTokenizer:
        vocabulary = self._data.vocabulary
        if vocabulary.path is not None:
            return of_path(vocabulary_place(vocabulary.path), vocabulary.size)
        fitted_on = "protected" if vocabulary.fit_on == "protected" else "public"
        texts = (document.source.paragraphs for split, document in self._documents("vocabulary") if split == fitted_on)
        try:
            return of_vocabulary(fit(chain.from_iterable(texts), vocabulary.size))
        except ConfigError:
            # With one document, the cause is usually that it is in another split: the error says so. A record that cannot be read has its
            # own error.
            if self._is_read_whole:
                self._require_several()
            raise

    def _require_several(self) -> None:
        """Raises `ConfigError` if the documents of the last pass are one unit, or equal, so that all are in one split."""
        source, data = self._data.source, f"data={self._data.name}"
        is_table = isinstance(source, Table)
        if self._read > 1:
            reason = f"its {self._read:,} {'rows' if is_table else 'documents'} are equal or of one unit, which is in one split"
            require(self._has_several_units, data, reason, f"Add {'rows' if is_table else 'documents'} that differ, or of other units")
        fix = "Add rows of other units" if is_table else "Add documents"
        if isinstance(source, TextFiles) and source.document_per == "file":
            finer = "line" if ".txt" in str(source.paths) else "paragraph"
            fix += f", or set data.source.document_per={finer} if each line of the text is a document"
        reason = "the corpus has only one document (or one unit), and it cannot be both trained on and held out"
        require(self._read > 1, data, reason, fix)

    def _write_rows(self, cutter: RowCutter, writers: dict[Split, SplitWriter]) -> Iterable[tuple[Split, str]]:
        """Writes every row; returns the units that the source names, by split."""
        numbers: dict[tuple[Split, str], int] = {}  # stays empty if every document is a separate unit
        for split, document, rows in cutter.cut(self._documents("rows")):
            named = (split, document.unit_id)
            again = named in numbers
            unit = numbers[named] if again else writers[split].add_unit(document.unit_id)
            if self._data.names_units:
                numbers[named] = unit
            priority = lambda row, parts=(document.unit_id, document.content): self._keyed.number("surplus", *parts, row) >> 64  # noqa: E731
            writers[split].add_document(unit, rows, priority, again=again)
        return numbers

    def _write(self, name: str, content: bytes) -> dict[str, Any]:
        file = HashedFile(self._folder / name)
        file.write(content)
        return file.close()

    def _require_usable(self, writers: dict[Split, SplitWriter], cutter: RowCutter) -> None:
        documents = sum(writer.unit_count for writer in writers.values())
        require(documents > 0, f"data={self._data.name}", "the corpus has no document", "Add text")
        self._require_several()
        for split in filter(writers.__contains__, _NEEDED):
            unfit, length = cutter.counts[split]["conversations_without_rows"], f"data.sequence_length={self._data.sequence_length}"
            reason = f"leaves no conversation of the {split} split: turns of all {unfit} are longer than a row"
            require(writers[split].row_count > 0 or not unfit, length, reason, "Use longer rows, or shorter turns")
            require(
                writers[split].row_count > 0,
                f"data={self._data.name}",
                f"none of the {documents} units in the {split} split has text",
                "Add documents, raise data.heldout_fraction, or change data.split_salt",
            )


def _is_test(document: Document | Example | Prompted) -> bool:
    return not isinstance(document, Document) and document.is_test


def vocabulary_place(vocabulary: str) -> Path:
    """Returns the path of a file of tokens or of a checkpoint's folder; for a hub id, the path of its copy on this machine."""
    place = Path(vocabulary).expanduser()
    is_id = not place.exists() and is_hub_id(vocabulary) and place.suffix not in (".txt", ".json")
    return folder_of(vocabulary, "data.vocabulary.path") if is_id else place


def vocabulary_folder(vocabulary: str | None) -> Path | None:
    """Returns the folder of the checkpoint whose tokenizer is given; `None` for another vocabulary."""
    place = None if vocabulary is None else vocabulary_place(vocabulary)
    return None if place is None or not files_of(place) else place if place.is_dir() else place.parent


def _settings(data: Data, privacy: Privacy, source: Source) -> dict[str, Any]:
    """Returns everything that rows depend on; files count by their content, whatever their path."""
    declared = {name: value for name, value in asdict(data).items() if name not in {"name", "directory", "declared_size"}}
    # How a table describes its rows does not change them; whether there is a test set is in the fingerprint of its files.
    for name in ("paths", "test_paths", "split", "test_split", "subset", "unit_note", "known_as"):
        declared["source"].pop(name, None)
    for name in ("path", "disjoint_from"):
        declared["vocabulary"].pop(name)
    # Stores from before these keys keep their names.
    for name, usual in (("cuts", None), ("repeats", 1), ("heldout_by", "hash")):
        if declared[name] == usual:
            declared.pop(name)
    of_completions = ("prompt_field", "completion_field", "template")
    for name in (*of_completions, "messages_field", "loss_on", "tools_field", "documents_field", "chat_date"):
        if isinstance(data.source, Table) and not data.source.has_completions:
            declared["source"].pop(name)
    vocabulary = vocabulary_place(data.vocabulary.path) if data.vocabulary.path else None
    known = [] if vocabulary is None else [to_json(one) for one in learnt_from(vocabulary, Path(data.directory))]
    return {
        "data": json.loads(json.dumps(declared, default=list)),
        "unit": privacy.unit,
        "rows_per_unit_max": privacy.rows_per_unit_max,
        "source": source.fingerprint(),
        "vocabulary": None if vocabulary is None else fingerprint(vocabulary),
        **({} if vocabulary is None or (name := class_at(vocabulary)) is None else {BUILT_AS: name}),
        # Equal tokens of another origin are another store, so that no origin is lost.
        **({LEARNT_FROM: json.loads(json.dumps(known))} if known else {}),
        "format": FORMAT,
        "tokenizers": metadata.version("tokenizers"),
    }


def _put_first(unfinished: Path, folder: Path) -> None:
    """Renames a store to its final name, unless another process has finished the same store."""
    try:
        put_in_place(unfinished, folder)
    except OSError:
        if not folder.exists():
            raise


def store_of(data: Data, privacy: Privacy, params: Path) -> Store:
    """Returns the prepared data of a run, whose vocabulary the weights in `params` use.

    Raises `ConfigError` if the vocabulary is known to be another one: every token would be read as another token.
    """
    store = prepare(data, privacy)
    require_vocabulary(params, store.manifest.vocabulary_checksum, store.folder)
    return store


def require_vocabulary(params: Path, checksum: str, where: Path) -> None:
    """Raises `ConfigError`, naming `where`, if the run of the weights in `params` read a vocabulary of another checksum.

    It is in the statement next to the weights, or, if the vocabulary is not public, in the run's private tree alone: a copy of `release/`
    cannot tell.
    """
    place = params.parent / STATEMENT
    statement = read_statement(place) if place.is_file() else None
    stated = None if statement is None or isinstance(statement, StudyStatement) else statement.vocabulary.sha256
    known = {stated} if stated else {one.vocabulary_checksum for one in left_out.manifests(place.parent.parent / "private")}
    require(
        not known or checksum in known,
        where,
        "has another vocabulary than the weights were trained with: the data, or the file that data.vocabulary.path names, has changed",
        f"Restore it, or add data.vocabulary.path=<{VOCABULARY} of the data prepared for the run>",
    )
