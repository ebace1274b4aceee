"""What a decoder is trained on, and what transformers renders and tokenises, are the same ids, before and after an export.

The suite is run by `pytest -m parity tests/interop/test_text_parity.py`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing

from dpx.data.labelled import Table
from dpx.data.store import Store
from dpx.data.vocabulary import SpecialIds
from dpx.interop import tokenizer_files
from dpx.interop.shape import model_of
from dpx.task.declarations import CausalLanguageModel

from . import cases
from .cases import Case
from .test_as_it_came import prepared

pytestmark = pytest.mark.parity

NAMES = [name for name in cases.names() if name.endswith("_lm_a") and not name.startswith(("bert", "roberta", "distilbert"))]
# Families whose class of transformers builds another tokenizer than the definition that beside it has, where the settings name no class.
REBUILT = {"gemma2", "gemma3_text", "vaultgemma"}
WORDS = "river stone bright window carry slowly garden market"
TEMPLATE = """{% if tools is not none %}<|q|>{{ tools | tojson }}{% endif %}{{ bos_token }}
{%- for m in messages %}<|q|>{{ m['role'] + '\\n' + m['content'] }}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|q|>assistant\\n' }}{% endif %}"""
TURNS = [("system", "market"), ("user", "a<b & 'river'"), ("assistant", "stone é"), ("user", "garden"), ("assistant", "window")]
FORMS = {"one turn": TURNS[1:3], "system": TURNS[:3], "several turns": TURNS[1:], "all": TURNS}


def checkpoint(folder: Path, name: str, begins: bool, has_class: bool) -> Path:
    Case.read(name).write(folder)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([WORDS] * 3, vocab_size=290, special_tokens=["<pad>", "<s>", "</s>", "<|q|>"], show_progress=False)
    own = trained._tokenizer
    if begins:
        own.post_processor = TemplateProcessing(single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 1)])
    own.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"} if has_class else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def exported(to: Path, store: Store, name: str, is_whole: bool, folder: Path) -> Path:
    to.mkdir()
    model: Any = model_of(Case.read(name).config, "config.json")
    tokenizer_files.write(to, store, SpecialIds.from_ids(store.manifest), model, CausalLanguageModel(), 96)
    if is_whole:
        (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def read(store: Store) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ids of every prompt and completion."""
    rows = [store.rows(split, np.arange(store.manifest.rows[split])) for split in store.manifest.splits]
    parts = [zip(one["tokens"], one["segment_start"], one["length"], strict=True) for one in rows]
    return {(tuple(row[:start].tolist()), tuple(row[start:end].tolist())) for part in parts for row, start, end in part}


@pytest.mark.parametrize("place", ["before", "whole", "adapters"])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_ids_of_transformers(tmp_path: Path, name: str, begins: bool, place: str):
    transformers = pytest.importorskip("transformers")
    is_rebuilt = Case.read(name).config["model_type"] in REBUILT
    folder = checkpoint(tmp_path / "model", name, begins, has_class=is_rebuilt)
    words = WORDS.split()
    asked = [(f"{one} <{words[-1 - number]}> & é", f"{words[number - 1]} {one}") for number, one in enumerate(words)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ask": ask, "say": say}) + "\n" for ask, say in asked))
    talks = [
        [{"role": role, "content": text + mark} for role, text in turns] for turns in FORMS.values() for mark in ("", " x", " y", " z")
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in talks))
    source = Table(
        paths=str(tmp_path / "a.jsonl"), labels=None, prompt_field="ask", completion_field="say", template="{prompt}:{completion}"
    )
    stores = [prepared(tmp_path, folder, source, 300, 200)]
    stores += [prepared(tmp_path, folder, Table(paths=str(tmp_path / "b.jsonl"), labels=None, messages_field="messages"), 300, 200)]
    read_from = folder if place == "before" else exported(tmp_path / "out", stores[0], name, place == "whole", folder)
    theirs = transformers.AutoTokenizer.from_pretrained(read_from)
    end = theirs.eos_token_id
    plain = {(tuple(theirs(f"{ask}:")["input_ids"]), (*theirs(say, add_special_tokens=False)["input_ids"], end)) for ask, say in asked}
    assert read(stores[0]) == plain

    def ids(messages: list[dict[str, str]], **options: Any) -> tuple[int, ...]:
        return tuple(theirs.apply_chat_template(messages, return_dict=False, **options))

    chats = set()
    for one in talks:
        before = ids(one[:-1], add_generation_prompt=True)
        chats.add((before, ids(one)[len(before) :]))
    assert read(stores[1]) == chats
