"""One row of each document and epoch: which it is, and whose content it depends on."""

from pathlib import Path

import numpy as np
import pytest

from dpx.data.prepare import prepare
from dpx.data.store import Store
from dpx.privacy.declared_privacy import Privacy

from .corpora import declared, records, write_records, write_vocabulary

EPOCHS = 5
PRIVACY = Privacy(delta=1e-5, unit="document", rows_per_unit_max=EPOCHS, unit_mode="one_row")
CORPUS = records(60)


def cut(folder: Path, corpus: list[dict[str, str]], **settings: object) -> Store:
    from dpx.data.declared_data import Vocabulary

    folder.mkdir(exist_ok=True)
    vocabulary = Vocabulary(size=256, path=str(write_vocabulary(folder / "vocabulary.txt")))
    file = write_records(folder / "corpus.jsonl", corpus)
    return prepare(declared(folder, file, unit_field="id", vocabulary=vocabulary, cuts=EPOCHS, public_fraction=0.0, **settings), PRIVACY)


@pytest.fixture(scope="module", params=["none", "same_document"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return cut(tmp_path_factory.mktemp("cuts"), CORPUS, pairs=request.param)


def by_unit(store: Store, epoch: int) -> dict[str, tuple[bytes, int]]:
    names = store.unit_ids("protected")
    found = store.examples("protected", np.arange(len(names)), 1, epoch=epoch)
    return {name: (tokens.tobytes(), int(gone)) for name, tokens, gone in zip(names, found["tokens"], found["is_padding"], strict=True)}


def test_every_document_has_one_row_in_each_epoch_and_mostly_another_one(store: Store):
    units = store.manifest.units["protected"]
    assert store.manifest.rows["protected"] == EPOCHS * units and store.manifest.rows["heldout"] == store.manifest.units["heldout"]
    assert store.population(PRIVACY) == units
    of_epochs = [by_unit(store, epoch) for epoch in range(EPOCHS)]
    assert all(not gone for rows in of_epochs for _, gone in rows.values())
    distinct = [len({rows[name] for rows in of_epochs}) for name in of_epochs[0]]
    assert min(distinct) > 1 and np.mean(distinct) > 3


def test_the_row_depends_on_the_document_and_the_epoch_alone(store: Store):
    """Not on the batch it is read in, nor on the order: reading goes on after an interruption as if there had been none."""
    whole, order = by_unit(store, 3), np.random.default_rng(0).permutation(store.manifest.units["protected"])
    names = store.unit_ids("protected")
    for batch in np.array_split(order, 7):
        found = store.examples("protected", batch, 1, epoch=3)
        assert [tokens.tobytes() for tokens in found["tokens"]] == [whole[names[unit]][0] for unit in batch]
        assert store.lengths("protected", batch, 1, epoch=3).tolist() == found["length"].tolist()
    assert by_unit(store, 3 + EPOCHS) == whole


@pytest.mark.parametrize("pairs", ["none", "same_document"])
def test_neighbours_differ_in_the_rows_of_one_document_and_an_empty_one_counts(tmp_path: Path, pairs: str):
    with_it = cut(tmp_path / "with", CORPUS, pairs=pairs)
    number = with_it.unit_ids("protected")[3]
    emptied = [record | {"text": " "} if record["id"] == number else record for record in CORPUS]
    without = cut(tmp_path / "without", emptied, pairs=pairs)
    assert with_it.population(PRIVACY) == without.population(PRIVACY) and with_it.unit_ids("protected") == without.unit_ids("protected")
    for epoch in range(EPOCHS):
        one, other = by_unit(with_it, epoch), by_unit(without, epoch)
        assert {name for name in one if one[name] != other[name]} == {number} and other[number] == (bytes(4 * 32), 1)
    found = without.examples("protected", [3], 1, epoch=0)
    assert found["is_padding"].tolist() == [True] and not found["length"].any()
    assert without.lengths("protected", [3, 0], 1, epoch=0)[0] == 0


def test_a_paragraph_is_a_document(tmp_path: Path):
    from dpx.data.declared_data import TextFiles
    from dpx.data.sources import TextFilesSource

    path = write_records(tmp_path / "cases.jsonl", [{"id": "a", "text": "one\n\ntwo"}, {"id": "b", "text": "three"}])
    read = lambda **declared: list(TextFilesSource(TextFiles(paths=str(path), **declared)).documents())  # noqa: E731
    assert [(one.paragraphs, one.unit_id) for one in read(document_per="paragraph")] == [
        (("one",), None),
        (("two",), None),
        (("three",), None),
    ]
    assert [one.unit_id for one in read(document_per="paragraph", unit_field="id")] == ["a", "a", "b"]
    assert len(read()) == 2
