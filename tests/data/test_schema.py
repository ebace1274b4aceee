"""Columns of a row: what is written is what was declared, a task reads what a source gives, and old rows are told by their format."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from dpx.data import embedded
from dpx.data.declared_data import Data, Synthetic, SyntheticLabels, Vocabulary
from dpx.data.documents import Example
from dpx.data.prepare import FORMAT, prepare
from dpx.data.rows import RowCutter, UnitDocument
from dpx.data.schema import as_json, classes, from_json, require_gives, stored, texts
from dpx.data.store import Store
from dpx.data.tokenizer import SPECIAL_TOKENS, of_vocabulary
from dpx.data.unit_names import SPLITS, KeyedHash
from dpx.declaration import ConfigError, declaration
from dpx.privacy.declared_privacy import Privacy
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice
from tests.clipping.batches import bert

from .corpora import PRIVACY, declared, records, write_records, write_vocabulary

SCHEMA = texts(8, 50) | {"label": classes(3)}


def columns(count: int = 2, **changed) -> dict[str, np.ndarray]:
    whole = {"tokens": np.ones((count, 8), np.int32), "length": np.full(count, 8), "segment_start": np.full(count, 8)}
    return whole | {"label": np.arange(count) % 3} | changed


@pytest.mark.parametrize("length", [2**16 - 1, 2**16])
def test_the_longest_row_knows_its_length(length: int):
    """A length that does not fit its type would be stored as another one."""
    place = texts(length, 50)["length"]
    assert stored({"length": np.array([length])}, {"length": place}, "here")["length"].tolist() == [length]


def test_columns_are_stored_in_their_types():
    found = stored(columns(), SCHEMA, "here")
    assert {name: values.dtype.str for name, values in found.items()} == {
        "tokens": "<u2", "segment_start": "<u2", "length": "<u2", "label": "|u1",
    }  # fmt: skip
    assert texts(8, 2**16 + 1)["tokens"].type == "uint32" and classes(257).type == "uint16"
    assert from_json(json.loads(json.dumps(as_json(SCHEMA)))) == SCHEMA


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"label": np.array([0, 3])}, "returned label with values from 0 to 3, but declared values from 0 to 2"),
        ({"label": np.array([-1, 0])}, "returned label with values from -1 to 0"),
        ({"length": np.array([8, 9])}, "returned length with values from 8 to 9"),
        ({"tokens": np.ones((2, 9), np.int32)}, r"returned tokens of shape \[9\], but declared \[8\]"),
        ({"tokens": np.full((2, 8), 50)}, "returned tokens with values from 50 to 50"),
        ({"more": np.zeros(2)}, "returned columns .*more"),
    ],
)
def test_what_was_not_declared_is_not_written(changed, words):
    with pytest.raises(ConfigError, match=f"^here: {words}"):
        stored(columns(**changed), SCHEMA, "here")


@pytest.mark.parametrize(
    ("task", "given", "words"),
    [
        (Classification(classes=3), SCHEMA, None),
        (MaskedLanguageModel(next_sentence=False), SCHEMA, None),
        (CausalLanguageModel(), SCHEMA, None),
        (MultipleChoice(choices=4), texts(8, 50, 4) | {"label": classes(4)}, None),
        (MaskedLanguageModel(next_sentence=True), SCHEMA, "its rows have no column is_next"),
        (Classification(classes=2), SCHEMA, "its column label has 3 different values, but task=classification is declared for 2"),
        (MultipleChoice(choices=3), SCHEMA, r"its column tokens has shape \[8\] in each row, but task=multiple_choice reads \[3, 8\]"),
    ],
)
def test_a_task_reads_what_the_source_gives(task, given, words):
    if words is None:
        return require_gives(given, task.columns(8, 50), "d", task.name)
    with pytest.raises(ConfigError, match=f"^data=d: {words}"):
        require_gives(given, task.columns(8, 50), "d", task.name)


@declaration
class Choices(SyntheticLabels):
    """Three texts an example: a pair that is too long, a pair that fits, a text alone."""

    def columns(self, sequence_length, vocabulary_size, is_paired):
        return texts(sequence_length, vocabulary_size, 3) | {"label": classes(3)}

    def fingerprint(self) -> str:
        return "1"

    def documents(self):
        for number in range(60):
            yield Example((("river stone", f"{'window ' * 40}"), ("river stone", "paper"), ("a",)), number % 3, f"unit {number}")


def test_examples_of_several_texts_are_rows_of_one_shape(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("dpx.data.prepare.open_source", lambda source: source)
    path = write_vocabulary(tmp_path / "vocabulary.txt")
    data = declared(tmp_path, path, pairs="none", sequence_length=16, vocabulary=Vocabulary(size=128, path=str(path)))
    data = dataclasses.replace(data, source=Choices(examples=60, labels=("first", "second", "third")))
    store = prepare(data, PRIVACY)
    MultipleChoice(choices=3).require_fits(bert(), data)
    rows = store.rows("protected", np.arange(5))
    assert rows["tokens"].shape == (5, 3, 16) and rows["length"].shape == (5, 3) and rows["label"].max() <= 2
    # [CLS] 2 words [SEP] the longer segment cut [SEP], a pair that fits, a text alone.
    assert rows["length"][0].tolist() == [16, 6, 3] and rows["segment_start"][0].tolist() == [4, 4, 3]
    assert store.lengths("protected", np.arange(5), 1).tolist() == [16] * 5
    assert store.rows("protected", [0], 6)["tokens"].tolist() == rows["tokens"][:1, :, :6].tolist()


def test_a_pair_that_is_too_long_loses_the_end_of_the_longer_one():
    data = Data(
        name="d", source=SyntheticLabels(examples=1, labels=("a", "b")), vocabulary=Vocabulary(size=64), sequence_length=11, pairs="none"
    )
    pieces = [*SPECIAL_TOKENS, *"abcdefghijklmnop"]
    cutter = RowCutter(data, KeyedHash("x"), of_vocabulary(pieces))

    def cut(first: str, second: str) -> str:
        read = UnitDocument("u", "c", Example(((first, second) if second else (first,),), 0))
        ((_, _, found),) = cutter.cut([("protected", read)])
        return "".join(pieces[token] for token in found["tokens"][0]).replace("[PAD]", "")

    assert cut("a b c d e f", "g h i j k l") == "[CLS]abcd[SEP]ghij[SEP]"
    assert cut("a b c d e f", "g h") == "[CLS]abcdef[SEP]gh[SEP]"
    assert cut("a b", "g h i j k l m n o p") == "[CLS]ab[SEP]ghijkl[SEP]"
    assert cut("a b c d e f g h i j", "") == "[CLS]abcdefghi[SEP]"


def test_equal_texts_of_other_labels_are_other_units():
    one, other = Example((("a", "b"),), 0), Example((("a", "b"),), 1)
    assert len({one.content(), other.content(), Example((("a", "b"),), 0, "u").content(), Example((("ab",),), 0).content()}) == 3


SOURCE = """'''The file is opened. It is read, line by line:

    >>> read(1)

- the first of the lines is the name of it;
- and the others are what it is for.

.. note:: None of the lines is in the file twice.
'''
"""
# By format. Where rows come out otherwise, raise FORMAT and write the new digest here.
DIGESTS = {2: "355881500ba510fc", 3: "355881500ba510fc", 5: "355881500ba510fc", 7: "355881500ba510fc", 8: "355881500ba510fc"}
DIGESTS[9] = "355881500ba510fc"  # conversations alone are otherwise


def test_other_rows_have_another_format(tmp_path: Path):
    """Of every way in which text becomes rows; corpora that were prepared would else stay as they were."""
    (tmp_path / "source.py").write_text(SOURCE)
    paragraphs = embedded._paragraphs(tmp_path / "source.py")
    assert len(paragraphs) == 4
    whole = hashlib.sha256(json.dumps(paragraphs).encode())
    for store in _corpora(tmp_path):
        for split in SPLITS:
            rows = store.rows(split, np.arange(store.manifest.rows[split]))
            for name in sorted(rows):
                whole.update(name.encode() + rows[name].tobytes())
    assert whole.hexdigest()[:16] == DIGESTS[FORMAT], "rows changed: raise dpx.data.prepare.FORMAT"


def _corpora(folder: Path) -> list[Store]:
    vocabulary = Vocabulary(size=128, path=str(write_vocabulary(folder / "vocabulary.txt")))
    path = write_records(folder / "a.jsonl", [record | {"id": f"author-{number % 9}"} for number, record in enumerate(records(40))])
    authors = Privacy(delta=1e-5, unit="author", rows_per_unit_max=3)
    of_text = [declared(folder, path, vocabulary=vocabulary, unit_field="id", pairs=pairs) for pairs in ("same_document", "none")]
    across = declared(folder, path, vocabulary=vocabulary, pairs="cross_document")
    made = {"vocabulary": Vocabulary(size=256), "sequence_length": 16, "directory": str(folder), "public_fraction": 0.2}
    chain = Data(name="chain", source=Synthetic(documents=30, words_per_document=40, states=16), **made)  # type: ignore[arg-type]
    labels = Data(name="labels", source=SyntheticLabels(examples=60, labels=("a", "b", "c")), pairs="none", **made)  # type: ignore[arg-type]
    return [*(prepare(data, authors) for data in of_text), *(prepare(data, PRIVACY) for data in (across, chain, labels))]
