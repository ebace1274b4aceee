"""Labelled rows of the user's files, in every format, refused in a line that names the row, and cut into splits."""

import csv
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpx import config
from dpx.claim import caveats
from dpx.config import recipes
from dpx.data import left_out
from dpx.data.declared_data import Data, Vocabulary
from dpx.data.documents import Example
from dpx.data.labelled import Table
from dpx.data.prepare import prepare
from dpx.data.record_reader import records as records_of
from dpx.data.sources import TableSource
from dpx.declaration import ConfigError

from .corpora import PRIVACY, SHARED_DATA, write_vocabulary

LABELS = ["no", "yes"]


def _against(of: Any, manifest: Any) -> list[str]:
    return caveats.reasons_against(of.data, of.privacy, of.sampler, of.seed, of.claim.reasons_of_mechanism, manifest)


def read(*paths: Path, **settings: object) -> list[Example]:
    return [one for one in TableSource(table(*paths, **settings)).documents() if isinstance(one, Example)]


def table(*paths: Path, **settings: object) -> Table:
    return Table(paths=[str(path) for path in paths], **{"labels": LABELS, **settings})  # type: ignore[arg-type]


def rows(count: int, start: int = 0) -> list[dict[str, str]]:
    words = ["river", "stone", "bright", "window", "garden", "market"]
    return [
        {"text": f"{words[number % 6]} {'x' * (1 + number % 9)} {number}", "label": LABELS[number % 2], "who": f"author {number // 3}"}
        for number in range(start, start + count)
    ]


def write_csv(path: Path, records: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    return path


def test_every_format_gives_the_same_rows(tmp_path: Path):
    records = rows(6)
    lines = ["\t".join(record.values()) for record in records]
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress("\n".join(["text\tlabel\twho", *lines]).encode(), mtime=0))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_csv(tmp_path / "a.csv", records)
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    expected = [Example(texts=((record["text"],),), label=LABELS.index(record["label"]), unit_id=record["who"]) for record in records]
    for name in ("a.tsv.gz", "a.jsonl", "a.csv", "a.parquet"):
        assert read(tmp_path / name, unit_field="who") == expected, name


def test_a_csv_field_may_hold_anything_and_a_tsv_has_no_quoting(tmp_path: Path):
    text = 'a "quoted", text\nof two lines'
    write_csv(tmp_path / "a.csv", [{"text": text, "label": "yes"}, {"text": "b", "label": "no"}])
    assert read(tmp_path / "a.csv")[0].texts == ((text,),)
    (tmp_path / "a.tsv").write_text('text\tlabel\n"half a quotation\tyes\nb\tno\n')
    assert read(tmp_path / "a.tsv")[0].texts == (('"half a quotation',),)


def test_pairs_choices_and_labels_that_are_numbers(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    records = [{"text": "a", "second": "b", "ends": ["c", "d"], "label": 1}, {"text": "e", "second": "f", "ends": ["g", "h"], "label": 0}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    first = read(path, pair_field="second", labels=[0, 1])[0]
    assert first == Example(texts=(("a", "b"),), label=1)
    chosen = read(path, choices_field="ends", choices=2, labels=["0", "1"])[1]
    assert chosen == Example(texts=(("e", "g"), ("e", "h")), label=0)
    assert table(path, labels=None).classes == ("0", "1")
    written = [*(f"{'0' * zeros}1" for zeros in range(12)), "7"]
    (tmp_path / "a.tsv").write_text("".join(f"{line}\n" for line in ["text\tlabel", *(f"a\t{label}" for label in written)]))
    assert table(tmp_path / "a.tsv", labels=None).classes == (*reversed(written[:-1]), "7"), "the same in every process"
    (tmp_path / "a.tsv").write_text(f"text\tlabel\na\t{'1' * 5000}\nb\t2\n")
    assert table(tmp_path / "a.tsv", labels=None).classes == ("1" * 5000, "2")


@pytest.mark.parametrize("one_of_them", ["1.25", "2e-05", ".5", "-1.5"])
def test_labels_that_are_measurements_are_refused(tmp_path: Path, one_of_them: str):
    labels = [*map(str, range(8)), one_of_them]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"row {n},{label}\n" for n, label in enumerate(labels)))
    reason = f"9 numbers with decimals, such as {one_of_them}, which are no classes. Use task=regression with data.source.target_field"
    with pytest.raises(ConfigError, match=re.escape(reason)):
        _ = table(tmp_path / "a.csv", labels=None).classes


def test_a_table_with_one_label_is_refused_by_its_name(tmp_path: Path):
    (tmp_path / "a.csv").write_text("text,label\na,yes\nb,yes\n")
    with pytest.raises(
        ConfigError, match="the training rows have only the label yes. Name the column of labels with data.source.label_field"
    ):
        _ = table(tmp_path / "a.csv", labels=None).classes


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("text\tlabel\na\tyes\nb\t\n", {}, r":3: has no label under 'label'\. Give every row"),
        ("text\tlabel\na\tyes\nb\tmaybe\n", {}, r":3: has the label 'maybe', which is not among no, yes\. .*data.source.labels"),
        ("text\tclass\na\tyes\n", {}, r":2: has no column 'label'; its columns are text, class\. Name the columns with data.source"),
        ("text\tlabel\n \tyes\n", {}, r":2: has an empty text under 'text'\."),
        ("text\tlabel\nb\tyes\n", {}, r"^data.source.labels: no: no training row has this label\. .*allow_unseen_labels"),
        ("text\tlabel\nb\n", {}, r":2: has 1 fields, but the header has 2"),
        ("text\ttext\nb\ta\n", {}, "has two columns 'text'"),
        ("text\tlabel\n" + "x" * 10_000_000 + "\tyes\n", {}, r":2: the line has more than 4194304 bytes\. "),
        ("text\tlabel\n", {}, "contains no row"),
        ("text\tlabel\na\tyes\nb\tno\n", {"unit_field": "who"}, r":2: has no column 'who'"),
        ("text\tlabel\twho\na\tyes\t \n", {"unit_field": "who"}, r":2: does not name its unit under 'who'\."),
    ],
)
def test_a_row_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, content: str, settings: dict[str, object], message: str):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(ConfigError, match=message) as refused:
        read(tmp_path / "a.tsv", **settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'text,label\n"a,yes\n', r"a.csv:\d: is not a valid row of a .csv file"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: is not a JSON object"),
        ("a.jsonl", b'{"text": 3, "label": "yes"}\n', "a.jsonl:1: has 3 under 'text', which is not text"),
        ("a.jsonl", b'{"text": "a", "label": 0.5}\n', "a.jsonl:1: has the label 0.5, which is not text and not"),
        ("a.jsonl", b'{"text": "a \\ud83d", "label": "yes"}\n', r"a.jsonl:1: contains \\ud83d, which is only half of a character\. "),
        ("a.jsonl", b'{"text": "a", "label": "yes", "n": ' + b"1" * 5000 + b"}\n", "a.jsonl:1: contains a number with too many digits"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl:1: contains .* lists that are nested too deeply"),
        ("a.parquet", b"PAR1 and nothing", "a.parquet: is not a complete .parquet"),
        ("a.tsv.gz", b"\x1f\x8b\x08", "is not a complete gzip file"),
        ("a.txt", b"a", "dpx cannot read this kind of file"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name)


def test_of_a_parquet_the_named_columns_are_read_alone(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def written(*columns: tuple[str, object]) -> Path:
        parquet.write_table(pa.table([values for _, values in columns], names=[name for name, _ in columns]), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    text, label = ("text", pa.array(["a", "b"])), ("label", pa.array(["no", "yes"]).dictionary_encode())
    late = pa.array([1 << 60, 0], pa.timestamp("ms"))
    assert [one.label for one in read(written(text, label, ("when", late)))] == [0, 1]
    with pytest.raises(ConfigError, match=r"a.parquet row 1: has a value under 'when' that cannot be read \("):
        read(written(text, label, ("when", late)), unit_field="when")
    with pytest.raises(ConfigError, match="a.parquet: has two columns 'label'"):
        read(written(text, label, label))
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(bytes([0] * 4 + [2, 0, 0, 0])), pa.py_buffer(b"\xff\xfe")])
    with pytest.raises(ConfigError, match="a.parquet row 1: has a value under 'text' that cannot be read"):
        read(written(("text", broken), ("label", pa.array(["no"]))))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": ["a"]}, "a classifier needs at least two labels"),
        ({"pair_field": "text"}, "data.source: text: the same column cannot be two parts"),
        ({"select": "test"}, "data.source.select=test: this data has no test set"),
        ({"choices": 3}, "data.source.choices=3: the number of choices and the column"),
        ({"choices": 2, "choices_field": "ends"}, r"each label is the position of a choice\. Use labels=\[0,1\]"),
    ],
)
def test_what_cannot_be_declared(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        table(Path("a.csv"), **settings)


def data(folder: Path, source: Table) -> Data:
    vocabulary = Vocabulary(size=256, path=str(write_vocabulary(folder / "vocabulary.txt")))
    made = {"sequence_length": 16, "pairs": "none", "public_fraction": 0.0, "heldout_fraction": 0.25}
    return Data(name="rows", source=source, vocabulary=vocabulary, directory=str(folder / "stores"), **made)  # type: ignore[arg-type]


def test_a_test_set_is_a_split_of_its_own_or_what_is_held_out(tmp_path: Path):
    train, test = write_csv(tmp_path / "train.csv", rows(60) + rows(3)), write_csv(tmp_path / "test.csv", rows(4) * 2)
    dev = prepare(data(tmp_path, table(train, test_paths=str(test))), PRIVACY).manifest
    assert dev.rows["protected"] + dev.rows["heldout"] == 63, "equal rows stay rows"
    assert dev.rows["heldout"] > 5 and dev.rows["test"] == 8, "every row of a test set counts"
    store = prepare(data(tmp_path, table(train, test_paths=str(test), select="test")), PRIVACY)
    assert store.manifest.rows == {"protected": 63, "heldout": 8, "public": 0}
    assert store.rows("heldout", np.arange(8))["label"].tolist() == [0, 1, 0, 1, 0, 1, 0, 1]


def test_equal_rows_are_units_in_one_split_or_are_removed_and_counted(tmp_path: Path):
    train = write_csv(tmp_path / "train.csv", rows(60) + rows(20) + rows(5))
    kept, removed = (prepare(data(tmp_path, table(train, equal_rows=which)), PRIVACY) for which in ("keep", "remove"))
    assert sum(kept.manifest.rows.values()) == sum(kept.manifest.units.values()) == 85 and sum(removed.manifest.rows.values()) == 60
    named = {split: kept.unit_ids(split) for split in kept.manifest.splits if split != "public"}
    contents = {split: {one.partition("-")[0] for one in names} for split, names in named.items()}
    assert not contents["protected"] & contents["heldout"], "no text is both protected and held out"
    assert all(len(set(names)) == len(names) for names in named.values())
    assert {one for split in removed.manifest.splits for one in removed.unit_ids(split)} == contents["protected"] | contents["heldout"]
    counts = left_out.read(removed.folder)
    assert sum(one.texts_repeated for one in counts.values()) == 25 == 85 - sum(one.rows for one in counts.values())
    assert (
        "protected texts or rows are left out: each repeats an equal one, and both are one unit"
        in left_out.in_words(counts["protected"], "protected", "are")[-1]
    )
    assert not any(one.texts_repeated for one in left_out.read(kept.folder).values())


def test_without_one_of_several_equal_rows_the_others_are_the_same_units(tmp_path: Path):
    """The neighbouring table of the claim: each row is a unit, wherever its equals stand in the file."""
    all_rows = rows(60) + rows(9)
    whole = prepare(data(tmp_path, table(write_csv(tmp_path / "a.csv", all_rows))), PRIVACY)
    for gone in (2, 62):
        fewer = prepare(data(tmp_path, table(write_csv(tmp_path / f"b{gone}.csv", all_rows[:gone] + all_rows[gone + 1 :]))), PRIVACY)
        of = lambda store: {one for split in store.manifest.splits for one in store.unit_ids(split)}  # noqa: E731
        assert of(fewer) < of(whole) and len(of(whole) - of(fewer)) == 1


def test_a_unit_of_several_rows_is_whole_in_one_split_but_for_the_test_set(tmp_path: Path):
    train, test = write_csv(tmp_path / "train.csv", rows(60)), write_csv(tmp_path / "test.csv", rows(6))
    store = prepare(data(tmp_path, table(train, test_paths=str(test), unit_field="who")), PRIVACY)
    names = {split: set(store.unit_ids(split)) for split in ("protected", "heldout", "test")}
    assert not names["protected"] & names["heldout"] and len(names["protected"] | names["heldout"]) == 20
    assert names["test"] == {"author 0", "author 1"} and store.manifest.rows["test"] == 6
    assert store.manifest.units["protected"] == len(names["protected"])


def test_a_row_does_not_move_when_another_is_removed(tmp_path: Path):
    everything = rows(40)
    of_all = prepare(data(tmp_path, table(write_csv(tmp_path / "all.csv", everything))), PRIVACY)
    of_less = prepare(data(tmp_path, table(write_csv(tmp_path / "less.csv", everything[:7] + everything[8:]))), PRIVACY)
    for split in ("protected", "heldout"):
        assert set(of_less.unit_ids(split)) <= set(of_all.unit_ids(split))


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    path = write_csv(tmp_path / "sub" / "a.csv", rows(6))
    (tmp_path / "link.csv").symlink_to(path)
    for paths in ([path, path], [tmp_path / "sub", path], [tmp_path / "sub" / "**"], [path, tmp_path / "link.csv"]):
        assert len(read(*paths, unit_field="who")) == 6, paths
    with pytest.raises(ConfigError, match=r"^data.source.paths=\[\]: a path is empty\. "):
        TableSource(Table(paths="", labels=LABELS))


def test_one_file_is_not_both(tmp_path: Path):
    path = write_csv(tmp_path / "a.csv", rows(4))
    with pytest.raises(ConfigError, match="is named both as training data and as the test set"):
        read(path, test_paths=str(path))


def _not_covered(experiment):
    return caveats.not_covered(experiment.mechanism, experiment.clipping_method, experiment.data, experiment.privacy)


def test_the_statement_says_where_labels_come_from_and_what_a_test_set_is(tmp_path: Path):
    path = write_csv(tmp_path / "a.csv", rows(6))
    given = ["data=table", f"data.source.paths={path}", "task=classification", "data.declared_size=100"]
    declared, _ = config.build(recipes.compose([*given, "data.source.labels=[no,yes]", "data.source.unit_note=a line of a poem"]))
    learnt, _ = config.build(recipes.compose([*given, "data.source.labels=null"]))
    assert not _against(declared, None) and not any("test set" in line for line in _not_covered(declared))
    assert any("a line of a poem" in line for line in _not_covered(declared))
    assert learnt.data.labels == ("no", "yes") and ["labels" in reason for reason in _against(learnt, None)] == [True]
    for select in ("dev", "test"):
        chosen = recipes.compose([*given, "data.source.labels=[no,yes]", "data.source.test_paths=b.csv", f"data.source.select={select}"])
        assert any(f"data.source.select={select}" in line for line in _not_covered(config.build(chosen)[0]))


PRESETS = {
    "glue_sst2": (2, 66_000, 872),
    "glue_mrpc": (2, 3_600, 408),
    "glue_qnli": (2, 5_400, None),
    "glue_mnli": (3, 9_800, 9_815),
    "glue_qqp": (2, 40_000, None),
    "overruling": (2, 1_800, 480),
    "casehold": (5, 1_000, None),
    "ledgar": (100, 1_000, None),
}


@pytest.mark.skipif(not (SHARED_DATA / "sst2").is_dir(), reason="the tasks' files are not here")
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (rows > 9_000)) for one, (_, rows, _) in PRESETS.items()])
def test_a_preset_reads_the_file_it_names(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DPX_DATA", os.fspath(SHARED_DATA))
    task = {"casehold": ["task=multiple_choice"]}.get(name, ["task=classification", f"task.classes={PRESETS[name][0]}"])
    experiment, _ = config.build(recipes.compose([f"data={name}", *task]))
    source = experiment.data.source
    assert isinstance(source, Table)
    examples = [one for one in TableSource(source).documents() if isinstance(one, Example)]
    labels, least, test = PRESETS[name]
    assert len(source.classes) == labels and {one.label for one in examples} <= set(range(labels))
    assert sum(not one.is_test for one in examples) >= least and (sum(one.is_test for one in examples) or None) == test


def test_texts_that_are_longer_than_a_row_are_counted(tmp_path: Path):
    long = [row | {"text": f"{row['text']} {'a ' * 40 * (number % 2)}"} for number, row in enumerate(rows(40))]
    store = prepare(data(tmp_path, table(write_csv(tmp_path / "a.csv", long))), PRIVACY)
    found = left_out.read(store.folder)["protected"]
    full = int((store.lengths("protected", np.arange(store.manifest.rows["protected"]), 1) == 16).sum())
    assert 0 < found.texts_cut <= full < found.texts == store.manifest.rows["protected"]
    assert left_out.in_words(found, "protected", "are") == [
        f"{found.texts_cut} of {found.texts} protected texts are longer than data.sequence_length and are cut; a larger one reads more"
    ]
    assert left_out.of_public(store, PRIVACY) is None, "without a public split, no count may be published"


@pytest.mark.parametrize("labels", [["0", "1"], ["0.0", "1.0"], None])
def test_whole_numbers_that_pandas_wrote_as_floats_are_these_numbers(tmp_path: Path, labels: list[str] | None):
    written = write_csv(tmp_path / "a.csv", [row | {"label": f"{number % 2}.0"} for number, row in enumerate(rows(40))])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row | {"label": float(n % 2)}) + "\n" for n, row in enumerate(rows(40, 40))))
    source = table(written, tmp_path / "b.jsonl", labels=labels)
    assert tuple(source.classes) == ("0", "1") and sum(prepare(data(tmp_path, source), PRIVACY).manifest.rows.values()) == 80


def test_line_ends_within_quotation_marks_are_text_and_others_are_not(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\r\n"a\r\nb\n\nc",-0.0\r\n\r\n"d\re",1\r\n')
    found = list(TableSource(Table(paths=str(path), labels=["0", "1"])).documents())
    assert found == [Example(texts=(("a\r\nb\n\nc",),), label=0), Example(texts=(("d\re",),), label=1)]
    path.write_bytes(b"text,label\ra,0\rb,1\r")
    with pytest.raises(ConfigError, match=r"a.csv:1: is not a valid row of a .csv file .* line ends\.$"):
        list(TableSource(Table(paths=str(path), labels=["0", "1"])).documents())


@pytest.mark.parametrize(("separator", "between"), [("|", "|"), ("^", "^"), (",", ","), ("\\t", "\t")])
def test_a_separator_that_the_header_does_not_show_is_named(tmp_path: Path, separator: str, between: str):
    path = tmp_path / "a.csv"
    lines = [("a text", "label"), ("a;b c", "0"), ('"x"', "1"), (f'"d{between} e"', "1")]
    path.write_text("".join(between.join(line) + "\n" for line in lines))
    fields = {"labels": ["0", "1"], "text_field": "a text"}
    (known,) = Table(paths=str(path), separator=separator, **fields).training_sets()  # type: ignore[arg-type]
    wanted = [{"a text": text.strip('"'), "label": label} for text, label in lines[1:]]
    assert [dict(record) for _, record in known.records()] == wanted
    if between in "|^":
        with pytest.raises(ConfigError, match="or what separates them in a .csv file with data.source.separator"):
            list(TableSource(Table(paths=str(path), labels=["0", "1"], text_field="a text")).documents())


@pytest.mark.parametrize(
    ("name", "separator", "line"),
    [
        ("a.csv", "||", "is not one character"),
        ("a.csv", "", "is not one"),
        ("a.csv", '"', "is not one"),
        ("a.tsv", ";", "names no .csv file"),
    ],
)
def test_a_separator_without_meaning_is_refused(tmp_path: Path, name: str, separator: str, line: str):
    (tmp_path / name).write_text("text\tlabel\na\t0\n")
    with pytest.raises(ConfigError, match=line):
        Table(paths=str(tmp_path / name), labels=["0", "1"], separator=separator).training_sets()


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_of_semicolons_or_tabs_is_recognised_by_its_header(tmp_path: Path, separator: str):
    lines = ["text", "label", '"who, when"'], ["a, b", "x", "z"], [f'"c{separator} d"', "y", "z"]
    (tmp_path / "a.csv").write_text("".join(separator.join(line) + "\n" for line in lines))
    found = [record for _, record in records_of(tmp_path / "a.csv")]
    rest = {"who, when": "z"}
    assert found == [{"text": "a, b", "label": "x"} | rest, {"text": f"c{separator} d", "label": "y"} | rest]
