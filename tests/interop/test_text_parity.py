"""What a decoder is trained on, and what transformers renders and tokenises, are the same ids, before and after an export.

The suite is run by `pytest -m parity tests/interop/test_text_parity.py`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing

from dpx.data.labelled import Table
from dpx.data.store import Store
from dpx.data.tokenizer import SPECIAL_TOKENS, SpecialIds
from dpx.interop import tokenizer_files
from dpx.models.checkpoint_shape import model_of
from dpx.task.declared_task import CausalLanguageModel, Classification
from tests.generation.test_generate import generate, write

from . import cases
from .cases import VOCABULARY, Case
from .test_as_it_came import prepared

pytestmark = pytest.mark.parity

NAMES = [name for name in cases.names() if name.endswith("_lm_a") and not name.startswith(("bert", "roberta", "distilbert"))]
TOKENS, POSITIONS, LENGTH = 300, 700, 24
WORDS = "river stone bright window carry slowly garden market"
MARKS = ["<pad>", "<s>", "</s>", "<|q|>", "<unk>", "<mask>", "<bos>", "<eos>", "<|endoftext|>"]
TEMPLATE = """{% if tools is not none %}<|q|>{{ tools | tojson }}{% endif %}{{ bos_token }}
{%- for m in messages %}<|q|>{{ m['role'] + '\\n' + (m['content'] or '') }}{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}
{{- eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|q|>assistant\\n' }}{% endif %}"""
TURNS = [("system", "market"), ("user", "a<b & 'river'"), ("assistant", "stone é"), ("user", "garden"), ("assistant", "window")]
TURNS += [("user", "carry 'the' stone"), ("assistant", "slowly")]
FORMS = {"one turn": TURNS[1:3], "system": TURNS[:3], "three turns": TURNS[1:], "all": TURNS}
TOOL = {"type": "function", "function": {"name": "river<b>", "parameters": {"type": "object", "properties": {"é": {"type": "string"}}}}}
CALLED = [
    {"role": "user", "content": "river"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "river<b>", "arguments": {"é": "'a'"}}}],
    },
    {"role": "tool", "content": "bright & <b>"},
    {"role": "assistant", "content": "market"},
]


def checkpoint(folder: Path, name: str, begins: bool, has_class: bool) -> Path:
    """The family's small model, with byte pairs that take what it normalises and cuts by from its class where none is named."""
    case, config = Case.read(name), {"vocab_size": TOKENS, "max_position_embeddings": POSITIONS, "n_positions": POSITIONS}
    shapes = {key: (TOKENS if shape[0] == VOCABULARY else shape[0], *shape[1:]) for key, shape in case.tensors.items()}
    shapes |= {key: (POSITIONS, *shapes[key][1:]) for key in shapes if key.endswith("wpe.weight")}
    known = {key: value for key, value in config.items() if key in case.config or key == "vocab_size"}
    replace(case, config=case.config | known, tensors=shapes).write(folder)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([WORDS] * 3, vocab_size=296, special_tokens=MARKS, show_progress=False)
    own = trained._tokenizer
    if begins:
        own.post_processor = TemplateProcessing(single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 1)])
    own.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"} if has_class else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
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
@pytest.mark.parametrize(("begins", "has_class"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_ids_of_transformers(tmp_path: Path, name: str, begins: bool, has_class: bool, place: str):
    transformers = pytest.importorskip("transformers")
    folder = checkpoint(tmp_path / "model", name, begins, has_class)
    words = WORDS.split()
    asked = [(f"{one} <{words[-1 - number]}> & é", f"{words[number - 1]} {one}") for number, one in enumerate(words)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ask": ask, "say": say}) + "\n" for ask, say in asked))
    talks: list[dict[str, Any]] = []
    for mark in ("", " x", " y", " z"):
        talks += [{"messages": [{"role": role, "content": text + mark} for role, text in turns]} for turns in FORMS.values()]
        asked_first = {"role": "user", "content": f"bright{mark}"}
        talks += [
            {"messages": [asked_first, *CALLED[1:]], "tools": [TOOL]},
            {"messages": talks[0]["messages"][:1] + CALLED[3:], "tools": []},
        ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in talks))
    source = Table(
        paths=str(tmp_path / "a.jsonl"), labels=None, prompt_field="ask", completion_field="say", template="{prompt}:{completion}"
    )
    stores = [prepared(tmp_path, folder, source, TOKENS, 200)]
    chats = Table(paths=str(tmp_path / "b.jsonl"), labels=None, messages_field="messages", tools_field="tools")
    stores += [prepared(tmp_path, folder, chats, TOKENS, POSITIONS)]
    read_from = folder if place == "before" else exported(tmp_path / "out", stores[0], name, place == "whole", folder)
    theirs = transformers.AutoTokenizer.from_pretrained(read_from)
    end = theirs.eos_token_id
    plain = {(tuple(theirs(f"{ask}:")["input_ids"]), (*theirs(say, add_special_tokens=False)["input_ids"], end)) for ask, say in asked}
    assert read(stores[0]) == plain

    def ids(messages: list[dict[str, Any]], **options: Any) -> tuple[int, ...]:
        return tuple(theirs.apply_chat_template(messages, return_dict=False, **options))

    wanted = set()
    for one in talks:
        messages, tools = one["messages"], one.get("tools")
        before = ids(messages[:-1], tools=tools, add_generation_prompt=True)
        wanted.add((before, ids(messages, tools=tools)[len(before) :]))
    assert read(stores[1]) == wanted


@pytest.mark.parametrize("has_class", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_completions_are_those_of_transformers(tmp_path: Path, name: str, has_class: bool):
    transformers = pytest.importorskip("transformers")
    folder = checkpoint(tmp_path / "model", name, True, has_class)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 40], "repetition_penalty": 1.2, "min_new_tokens": 2}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    asked = [{"prompt": f"{one} <b> & é"} for one in WORDS.split()]
    chats = [{"messages": [{"role": role, "content": text} for role, text in turns[:-1]]} for turns in FORMS.values()]
    chats += [{"messages": CALLED[:-1], "tools": [TOOL]}]
    for rows, options in ((asked, {}), (chats, {"messages_field": "messages", "tools_field": "tools"})):
        place = tmp_path / str(len(rows))
        place.mkdir()
        write(place / "prompts.jsonl", rows)
        for line, row in zip(generate(place, str(folder), max_new_tokens=12, **options), rows, strict=True):
            if options:
                told = {"tools": row.get("tools"), "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
                given = theirs.apply_chat_template(row["messages"], **told)
            else:
                given = theirs(row["prompt"], return_tensors="pt")
            found = model.generate(**given, do_sample=False, max_new_tokens=12)[0, given["input_ids"].shape[1] :].tolist()
            text = theirs.decode(found[:-1] if found[-1] in (2, 40) else found, skip_special_tokens=True)
            assert (line["tokens"], line["completion"]) == (len(found), text)


def wordpieces(folder: Path, name: str) -> Path:
    """An encoder's checkpoint with a tokenizer of its family's kind, whose class is the family's."""
    Case.read(name).write(folder)
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    if name.startswith("roberta"):
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator([WORDS] * 3, vocab_size=290, special_tokens=marks, show_progress=False)
        trained._tokenizer.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), marks, strict=True))
    else:
        letters = [*"abcdefghijklmnopqrstuvwxyz<>&'"]
        (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS.split(), *letters, *(f"##{one}" for one in letters)]) + "\n")
        settings = {"do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"vocab_size": TOKENS}))
    return folder


ENCODERS = ["bert_classes_a", "roberta_classes_a", "distilbert_classes_a"]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("place", ["before", "whole", "adapters"])
@pytest.mark.parametrize("name", [*ENCODERS, *NAMES])
def test_labelled_texts_and_pairs_have_the_ids_of_transformers(tmp_path: Path, name: str, place: str, pairs: bool):
    transformers = pytest.importorskip("transformers")
    folder = wordpieces(tmp_path / "model", name) if name in ENCODERS else checkpoint(tmp_path / "model", name, True, False)
    words = WORDS.split()
    rows = [
        {"text": f"{one} <b> É & 'x'", "other": f"{words[number - 1]} {' '.join((words + words)[: number * 2])}", "label": str(number % 2)}
        for number, one in enumerate(words)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Table(paths=str(tmp_path / "a.jsonl"), labels=["0", "1"], pair_field="other" if pairs else None)
    store = prepared(tmp_path, folder, source, TOKENS, LENGTH)
    read_from = folder
    if place != "before":
        read_from = tmp_path / "out"
        read_from.mkdir()
        model: Any = model_of(Case.read(name).config, "config.json")
        tokenizer_files.write(read_from, store, SpecialIds.from_ids(store.manifest), model, Classification(classes=2), LENGTH)
        if place == "whole":
            (read_from / "config.json").write_bytes((folder / "config.json").read_bytes())
    theirs = transformers.AutoTokenizer.from_pretrained(read_from)
    found = set()
    for split in store.manifest.splits:
        one = store.rows(split, np.arange(store.manifest.rows[split]))
        found |= {tuple(row[:end].tolist()) for row, end in zip(one["tokens"], one["length"], strict=True)}
    texts = [(row["text"], row["other"]) if pairs else (row["text"],) for row in rows]
    assert found == {tuple(theirs(*one, truncation=True, max_length=LENGTH)["input_ids"]) for one in texts}
    assert any(len(theirs(*one)["input_ids"]) > LENGTH for one in texts) is pairs
