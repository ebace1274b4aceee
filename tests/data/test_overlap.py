"""Corpora that share a unit or a passage are told from those that share nothing; manifests are believed where the ledger names them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpx.data import manifests, overlap
from dpx.data.declarations import Vocabulary
from dpx.data.overlap import share_text
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


def test_other_text_shares_nothing_and_the_same_text_everything(tmp_path: Path):
    one, other = store(tmp_path, "one", texts(0)), store(tmp_path, "other", texts(100))
    assert not share_text(one, other) and share_text(one, one)


def test_one_document_in_both_is_found_in_whatever_splits_it_is(tmp_path: Path):
    one, other = store(tmp_path, "one", texts(0)), store(tmp_path, "other", [*texts(100), *texts(0)], split_salt="another")
    assert share_text(one, other) and share_text(one, other, "public") and share_text(one, other, "protected", "heldout")


@pytest.mark.parametrize("most", [1 << 24, 400])
def test_a_passage_within_other_words_is_found_also_among_a_share_of_all_windows(tmp_path: Path, monkeypatch, most):
    monkeypatch.setattr(overlap, "_WINDOWS_MAX", most)
    one = store(tmp_path, "one", texts(0))
    other = store(tmp_path, "other", [f"{text(1000 + seed)} {text(seed)}" for seed in range(24)], sequence_length=48)
    apart = store(tmp_path, "apart", texts(200))
    assert not set(one.unit_ids("protected")) & set(other.unit_ids("protected"))
    assert share_text(one, other) and not share_text(one, apart)


def test_two_vocabularies_are_not_compared(tmp_path: Path):
    one = store(tmp_path, "one", texts(0))
    other = prepare(declared(tmp_path, tmp_path / "one"), PRIVACY)
    with pytest.raises(ValueError, match="one vocabulary"):
        share_text(one, other)


def test_a_manifest_is_that_of_its_checksum_or_none(tmp_path: Path):
    one, private = store(tmp_path, "one", texts(0)), tmp_path / "private"
    manifests.keep(private, one)
    found = manifests.store(private, one.manifest.checksum)
    assert found is not None and np.array_equal(found.rows("protected", [0])["tokens"], one.rows("protected", [0])["tokens"])
    manifests.inherit(tmp_path / "next", private)
    assert manifests.manifest(tmp_path / "next", one.manifest.checksum) == one.manifest
    assert manifests.store(private, "another") is None
    path = private / manifests.FOLDER / f"{one.manifest.checksum}.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps(held | {"manifest": held["manifest"] | {"rows": {"protected": 1}}}))
    assert manifests.manifest(private, one.manifest.checksum) is None
    path.write_text(json.dumps(held | {"store": str(tmp_path)}))
    assert manifests.manifest(private, one.manifest.checksum) is not None and manifests.store(private, one.manifest.checksum) is None
