"""Data that a checkpoint has seen is found by the names its card and its user give, and takes the guarantee away."""

import json
import shutil
from pathlib import Path

import pytest

from dpx import config
from dpx.interop.card import among, named_by_card
from tests.planned import plan

from .conftest import composed

CARD = """---
language: en
datasets:
- wikipedia
- embedding-data/QQP
---
# A model
## Evaluation
Scored on [SST-2](https://a) and | CoLA | 1 |
## Training data
We train on [Books](https://b).
| Dataset | Rows |
|---|---|
| AllNLI ([SNLI](https://c) and [MultiNLI](https://d)) | 5 |
| Poems, handwritten | 2 |
## Intended use
[MRPC](https://e)
"""


def test_a_card_names_what_it_was_trained_on_and_not_what_it_was_measured_by(tmp_path: Path):
    (tmp_path / "README.md").write_text(CARD)
    named = named_by_card(tmp_path)
    assert named == ["wikipedia", "embedding-data/QQP", "Books", "Dataset", "SNLI", "MultiNLI", "Poems, handwritten"]
    assert named_by_card(tmp_path / "elsewhere") == []
    (tmp_path / "README.md").write_text("---\n: [\n---\nno heading")
    assert named_by_card(tmp_path) == []


@pytest.mark.parametrize(
    ("known_as", "found"),
    [
        (["qqp"], ["embedding-data/QQP"]),
        (["sst2"], ["SST-2", "the sst 2 set"]),
        (["squad"], ["SQuAD2.0"]),
        (["nli"], []),
        (["Stanford Sentiment Treebank"], []),
        ([], []),
    ],
)
def test_a_name_is_found_as_words(known_as: list[str], found: list[str]):
    assert among(known_as, ["embedding-data/QQP", "SST-2", "the sst 2 set", "sst25k", "MultiNLI", "SQuAD2.0", "stanford parser"]) == found


@pytest.mark.parametrize(
    ("known_as", "named"),
    [
        ("bookcorpus", "Book Corpus"),
        ("ag_news", "AGNews"),
        ("agnews", "fancyzhx/ag_news"),
        ("数据集", "大数据集"),
        ("sst2", "ＳＳＴ－２"),
        ("cafe", "Café reviews"),
        ("Straße", "STRASSE"),
        ("отзывы", "Отзывы 2020"),
    ],
)
def test_a_name_is_found_however_it_is_written(known_as: str, named: str):
    assert among([known_as], [named]) == [named]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff---\ndatasets: [sst2]\n---\nx",
        "---\ndatasets: [sst2]\n---",
        "---\r\ndatasets: [sst2]\r\n---\r\n",
        "\n--- \ndatasets: sst2\n--- \nx",
        "---\nDatasets:\n- sst2\n---\n",
        "---\ndatasets: {main: sst2}\n---\n",
        "---\ndatasets:\n- name: sst2\n---\n",
        "---\ndate: 2023-13-45\ndatasets:\n- sst2\ntags: [a]\n---\n",
        "---\nlicense: a: b\ndatasets: [sst2]\n---\n",
        "---\nlicense: a: b\ndatasets: sst2\n---\n",
        "## Training and evaluation data\nThe [sst2](x) set\n",
        "## Training data\n* sst2\n",
        "## Fine-tuning datasets\n1. sst2\n",
        "## Pretraining corpora\n| sst2 | 7 |\n",
    ],
)
def test_a_card_is_read_however_it_is_written(text: str, tmp_path: Path):
    (tmp_path / "README.md").write_bytes(text.encode())
    assert named_by_card(tmp_path) == ["sst2"]


@pytest.mark.parametrize("listed", ["5", "true", "null", "2023-01-02"])
def test_a_card_that_lists_no_names_is_no_fault(listed: str, tmp_path: Path):
    (tmp_path / "README.md").write_text(f"---\ndatasets: {listed}\n---\n")
    assert all(isinstance(name, str) for name in named_by_card(tmp_path))


def test_data_that_may_have_been_seen_has_no_guarantee(place: Path):
    given = ["train=last_layer", "init.provenance=public", "data.source.known_as=[poems]"]
    apart = plan(config.build(composed(place, *given, "init.trained_on=[wikipedia]"))[0])
    seen = plan(config.build(composed(place, *given, "init.trained_on=[Poems of Tiny]"))[0])
    assert apart["guarantee"] == "dp" and not apart["reasons"]
    assert seen["guarantee"] == "none" and any("Poems of Tiny, which may contain this run's data" in reason for reason in seen["reasons"])
    assert seen["init"]["origins"][0]["checkpoint"]["trained_on"] == ["Poems of Tiny"]


@pytest.mark.parametrize(
    ("folder", "of_config", "is_named"),
    [
        ("bert-poems", None, True),
        ("model", "somebody/bert-base-poems", True),
        ("models--somebody--bert-poems/snapshots/0a1b", None, True),
        ("poems/model", "poems/outputs/bert", False),
        ("model", "/home/somebody/poems/bert", False),
        ("model", r"C:\Users\poems\bert", False),
    ],
)
def test_a_checkpoint_called_after_the_data_may_have_seen_it(
    place: Path, tmp_path: Path, folder: str, of_config: str | None, is_named: bool
) -> None:
    copied = shutil.copytree(place / "model", tmp_path / folder)
    if of_config:
        facts = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(facts | {"_name_or_path": of_config}))
    given = [f"init.path={copied}", "train=last_layer", "init.provenance=public", "data.source.known_as=[poems]"]
    planned = plan(config.build(composed(place, *given))[0])
    assert planned["guarantee"] == ("none" if is_named else "dp")
    # The weights have the name that the user gave; where the folder lies stays private.
    (origin,) = planned["init"]["origins"]
    assert origin["name"] == ("somebody/bert-poems" if "--" in folder else Path(folder).name)
    assert not any(word in name for name in origin["checkpoint"]["names"] for word in ("home", "Users", "outputs"))
    assert any("which suggests that it was trained on this run's data" in reason for reason in planned["reasons"]) == is_named
