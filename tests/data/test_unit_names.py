"""Names of units: which are missing whatever they are read from, which are equal, and which are only reported as nearly so."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

import dpx
from dpx.data.declared_data import TextFiles
from dpx.data.prepare import prepare
from dpx.data.sources import TextFilesSource, _document
from dpx.data.unit_names import MISSING, in_one_form, near_equal, near_form, unit_name
from dpx.declaration import ConfigError

from .corpora import PRIVACY, declared, records, write_records
from .test_table import read

STATED = ("nan", "NaN", "None", "null", "NULL", "NA", "N/A", "<NA>")
BLANK = ("", " ", "\t", "\u00a0", "\u200b", " \ufeff")
# Of these one tool or another makes a missing name, whatever it is written to.
NAMELESS: list[Any] = [*STATED, *BLANK, None, float("nan")]


def refusal(kind: str, folder: Path, unit: Any) -> str:
    """The line that a record with this unit is answered by, read in one of the ways there are."""
    record = {"text": "some words", "label": "yes", "who": unit}
    with pytest.raises(ConfigError) as caught:
        match kind:
            case "text":
                (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
                list(TextFilesSource(TextFiles(paths=[str(folder / "a.jsonl")], unit_field="who")).documents())
            case "table":
                (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
                read(folder / "a.jsonl", unit_field="who")
            case "tsv":
                (folder / "a.tsv").write_text(f"text\tlabel\twho\nsome words\tyes\t{'' if unit is None else unit}\n")
                read(folder / "a.tsv", unit_field="who")
            case "parquet":
                arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
                parquet.write_table(arrow.Table.from_pylist([record]), folder / "a.parquet")
                read(folder / "a.parquet", unit_field="who")
            case "hub":
                _document(record, "corpus[0]", "text", "who")
    return str(caught.value)


@pytest.mark.parametrize("kind", ["text", "table", "tsv", "parquet", "hub"])
def test_what_stands_for_a_missing_name_is_no_person(kind, tmp_path):
    for unit in NAMELESS:
        if kind == "tsv" and isinstance(unit, str) and "\t" in unit:
            continue
        line = refusal(kind, tmp_path, unit)
        assert "\n" not in line and "under 'who'" in line
        assert ("has no value" in line) if kind == "hub" and unit is None else (repr(unit) in line or "does not name its unit" in line), (
            line
        )


@pytest.mark.parametrize("name", ["Null", "Na", "Nan", "nana", "N", "0", "none of us", "NaN1", "False"])
def test_people_keep_their_names(name):
    assert unit_name("here", name, "who") == name
    assert not {name} & MISSING


@pytest.mark.parametrize("value", [True, 1.0, ["a"], {"a": 1}])
def test_a_name_is_text_or_a_whole_number(value):
    with pytest.raises(ConfigError, match="^here: names its unit .*, which is not text and not a whole number"):
        unit_name("here", value, "who")


# What dpx/docs/your_text.md says of them.
EQUAL = [(1, "1"), (" Ann ", "Ann"), ("Ren\u00e9", "Rene\u0301")]
NEAR = [
    ("1", "1.0"),
    ("1", "01"),
    ("+1", "1.00"),
    ("-0.50", "-.5"),
    ("Ann Lee", "ann lee"),
    ("Ann Lee", "AnnLee"),
    ("Ann", "A\u200bnn"),
    ("Ann", "Ann\ufe0f"),
    ("Ann", "\uff21nn"),
    ("\ufb01sh", "fish"),
    ("stra\u00dfe", "STRASSE"),
    ("7", "\uff17"),
]
APART = [("1", "-1"), ("1", "10"), ("1", "1.01"), ("Ann", "Anna"), ("1e3", "1000"), ("a.0", "a"), (".", ""), ("Rene", "Ren\u00e9")]


def test_names_are_equal_nearly_equal_or_apart():
    for one, other in EQUAL:
        assert in_one_form(one) == in_one_form(other)
    for one, other in NEAR:
        assert in_one_form(one) != in_one_form(other) and near_form(one) == near_form(other), (one, other)
    for one, other in APART:
        assert near_form(one) != near_form(other), (one, other)


def test_the_page_lists_every_missing_name():
    page = (Path(dpx.__file__).parent / "docs" / "your_text.md").read_text()
    paragraph = next(part for part in page.split("\n\n") if part.startswith("A record without a name"))
    assert set(re.findall(r"`(\S+)`", paragraph)) - {"Null", "Na", "Nan"} == MISSING and set(STATED) <= MISSING


def test_groups_hold_different_names_of_any_split():
    names = [("protected", "b"), ("test", "b"), ("public", "Ann"), ("protected", "ann"), ("protected", "c"), ("heldout", "ANN")]
    assert near_equal(names) == [[("heldout", "ANN"), ("protected", "ann"), ("public", "Ann")]]
    assert near_equal([]) == near_equal([("protected", "a")]) == []


def prepared(folder: Path, written: list[dict[str, str]], privacy: Any = PRIVACY):
    folder.mkdir()
    return prepare(declared(folder, write_records(folder / "a.jsonl", written), unit_field="id"), privacy)


def test_nearly_equal_names_are_reported_and_change_nothing(tmp_path, capsys):
    written = records(80)
    written[3]["id"], written[4]["id"], written[5]["id"] = "DOC-70", "doc -71", "doc-72\u200b"
    store = prepared(tmp_path / "several", written)
    said, path = capsys.readouterr().err.splitlines(), store.folder / "near_equal_units.jsonl"
    assert [line for line in said if "names of units" in line] == [
        "6 names of units in 3 groups differ only in case, spaces, unseen characters or how a number is written; "
        f"each is a separate unit. They are listed in {path}"
    ]
    listed = [{one["name"] for one in json.loads(line)} for line in path.read_text().splitlines()]
    assert sorted(listed, key=min) == [{"DOC-70", "doc-70"}, {"doc -71", "doc-71"}, {"doc-72", "doc-72\u200b"}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # No part of the data: neither its checksum nor what is verified names it.
    assert path.name not in store.manifest.files
    assert sum(store.manifest.units.values()) == 80
    fewer = prepared(tmp_path / "fewer", [one for one in written if one["id"] != "DOC-70"])
    assert sorted(fewer.manifest.splits) == sorted(store.manifest.splits)
    for split in store.manifest.splits:
        assert [name for name in store.unit_ids(split) if name != "DOC-70"] == fewer.unit_ids(split)
    assert "4 names of units in 2 groups" in capsys.readouterr().err
    assert not (prepared(tmp_path / "none", records(20)).folder / path.name).exists()
    assert capsys.readouterr().err == ""


def test_a_source_of_a_package_is_held_to_the_same(tmp_path, monkeypatch):
    whole = TextFilesSource.documents

    def nameless(self: TextFilesSource):
        for document in whole(self):
            yield type(document)(document.paragraphs, "None" if document.unit_id == "doc-7" else document.unit_id)

    monkeypatch.setattr(TextFilesSource, "documents", nameless)
    with pytest.raises(ConfigError, match="^data=test: names its unit 'None' in document 8, which usually means a missing name"):
        prepared(tmp_path / "a", records(20))
