from typing import Any

import pytest

from dpx.data.declared_data import Data, Embedded, Hub, Source, Synthetic, TextFiles, Vocabulary
from dpx.declaration import ConfigError
from dpx.privacy.declared_privacy import Privacy

SYNTHETIC = Synthetic(documents=10, words_per_document=10, states=8)


def data(source: Source = SYNTHETIC, **changed: Any) -> Data:
    fields: dict[str, Any] = {"name": "test", "source": source, "vocabulary": Vocabulary(size=64), "sequence_length": 32, **changed}
    return Data(**fields)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sequence_length": 7}, "data.sequence_length=7: is too short"),
        ({"public_fraction": 0.6, "heldout_fraction": 0.4}, "the splits leave nothing to train on"),
        ({"heldout_fraction": 0.0}, "the splits leave nothing to train on"),
        ({"short_sequence_rate": 1.5}, "data.short_sequence_rate=1.5: is not a rate"),
        ({"declared_size": 0}, "data.declared_size=0"),
    ],
)
def test_settings_that_cannot_stand(changed: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        data(**changed)


def test_sources_and_vocabularies_check_themselves():
    for bad in (
        lambda: Synthetic(documents=0, words_per_document=10, states=8),
        lambda: Synthetic(documents=10, words_per_document=0, states=8),
        lambda: Synthetic(documents=10, words_per_document=10, states=7),
        lambda: Vocabulary(size=5),
        lambda: Hub(corpora=[{"config": "x"}]),
        lambda: Hub(corpora=[{"name": "x", "unit_field": "who"}, {"name": "x", "split": "train", "unit_field": "who"}]),
    ):
        with pytest.raises(ConfigError):
            bad()


@pytest.mark.parametrize(
    ("source", "names_units"),
    [
        (Embedded(), False),
        (SYNTHETIC, False),
        (TextFiles(paths=["a.jsonl"]), False),
        (TextFiles(paths=["a.jsonl"], unit_field="author"), True),
        (Hub(corpora=[{"name": "a", "unit_field": "author"}]), True),
        (Hub(corpora=[{"name": "a", "unit_field": "author"}, {"name": "b"}]), False),
    ],
)
def test_authors_need_a_source_that_names_them(source: Source, names_units: bool):
    data(source).require_fits(Privacy(delta=1e-5, unit="document", rows_per_unit_max=4))
    author = Privacy(delta=1e-5, unit="author", rows_per_unit_max=4)
    if names_units:
        data(source).require_fits(author)
    else:
        with pytest.raises(ConfigError, match="the source does not say who wrote a document"):
            data(source).require_fits(author)


@pytest.mark.parametrize("cuts", [0, -1])
def test_a_document_is_cut_at_least_once(cuts: int):
    with pytest.raises(ConfigError, match=f"^data.cuts={cuts}: is not a count of rows"):
        data(cuts=cuts)
