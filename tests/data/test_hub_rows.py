"""Labelled rows through the library `datasets`: those of a folder it saved, and of a name on the hub, whose download is stubbed."""

from pathlib import Path
from typing import Any

import pytest

from dpx.data.documents import Example
from dpx.data.labelled import Table
from dpx.data.prepare import prepare
from dpx.data.sources import TableSource
from dpx.declaration import ConfigError

from .corpora import PRIVACY
from .test_table import data, read, rows, table, write_csv

datasets = pytest.importorskip("datasets")
NAME = "hf://datasets/owner/reviews@abc1234"


def of(*paths: object, **settings: Any) -> list[Example]:
    return list(TableSource(named(*paths, **settings)).documents())


def named(*paths: object, **settings: Any) -> Table:
    return Table(paths=[str(path) for path in paths], **{"labels": ["no", "yes"], **settings})


def test_a_saved_folder_gives_the_rows_of_a_file(tmp_path: Path):
    expected = read(write_csv(tmp_path / "a.csv", rows(12)), unit_field="who")
    datasets.Dataset.from_list(rows(12)).save_to_disk(tmp_path / "one")
    splits = {"train": datasets.Dataset.from_list(rows(12)), "dev": datasets.Dataset.from_list(rows(4, 12))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "several")
    assert of(tmp_path / "one", unit_field="who") == of(tmp_path / "several", unit_field="who") == expected
    both = of(tmp_path / "several", test_paths=str(tmp_path / "several"), test_split="dev")
    assert [one.is_test for one in both] == [False] * 12 + [True] * 4
    assert of(tmp_path / "one", tmp_path / "a.csv", labels=None) == of(tmp_path / "a.csv", tmp_path / "one")
    with pytest.raises(ConfigError, match="is named both as training data and as the test set"):
        of(tmp_path / "several", test_paths=str(tmp_path / "several"), test_split="train")
    with pytest.raises(ConfigError, match="several: could not be loaded .*KeyError.*Check name, config, split"):
        of(tmp_path / "several", split="validation")


def test_a_saved_folder_is_prepared_and_known_by_its_content(tmp_path: Path):
    datasets.Dataset.from_list(rows(60)).save_to_disk(tmp_path / "rows")
    manifest = prepare(data(tmp_path, named(tmp_path / "rows")), PRIVACY).manifest
    assert manifest.rows["protected"] + manifest.rows["heldout"] == 60
    before = TableSource(named(tmp_path / "rows")).fingerprint()
    assert before == TableSource(named(tmp_path / "rows")).fingerprint()
    datasets.Dataset.from_list(rows(59)).save_to_disk(tmp_path / "rows")
    assert before != TableSource(named(tmp_path / "rows")).fingerprint()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the hub was asked for; it answers with rows of the split."""
    found: list[Any] = []

    def load_dataset(name: str, config: str | None, **settings: Any) -> list[dict[str, str]]:
        found.append((name, config, settings))
        return rows(8) if settings["split"] == "train" else rows(2, 8)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return found


def test_a_name_on_the_hub_is_asked_for_its_splits_at_a_revision(asked: list[Any], tmp_path: Path):
    declared = named(NAME, test_paths=NAME, test_split="validation", subset="plain")
    opened = TableSource(declared)
    prints = opened.fingerprint(), TableSource(named(NAME)).fingerprint(), TableSource(named(NAME[:-1])).fingerprint()
    assert len(set(prints)) == 3 and not asked, "a prepared store opens again without a network"
    found = list(opened.documents())
    assert [one.texts for one in found] == [one.texts for one in read(write_csv(tmp_path / "a.csv", rows(10)))]
    assert [one.is_test for one in found] == [False] * 8 + [True] * 2
    same = {"revision": "abc1234", "streaming": False}
    assert asked == [("owner/reviews", "plain", {"split": split, **same}) for split in ("train", "validation")]
    of_data = data(tmp_path, declared)
    assert of_data.is_remote and list(of_data.known_as) == ["reviews"]
    assert not data(tmp_path, table(tmp_path / "a.csv")).is_remote


def test_what_the_hub_cannot_give_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match=r"^owner/reviews: could not be loaded \(ConnectionError: no route to the hub\)\. ") as refused:
        of(NAME)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [])
    with pytest.raises(ConfigError, match=r"^owner/reviews\[train\]: contains no row"):
        of(NAME)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": "a", "label": -1}])
    with pytest.raises(ConfigError, match=r"^owner/reviews\[train\] row 1: has the label '-1', which is not among no, yes"):
        of(NAME)
