"""What training does not change goes out as it came: a tokenizer's files, its marks, its templates, and the tokens that end a text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from dpx.data.declared_data import Data, Vocabulary
from dpx.data.labelled import Table
from dpx.data.prepare import prepare, vocabulary_folder
from dpx.data.store import Store
from dpx.data.tokenizer import SpecialIds, of_path
from dpx.declaration import ConfigError
from dpx.files.weights import ends_of
from dpx.interop import tokenizer_files
from dpx.models.checkpoint_shape import model_of
from dpx.privacy.declared_privacy import Privacy
from dpx.task.declared_task import CausalLanguageModel, Classification

from .cases import Case

MARKS = ["<pad>", "<s>", "</s>", "<e>", "<q>"]
LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
SETTINGS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "model_input_names": ["input_ids"], "legacy": False}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def checkpoint(folder: Path, around: tuple[str, str] = ("", ""), settings: dict[str, Any] = SETTINGS) -> Path:
    """A folder of a small Llama, whose tokens are letters, with the marks `around` a text in its definition."""
    Case.read("llama_lm_b").write(folder)
    own = Tokenizer(BPE({token: number for number, token in enumerate([*MARKS, *LETTERS])}, []))
    own.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    own.add_special_tokens(MARKS)
    first, last = ([f"{mark}:0"] if mark else [] for mark in around)
    if any(around):
        known = [(mark, MARKS.index(mark)) for mark in around if mark]
        own.post_processor = TemplateProcessing(single=[*first, "$A:0", *last], pair="$A:0 $B:1", special_tokens=known)  # type: ignore[assignment]
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<q>"]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def stored(tmp_path: Path, folder: Path) -> Store:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"ask": f"{one} b", "say": f"c {one}"}) + "\n" for one in LETTERS))
    return prepared(tmp_path, folder, Table(paths=str(path), labels=None, prompt_field="ask", completion_field="say"))


def prepared(tmp_path: Path, folder: Path, source: Table, size: int = 64, length: int = 24) -> Store:
    data = Data(
        name="asked",
        source=source,
        vocabulary=Vocabulary(size=size, path=str(folder)),
        sequence_length=length,
        pairs="none",
        public_fraction=0.0,
        heldout_fraction=0.2,
        directory=str(tmp_path / "stores"),
    )
    return prepare(data, Privacy(delta=1e-5))


def exported(tmp_path: Path, store: Store, task: Any) -> tuple[Path, list[str]]:
    to = tmp_path / "out"
    to.mkdir()
    model: Any = model_of(Case.read("llama_lm_b").config, "config.json")
    return to, tokenizer_files.write(to, store, SpecialIds.from_ids(store.manifest), model, task, 24)


@pytest.mark.parametrize(
    ("around", "settings", "wanted"),
    [
        (("", ""), SETTINGS, []),
        (("<s>", ""), SETTINGS, [1]),
        # transformers reads the definition alone.
        (("", ""), SETTINGS | {"add_bos_token": True}, []),
        (("<s>", ""), SETTINGS | {"add_bos_token": False}, [1]),
    ],
)
def test_prompts_have_the_marks_that_their_tokenizer_puts_there_and_its_files_go_out_as_they_came(tmp_path, around, settings, wanted):
    settings = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    folder = checkpoint(tmp_path / "model", around, settings)
    store = stored(tmp_path, folder)
    to, anew = exported(tmp_path, store, CausalLanguageModel())
    assert not anew and {path.name for path in to.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    }
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (to / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((to / "tokenizer_config.json").read_text()) == settings
    rows = store.rows("protected", np.arange(4))
    assert all(row[: len(wanted)].tolist() == wanted and row[len(wanted)] > len(MARKS) - 1 for row in rows["tokens"])
    assert of_path(to, 64).begins == tuple(wanted)


@pytest.mark.parametrize(("around", "settings"), [(("", ""), {}), (("<s>", ""), {}), (("<s>", ""), {"add_bos_token": False})])
def test_transformers_reads_prompts_and_marks_as_dpx_before_and_after(tmp_path, around, settings):
    transformers = pytest.importorskip("transformers")
    folder = checkpoint(tmp_path / "model", around, SETTINGS | settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    to, _ = exported(tmp_path, store := stored(tmp_path, folder), CausalLanguageModel())
    own = store.tokenizer()
    for place in (folder, to):
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(place)
        assert theirs("a b")["input_ids"] == [*own.begins, *own.tokenizer.encode("a b", add_special_tokens=False).ids]
        assert (theirs.bos_token, theirs.eos_token, theirs.model_input_names) == ("<s>", "</s>", ["input_ids"])
        assert theirs.apply_chat_template([{"role": "user", "content": "b"}], tokenize=False) == "<s>b</s>"


def test_a_tokenizer_that_ends_prompts_is_written_anew_and_the_card_says_so(tmp_path):
    folder = checkpoint(tmp_path / "model", ("<s>", "</s>"), SETTINGS | {"add_eos_token": True, "add_bos_token": True})
    to, anew = exported(tmp_path, stored(tmp_path, folder), CausalLanguageModel())
    assert of_path(to, 64).tokenizer.encode("a").ids == [1, 5]
    assert anew == [
        "tokenizer.json: the marks around a text, which are those of the rows that were trained on",
        "tokenizer_config.json: tokenizer_class",
    ]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("around", [("", ""), ("<s>", ""), ("<s>", "</s>"), ("", "</s>")])
def test_texts_with_labels_have_the_marks_of_their_own_tokenizer(tmp_path, around, pairs):
    (tmp_path / "rows.csv").write_text(
        "text,other,label\n" + "".join(f"{one} b,c {one},{number % 2}\n" for number, one in enumerate(LETTERS))
    )
    folder = checkpoint(tmp_path / "model", around, SETTINGS | {"tokenizer_class": "PreTrainedTokenizerFast"})
    source = Table(paths=str(tmp_path / "rows.csv"), labels=["0", "1"], pair_field="other" if pairs else None)
    store = prepared(tmp_path, folder, source)
    to, anew = exported(tmp_path, store, Classification(classes=2))
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    wanted = {tuple(own.encode(f"{one} b", f"c {one}" if pairs else None).ids) for one in LETTERS}
    rows = [store.rows(split, np.arange(store.manifest.rows[split])) for split in store.manifest.splits]
    found = {tuple(row[:end].tolist()) for one in rows for row, end in zip(one["tokens"], one["length"], strict=True)}
    assert found == wanted and (to / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert anew == ["tokenizer_config.json: model_max_length"]


def test_a_text_without_a_token_or_a_mark_is_refused_with_its_place(tmp_path):
    folder = checkpoint(tmp_path / "model", settings=SETTINGS | {"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "rows.csv").write_text("text,label\na b,0\né,1\n")
    with pytest.raises(ConfigError, match=r"rows.csv:3: has a text in which the tokenizer reads no token"):
        prepared(tmp_path, folder, Table(paths=str(tmp_path / "rows.csv"), labels=["0", "1"]))


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [([2, 5], None, (2, 5)), (2, {"eos_token_id": [2, 5], "do_sample": True}, (2, 5)), (5, {"max_length": 9}, (5, 2)), (None, None, (2,))],
)
def test_every_token_that_ends_a_text_stays_and_the_end_of_rows_is_one(tmp_path, config, generation, ends):
    folder = checkpoint(tmp_path / "model")
    came = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config, "bos_token_id": 4}
    (folder / "config.json").write_text(json.dumps(came))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert vocabulary_folder(str(folder)) == vocabulary_folder(str(folder / "tokenizer.json")) == folder
    (to := tmp_path / "out").mkdir()
    told, anew = tokenizer_files.write_endings(to, {"eos_token_id": 2, "pad_token_id": 0, "width": 4}, folder, of_path(folder, 64))
    (to / "config.json").write_text(json.dumps(told))
    assert ends_of(to) == ends and told["width"] == 4 and told["bos_token_id"] == 4 and told.get("pad_token_id") == came.get("pad_token_id")
    assert (to / "generation_config.json").is_file() is (generation is not None)
    if ends_of(folder) == ends:
        assert not anew and told["eos_token_id"] == config
        assert generation is None or (to / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    else:
        assert "eos_token_id also has [2], where rows end" in anew[0]
