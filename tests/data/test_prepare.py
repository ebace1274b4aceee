import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpx.data import left_out
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.data.documents import Document
from dpx.data.pairs import LEAST_TOKENS
from dpx.data.prepare import prepare
from dpx.data.store import SplitWriter, Store
from dpx.data.unit_names import SPLITS
from dpx.declaration import ConfigError
from dpx.privacy.declared_privacy import Privacy

from .corpora import PRIVACY, SHARED_DATA, declared, records, text, write_records, write_vocabulary

Rows = dict[tuple[str, str], list[bytes]]


def rows_by_unit(store: Store) -> Rows:
    """Every row of every unit, as bytes, in the order they are stored."""
    found: Rows = {}
    for split in SPLITS:
        ids = store.unit_ids(split)
        indices = np.arange(store.manifest.rows[split])
        rows, units = store.rows(split, indices), store.unit_of_rows(split, indices)
        for unit_id in ids:
            found[split, unit_id] = []
        for index, unit in zip(indices, units, strict=True):
            marks = [rows[name][index].tobytes() for name in store.manifest.schema]
            found[split, ids[unit]].append(b"".join(marks))
    return found


def prepared(folder: Path, corpus: list[dict[str, Any]], privacy: Privacy = PRIVACY, **changed: Any) -> Store:
    path = write_records(folder / "corpus.jsonl", corpus)
    changed.setdefault("vocabulary", Vocabulary(size=128, path=str(write_vocabulary(folder / "vocabulary.txt"))))
    return prepare(declared(folder, path, **changed), privacy)


AUTHORED = [{"who": f"author-{number % 9}", "text": text(number, 4 + number % 30)} for number in range(60)]
PRIVACIES: dict[str, Privacy] = {
    "row": PRIVACY,
    "document": Privacy(delta=1e-5, unit="document", rows_per_unit_max=3),
    "author": Privacy(delta=1e-5, unit="author", rows_per_unit_max=10),
}


@pytest.mark.parametrize("unit", ["row", "document", "author"])
@pytest.mark.parametrize("pairs", ["same_document", "none"])
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(removed=st.integers(0, len(AUTHORED) - 1))
def test_removing_a_unit_changes_nothing_else(tmp_path_factory: pytest.TempPathFactory, unit: str, pairs: str, removed: int):
    """With a vocabulary that was brought: any unit, whichever split holds it."""
    field = "who" if unit == "author" else None
    with_it = rows_by_unit(prepared(tmp_path_factory.mktemp("all"), AUTHORED, PRIVACIES[unit], unit_field=field, pairs=pairs))
    is_kept: Callable[[int], bool] = (
        (lambda place: AUTHORED[place]["who"] != AUTHORED[removed]["who"]) if field else (lambda place: place != removed)
    )
    fewer = [record for place, record in enumerate(AUTHORED) if is_kept(place)]
    without = rows_by_unit(prepared(tmp_path_factory.mktemp("less"), fewer, PRIVACIES[unit], unit_field=field, pairs=pairs))
    assert {key: rows for key, rows in with_it.items() if key in without} == without
    assert len(with_it) == len(without) + 1


def test_removing_a_protected_document_keeps_a_fitted_vocabulary(tmp_path: Path):
    corpus = records(80)
    store = prepared(tmp_path, corpus, unit_field="id", vocabulary=Vocabulary(size=256))
    removed = store.unit_ids("protected")[3]
    fewer = prepared(tmp_path, [record for record in corpus if record["id"] != removed], unit_field="id", vocabulary=Vocabulary(size=256))
    assert fewer.vocabulary() == store.vocabulary()
    expected = rows_by_unit(store)
    del expected["protected", removed]
    assert rows_by_unit(fewer) == expected


def test_across_documents_the_next_document_alone_changes(tmp_path: Path):
    corpus = records(60)
    store = prepared(tmp_path, corpus, unit_field="id", pairs="cross_document")
    removed, following = store.unit_ids("protected")[3:5]
    fewer = prepared(tmp_path, [record for record in corpus if record["id"] != removed], unit_field="id", pairs="cross_document")
    with_it, without = rows_by_unit(store), rows_by_unit(fewer)
    assert {key[1] for key in without if with_it[key] != without[key]} == {following}
    assert store.manifest.documents_per_row == 2 and prepared(tmp_path, corpus).manifest.documents_per_row == 1


def test_splits_share_no_unit_and_miss_none(tmp_path: Path):
    store = prepared(tmp_path, records(80), unit_field="id")
    ids = [store.unit_ids(split) for split in SPLITS]
    assert sorted(sum(ids, [])) == sorted(record["id"] for record in records(80))
    assert min(map(len, ids)) > 5


def test_equal_documents_without_a_name_are_one_unit(tmp_path: Path):
    corpus = [{"text": text(number)} for number in range(40)]
    once, again = prepared(tmp_path, corpus), prepared(tmp_path, corpus + corpus[:7])
    assert rows_by_unit(again) == rows_by_unit(once)
    assert [sum(one.texts_repeated for one in left_out.read(store.folder).values()) for store in (once, again)] == [0, 7]


def test_equal_documents_that_are_kept_are_units_of_one_split(tmp_path: Path):
    corpus = [{"text": text(number)} for number in range(40)]
    once, kept = prepared(tmp_path, corpus), prepared(tmp_path, corpus + corpus[:7], equal_rows="keep")
    assert sum(kept.manifest.units.values()) == 47 and not any(one.texts_repeated for one in left_out.read(kept.folder).values())
    names = [{name.split("-")[0] for name in kept.unit_ids(split)} for split in SPLITS]
    assert names == [set(once.unit_ids(split)) for split in SPLITS]
    with pytest.raises(ConfigError, match="equal documents could be both held out and trained on"):
        prepared(tmp_path, corpus, equal_rows="keep", heldout_by="first")


@pytest.mark.parametrize("pairs", ["none", "same_document"])
def test_what_no_row_holds_of_running_text_is_counted(tmp_path: Path, pairs: str):
    corpus = [{"text": text(number) if number % 4 else "the"} for number in range(40)]
    store = prepared(tmp_path, [*corpus, *({"text": f"the {name}"} for name in "abcdefgh")], pairs=pairs)
    counts = left_out.read(store.folder)["protected"]
    lengths = store.lengths("protected", np.arange(counts.rows), 1)
    assert counts.documents_without_rows > 0 and counts.texts == 0
    marks = 2 if pairs == "none" else 3
    short = left_out.in_words(counts, "protected", "are")
    assert f"{counts.documents_without_rows} protected documents have too few words for a row and are left out" in short
    if pairs == "none":
        # The documents without a row have one or two words; their tokens are not counted as a rest.
        assert counts.tokens - counts.tokens_cut - int(lengths.sum() - marks * counts.rows) < LEAST_TOKENS * counts.documents_without_rows
    else:
        assert 0 < counts.tokens_cut < counts.tokens
    assert f"{counts.tokens_cut} of {counts.tokens} tokens of the protected text are in no row" in "".join(short).replace(",", "")


@pytest.mark.parametrize("unit", ["document", "author"])
def test_no_protected_unit_holds_more_rows_than_declared(tmp_path: Path, unit: str):
    """Authors' documents lie apart, so their surplus is only known at the end."""
    field = "who" if unit == "author" else None
    most = PRIVACIES[unit].rows_per_unit_max
    capped = prepared(tmp_path, AUTHORED, PRIVACIES[unit], unit_field=field)
    free = rows_by_unit(prepared(tmp_path, AUTHORED, unit_field=field))
    found = rows_by_unit(capped)
    surplus = 0
    for key, rows in found.items():
        kept = iter(free[key])
        assert all(row in kept for row in rows), "rows that are kept are rows of the unit, in order"
        assert len(rows) == (min(most, len(free[key])) if key[0] == "protected" else len(free[key]))
        surplus += len(free[key]) - len(rows)
    counted = left_out.read(capped.folder)["protected"]
    assert surplus > 10 and (counted.rows_dropped, counted.texts) == (surplus, 0)
    left_out.keep(tmp_path, capped)
    sentence = f"{surplus} of {counted.rows} protected rows are dropped by privacy.rows_per_unit_max"
    assert left_out.lines(tmp_path)[-1] == sentence
    # The limit drops no public row: the plan says how many it would drop, which nothing private enters.
    public, rows_of = left_out.of_public(capped, PRIVACIES[unit]), [len(rows) for (split, _), rows in found.items() if split == "public"]
    assert public is not None and (public.rows, public.rows_dropped) == (sum(rows_of), sum(max(0, rows - most) for rows in rows_of))
    assert capped.manifest.rows["protected"] == sum(len(rows) for key, rows in found.items() if key[0] == "protected")
    assert (capped.manifest.unit, capped.manifest.rows_per_unit_max) == (unit, most)


@pytest.mark.parametrize(
    ("vocabulary", "source"),
    [({"size": 128}, "public_split"), ({"size": 128, "fit_on": "protected"}, "protected"), ({"size": 128, "path": "FILE"}, "file"),
     ({"size": 128, "path": "FILE", "fit_on": "protected"}, "protected")],
)  # fmt: skip
def test_the_manifest_says_where_the_vocabulary_came_from(tmp_path: Path, vocabulary: dict[str, Any], source: str):
    path = write_vocabulary(tmp_path / "vocabulary.txt")
    brought: dict[str, Any] = {name: str(path) if value == "FILE" else value for name, value in vocabulary.items()}
    store = prepared(tmp_path, records(60), vocabulary=Vocabulary(**brought))
    assert store.manifest.vocabulary_source == source
    assert (store.vocabulary() == path.read_text().split()) == ("path" in vocabulary)


def test_protected_words_do_not_reach_a_public_vocabulary(tmp_path: Path):
    corpus = records(60)
    protected = set(prepared(tmp_path, corpus, unit_field="id").unit_ids("protected"))
    marked = [{**one, "text": one["text"] + " Qqquq." * 30} if one["id"] in protected else one for one in corpus]
    public = prepared(tmp_path, marked, unit_field="id", vocabulary=Vocabulary(size=256)).vocabulary()
    leaked = prepared(tmp_path, marked, unit_field="id", vocabulary=Vocabulary(size=256, fit_on="protected")).vocabulary()
    assert not any("q" in piece for piece in public) and "qqquq" in leaked


def test_a_store_is_reused_while_its_settings_and_text_are_the_same(tmp_path: Path):
    corpus = records(60)
    store = prepared(tmp_path, corpus)
    stamp = (store.folder / "manifest.json").stat().st_mtime_ns
    again = prepared(tmp_path, corpus, declared_size=5)
    assert again.folder == store.folder and (again.folder / "manifest.json").stat().st_mtime_ns == stamp
    changes: list[dict[str, Any]] = [{}, {"sequence_length": 40}, {"split_salt": "other"}, {"pairs": "none"}]
    folders = {prepared(tmp_path, corpus, **changed).folder for changed in changes}
    folders.add(prepared(tmp_path, corpus, PRIVACIES["document"]).folder)
    folders.add(prepared(tmp_path, corpus[1:]).folder)
    assert len(folders) == 6
    assert sorted(path.name for path in (tmp_path / "stores").iterdir()) == sorted(folder.name for folder in folders)


def test_a_harmed_store_is_refused_rather_than_prepared_again(tmp_path: Path):
    store = prepared(tmp_path, records(60))
    (store.folder / "protected.tokens").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"protected.tokens: has 0 bytes, .* Delete the folder to prepare it again\."):
        prepared(tmp_path, records(60))


def test_a_preparation_that_fails_leaves_nothing(tmp_path: Path):
    path = write_records(tmp_path / "corpus.jsonl", records(60))
    path.write_text(path.read_text() + "not json\n")
    brought = Vocabulary(size=128, path=str(write_vocabulary(tmp_path / "vocabulary.txt")))
    for vocabulary in (Vocabulary(size=128), brought):
        with pytest.raises(ConfigError, match="corpus.jsonl:61"):
            prepare(declared(tmp_path, path, vocabulary=vocabulary), PRIVACY)
    assert list((tmp_path / "stores").iterdir()) == []


def test_what_a_killed_process_of_the_same_number_left_is_in_nobodys_way(tmp_path: Path):
    """In containers most processes have one number."""
    folder = prepared(tmp_path, records(60)).folder
    folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}"))
    assert prepared(tmp_path, records(60)).folder == folder


def test_what_a_killed_preparation_left_is_removed_by_the_next_command_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = prepared(tmp_path, records(60)).folder
    for _ in range(2):
        draft = folder.with_name(f".{folder.name}.{os.getpid()}.0123abcd")
        draft.mkdir()
        (draft / "protected.tokens").write_text("protected")
        capsys.readouterr()
        # The store may be there already: another process has made it since.
        assert prepared(tmp_path, records(60)).folder == folder
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
        said = " ".join(capsys.readouterr().err.split())
        assert draft.name in said and "removed the text that a preparation left which was killed" in said
        shutil.rmtree(folder)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: SplitWriter, *rest: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SplitWriter, "add_document", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        prepared(tmp_path, records(60))
    assert list((tmp_path / "stores").iterdir()) == []


def test_moved_files_are_the_same_corpus(tmp_path: Path):
    first = prepared(tmp_path, records(60))
    (tmp_path / "elsewhere").mkdir()
    path = (tmp_path / "corpus.jsonl").rename(tmp_path / "elsewhere" / "moved.jsonl")
    vocabulary = (tmp_path / "vocabulary.txt").rename(tmp_path / "elsewhere" / "pieces.txt")
    moved = declared(tmp_path, path, vocabulary=Vocabulary(size=128, path=str(vocabulary)))
    assert prepare(moved, PRIVACY).folder == first.folder


@pytest.mark.parametrize(
    ("corpus", "changed", "privacy", "message"),
    [
        (records(1), {}, PRIVACY, "the corpus has only one document"),
        ([{"text": " "}], {}, PRIVACY, "the corpus has only one document|no document"),
        (records(3), {"heldout_fraction": 1e-9}, PRIVACY, "none of the 3 units in the heldout split has text"),
        (
            records(20),
            {"public_fraction": 0.0, "vocabulary": Vocabulary(size=128)},
            PRIVACY,
            "the split from which the vocabulary is fitted has no text",
        ),
    ],
)
def test_a_corpus_that_cannot_serve_is_refused(
    tmp_path: Path, corpus: list[dict[str, str]], changed: dict[str, Any], privacy: Privacy, message: str
):
    with pytest.raises(ConfigError, match=message) as caught:
        prepared(tmp_path, corpus, privacy, **changed)
    assert "\n" not in str(caught.value)


def test_without_a_public_split_there_is_no_public_count(tmp_path: Path):
    store = prepared(tmp_path, records(60), public_fraction=0.0)
    assert store.manifest.most_frequent_public_token_id is None and store.rows("public", [])["tokens"].shape == (0, 32)


def test_two_processes_write_the_same_bytes(tmp_path: Path):
    """Another hash seed and another thread count; the store's checksum is part of a run's fingerprint."""
    source = Synthetic(documents=80, words_per_document=60, states=12)
    here = Data(
        name="s",
        source=source,
        vocabulary=Vocabulary(size=128),
        sequence_length=32,
        public_fraction=0.2,
        heldout_fraction=0.2,
        directory=str(tmp_path),
    )
    there_too = dataclasses.replace(here, directory=str(tmp_path / "other"))
    program = (
        "from dpx.data.declared_data import *; from dpx.data.prepare import prepare; from dpx.privacy.declared_privacy import Privacy\n"
        f"print(prepare({there_too!r}, {PRIVACY!r}).manifest.checksum)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == prepare(here, PRIVACY).manifest.checksum


@pytest.mark.parametrize("public_fraction", [0.01, 0.9])
def test_one_text_file_suggests_a_document_a_line(tmp_path: Path, public_fraction: float):
    path = tmp_path / "one.txt"
    path.write_text("a line\nanother line\n")
    with pytest.raises(ConfigError, match="has only one document .* Add documents, or set data.source.document_per=line"):
        prepare(declared(tmp_path, path, public_fraction=public_fraction, heldout_fraction=0.01), PRIVACY)


@pytest.mark.parametrize("public_fraction", [0.01, 0.9])
def test_equal_documents_are_not_told_to_be_cut_into_lines(tmp_path: Path, public_fraction: float):
    path = write_records(tmp_path / "equal.jsonl", [{"text": "the same text"}] * 60)
    with pytest.raises(
        ConfigError, match="its 60 documents are equal or of one unit, which is in one split. Add documents that differ, or"
    ):
        prepare(declared(tmp_path, path, public_fraction=public_fraction, heldout_fraction=0.01), PRIVACY)


def test_progress_is_reported(tmp_path: Path):
    path = write_records(tmp_path / "corpus.jsonl", records(450, sentences=2))
    seen: list[tuple[str, int]] = []
    prepare(declared(tmp_path, path), PRIVACY, lambda stage, done: seen.append((stage, done)))
    assert seen == [(stage, done) for stage in ("vocabulary", "rows") for done in (0, 200, 400)]


def test_settings_can_be_read_back(tmp_path: Path):
    store = prepared(tmp_path, records(60))
    assert json.loads((store.folder / "manifest.json").read_text())["settings"]["data"]["sequence_length"] == 32


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the shared data is not beside this checkout")
def test_real_articles(tmp_path: Path):
    articles = SHARED_DATA / "text" / "wikipedia_en" / "valid.jsonl.gz"
    vocabulary = Vocabulary(size=30522, path=str(SHARED_DATA / "vocab" / "bert-base-uncased.txt"))
    store = prepare(declared(tmp_path, articles, vocabulary=vocabulary, sequence_length=128), PRIVACY)
    rows = store.rows("protected", np.arange(store.manifest.rows["protected"]))
    assert len(rows["tokens"]) > 2000 and rows["length"].mean() > 100
    assert (rows["tokens"] == store.manifest.unk_id).sum() < 0.002 * rows["length"].sum()
    assert store.vocabulary()[store.manifest.most_frequent_public_token_id or 0] in {"the", ",", "."}


def test_held_out_documents_are_the_first_ones_where_that_is_declared(tmp_path: Path):
    corpus = records(40)
    corpus[30] = {"id": "again", "text": corpus[2]["text"]}
    vocabulary = Vocabulary(size=128, path=str(write_vocabulary(tmp_path / "words.txt")))
    stores = {by: prepared(tmp_path, corpus, vocabulary=vocabulary, heldout_by=by, public_fraction=0.0) for by in ("first", "hash")}
    contents = [Document((*text.split("\n"),)).content() for text in (record["text"] for record in corpus)]
    held = stores["first"].unit_ids("heldout")
    # A quarter of 40; the document that repeats a held-out one is not trained on.
    assert held == contents[:10] and set(stores["first"].unit_ids("protected")) == set(contents[10:]) - {contents[2]}
    assert stores["hash"].unit_ids("heldout") != held and "heldout_by" not in stores["hash"].manifest.settings["data"]
    assert stores["first"].manifest.settings["data"]["heldout_by"] == "first"


def test_where_the_first_documents_cannot_be_held_out_it_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="data.heldout_by=first with data=test: a unit may have several documents in the files"):
        declared(tmp_path, tmp_path / "a.jsonl", unit_field="id", heldout_by="first")
    data = declared(tmp_path, tmp_path / "a.jsonl", heldout_by="first")
    with pytest.raises(ConfigError, match="data.heldout_by=first, privacy.adjacency=add_remove: without one document, the border"):
        data.require_fits(Privacy(delta=1e-5, adjacency="add_remove"))


def test_a_unit_that_records_do_not_name_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="privacy.unit=author with data=test"):
        declared(tmp_path, tmp_path / "a.jsonl").require_fits(PRIVACIES["author"])
