from pathlib import Path

import pytest

from dpx.data.declared_data import Data, Hub, Vocabulary
from dpx.data.prepare import prepare
from dpx.data.sources import HubSource
from dpx.declaration import ConfigError

from .corpora import PRIVACY, records, write_records

datasets = pytest.importorskip("datasets")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    datasets.Dataset.from_list(records(60)).save_to_disk(folder)
    return folder


def test_a_saved_data_set_is_prepared(saved: Path, tmp_path: Path):
    source = Hub(corpora=[{"name": str(saved), "text_field": "text", "unit_field": "id"}])
    data = Data(
        name="hub",
        source=source,
        vocabulary=Vocabulary(size=128),
        sequence_length=32,
        heldout_fraction=0.2,
        public_fraction=0.2,
        directory=str(tmp_path),
    )
    store = prepare(data, PRIVACY)
    assert store.manifest.rows["protected"] > 60
    assert {name for split in ("protected", "heldout", "public") for name in store.unit_ids(split)} == {
        f"doc-{number}" for number in range(60)
    }


@pytest.mark.parametrize("streaming", [False, True])
def test_files_are_loaded_by_a_builder_and_streamed(tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "files"
    folder.mkdir()
    write_records(folder / "part.jsonl", records(5))
    source = HubSource(Hub(corpora=[{"name": str(folder), "config": None, "split": "train", "unit_field": "id"}], streaming=streaming))
    assert [document.unit_id for document in source.documents()] == [f"doc-{number}" for number in range(5)]


@pytest.mark.parametrize("unit", ["", float("nan")])
def test_records_without_a_name_are_not_one_unit(tmp_path: Path, unit: object):
    datasets.Dataset.from_list([{"text": "a", "id": unit}]).save_to_disk(tmp_path / "corpus")
    source = HubSource(Hub(corpora=[{"name": str(tmp_path / "corpus"), "unit_field": "id"}]))
    with pytest.raises(ConfigError, match=r"corpus\[0\]: does not name its unit under 'id'"):
        list(source.documents())


def test_the_fingerprint_sees_another_content(saved: Path):
    source = HubSource(Hub(corpora=[{"name": str(saved)}]))
    before = source.fingerprint()
    assert before == source.fingerprint()
    (saved / "state.json").write_text("{}")
    assert before != source.fingerprint()


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ({"name": "SAVED", "text_field": "body"}, "has no value under 'body'; its fields are"),
        ({"name": "SAVED/none"}, "could not be loaded"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused(saved: Path, corpus: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    corpus["name"] = str(corpus["name"]).replace("SAVED", str(saved))
    with pytest.raises(ConfigError, match=message) as caught:
        list(HubSource(Hub(corpora=[corpus])).documents())
    assert "\n" not in str(caught.value)


def test_a_key_that_no_corpus_has_is_refused():
    with pytest.raises(ConfigError, match="txet_field"):
        Hub(corpora=[{"name": "x", "txet_field": "text"}])
