"""Corpora that share a unit or a passage are told from corpora that share nothing; manifests are trusted if the ledger names them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpx.data import left_out, overlap
from dpx.data.declared_data import Vocabulary
from dpx.data.labelled import Table
from dpx.data.overlap import found_rows
from dpx.data.prepare import prepare
from dpx.data.store import Store

from .corpora import PRIVACY, declared, text, write_vocabulary


def store(folder: Path, name: str, texts: list[str], **settings: Any) -> Store:
    """The texts prepared, a document each, with one vocabulary for all corpora."""
    (folder / name).mkdir()
    for number, words in enumerate(texts):
        (folder / name / f"{number}.txt").write_text(words)
    vocabulary = Vocabulary(size=256, path=str(write_vocabulary(folder / "vocabulary.txt")))
    return prepare(declared(folder, folder / name, vocabulary=vocabulary, **settings), PRIVACY)


def texts(first: int, count: int = 24) -> list[str]:
    return [text(seed) for seed in range(first, first + count)]


def test_other_text_shares_nothing_and_the_same_text_everything(tmp_path: Path, monkeypatch):
    one, other = store(tmp_path, "one", texts(0)), store(tmp_path, "other", texts(100))
    assert set(found_rows(one, other).values()) == {0}
    found = found_rows(one, one)
    assert found["protected"] == one.manifest.rows["protected"]
    # As the next point of a sweep asks.
    monkeypatch.setattr(overlap, "_hashed", lambda *_: pytest.fail("read again"))
    assert found_rows(one, one) == found


def test_a_document_is_found_in_whatever_split_of_the_other_it_is(tmp_path: Path):
    one, other = store(tmp_path, "one", texts(0)), store(tmp_path, "other", [*texts(100), *texts(0)], split_salt="another")
    found = found_rows(one, other)
    assert found.keys() == {"protected", "heldout", "public", "any"} and all(found.values())
    assert found["any"] <= found["protected"] + found["heldout"] + found["public"]


@pytest.mark.parametrize("most", [1 << 24, 400])
def test_a_passage_within_other_words_is_found_also_among_a_share_of_all_windows(tmp_path: Path, monkeypatch, most):
    monkeypatch.setattr(overlap, "_HASHES_MAX", most)
    monkeypatch.setattr(overlap, "_counted", {})
    one = store(tmp_path, "one", texts(0))
    other = store(tmp_path, "other", [f"{text(1000 + seed)} {text(seed)}" for seed in range(24)], sequence_length=48)
    apart = store(tmp_path, "apart", texts(200))
    assert found_rows(one, other)["protected"] and not any(found_rows(one, apart).values())


def test_short_rows_are_found_whatever_their_label_and_case(tmp_path: Path):
    """Shorter than a window, in other capitals and under another label: still the same text."""
    lines = [" ".join(text(seed).split()[:5]) for seed in range(40)]
    vocabulary = Vocabulary(size=256, path=str(write_vocabulary(tmp_path / "vocabulary.txt")))
    stores = []
    for name, spelt, label in (("one", str, "no"), ("two", str.upper, "yes")):
        rows = "".join(f"{spelt(line)},{label if number else 'maybe'}\n" for number, line in enumerate(lines))
        (tmp_path / f"{name}.csv").write_text("text,label\n" + rows)
        table = Table(paths=str(tmp_path / f"{name}.csv"), labels=["maybe", label])
        data = dataclasses.replace(declared(tmp_path, tmp_path, vocabulary=vocabulary), source=table, pairs="none")
        stores.append(prepare(dataclasses.replace(data, short_sequence_rate=0.0), PRIVACY))
    assert found_rows(*stores)["any"] == stores[0].manifest.rows["protected"]


def test_two_vocabularies_are_not_compared(tmp_path: Path):
    one = store(tmp_path, "one", texts(0))
    other = prepare(declared(tmp_path, tmp_path / "one"), PRIVACY)
    with pytest.raises(ValueError, match="one vocabulary"):
        found_rows(one, other)


def test_a_manifest_is_that_of_its_checksum_or_none(tmp_path: Path):
    one, private = store(tmp_path, "one", texts(0)), tmp_path / "private"
    left_out.keep_manifest(private, one)
    found = left_out.store(private, one.manifest.checksum)
    assert found is not None and np.array_equal(found.rows("protected", [0])["tokens"], one.rows("protected", [0])["tokens"])
    left_out.inherit(tmp_path / "next", private)
    assert left_out.manifest(tmp_path / "next", one.manifest.checksum) == one.manifest
    assert left_out.store(private, "another") is None
    path = private / left_out.FOLDER / f"{one.manifest.checksum}.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps(held | {"manifest": held["manifest"] | {"rows": {"protected": 1}}}))
    assert left_out.manifest(private, one.manifest.checksum) is None
    path.write_text(json.dumps(held | {"store": str(tmp_path)}))
    assert left_out.manifest(private, one.manifest.checksum) is not None and left_out.store(private, one.manifest.checksum) is None
