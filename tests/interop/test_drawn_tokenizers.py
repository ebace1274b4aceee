"""Tokenizers with drawn definitions, added tokens and settings give the ids, texts and marks of transformers, or are refused in one line.

Many more are drawn by `pytest -m parity tests/interop/test_drawn_tokenizers.py`.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from tokenizers.processors import ByteLevel, RobertaProcessing, TemplateProcessing

from dpx.data.rows import marked_examples
from dpx.data.tokenizer import of_path
from dpx.data.tokenizer_class import AS_DEFINED, USUAL
from dpx.declaration import ConfigError

from .test_tokenizer_class import LETTERS, MARKS, PAIRS, TEXTS, folder

FAMILIES = ["gpt2", "qwen2", "qwen3", "gemma2", "gemma3_text", "vaultgemma", "llama", "mistral", "bert", "roberta", "distilbert"]
CLASSES = [
    AS_DEFINED,
    "LlamaTokenizer",
    "GPT2TokenizerFast",
    "Qwen2Tokenizer",
    "GemmaTokenizerFast",
    "TokenizersBackend",
    "RobertaTokenizer",
]
PIECES = [AS_DEFINED, "BertTokenizer", "DistilBertTokenizerFast"]
MORE_TEXTS = ["abQQab ab", "<|endoftext|>a <|endoftext|> b <s>", "[SEP] a[CLS]", "aab_abc ab_", "AB <E> ab<E>b"]
OPTIONS: dict[str, list[Any]] = {
    "add_prefix_space": [True, False, None],
    "legacy": [True, False, None],
    "add_bos_token": [True, False],
    "add_eos_token": [True],
    "split_special_tokens": [True, False],
    "truncation_side": ["left", "right"],
    "do_lower_case": [True, False],
    "strip_accents": [True, False, None],
    "tokenize_chinese_chars": [False],
    "extra_special_tokens": [["ab"], [], {"image_token": "abc"}, ["<E>", "zz"]],
    "additional_special_tokens": [["-!"], ["<|q|>"]],
    "image_token": ["12"],
    "trim_offsets": [False],
}
LENGTHS = (6, 9, 30)


def drawn(draws: random.Random, place: Path) -> Path:
    """Writes the files of a drawn tokenizer."""
    place.mkdir(exist_ok=True)
    family, is_so = draws.choice(FAMILIES), lambda chance: draws.random() < chance
    has_pieces = "bert" in family and family != "roberta"
    dropped = draws.sample(MARKS, draws.choice([0, 0, 0, 1, 2, 3]))
    there = [mark for mark in MARKS if mark not in dropped]
    tokens = dict.fromkeys([*there, *LETTERS, *(first + last for first, last in PAIRS), *(f"##{one}" for one in LETTERS * has_pieces)])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = draws.choice(["<unk>", None]) if "<unk>" in there else None
    options = {"byte_fallback": is_so(0.2), "fuse_unk": is_so(0.3), "ignore_merges": is_so(0.2)}
    own = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]") if has_pieces else BPE(vocabulary, PAIRS, unk_token=unknown, **options))
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    by: Any = draws.choice([None, normalizers.NFC(), normalizers.NFD(), spaces, normalizers.Lowercase(), normalizers.Strip()])
    pieces = pre_tokenizers.Metaspace(prepend_scheme=draws.choice(["first", "always", "never"]), split=is_so(0.5))
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    cut: Any = draws.choice([None, pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=is_so(0.5)), pieces, digits])
    joined: Any = draws.choice([None, decoders.ByteLevel(), decoders.Metaspace(), decoders.Sequence([decoders.Replace("▁", " ")])])
    for name, part in {
        "normalizer": by,
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer() if has_pieces else cut,
        "decoder": joined,
    }.items():
        if part is not None:
            setattr(own, name, part)

    def read_as() -> dict[str, Any]:
        return {name: is_so(0.3) for name in ("lstrip", "rstrip", "single_word", "normalized")}

    own.add_special_tokens([AddedToken(mark, special=True, **read_as()) for mark in there if is_so(0.6)])
    own.add_tokens([AddedToken(one, special=is_so(0.5), **read_as()) for one in ("<|q|>", "QQ", "<E>", "ab_") if is_so(0.5)])
    ids = own.get_vocab(with_added_tokens=True)
    first, last = draws.choice(there), draws.choice(there)
    known = sorted({(first, ids[first]), (last, ids[last])})
    one_end = TemplateProcessing(single=f"{first} $A", pair=f"{first} $A {first} $B:1", special_tokens=known)
    ends = TemplateProcessing(single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=known)
    around: Any = draws.choice([None, ByteLevel(trim_offsets=False), one_end, ends, RobertaProcessing(known[-1], known[0])])
    if around is not None:
        own.post_processor = around
    if is_so(0.15):
        own.enable_padding(pad_token=draws.choice(there), direction="left")
    if is_so(0.15):
        own.enable_truncation(5, direction=draws.choice(["left", "right"]))
    own.save(str(place / "tokenizer.json"))

    def mark(text: str, **typed: str) -> Any:
        return text if is_so(0.7) else {"content": text} | read_as() | typed

    settings: dict[str, Any] = {}
    for name in USUAL:
        if not has_pieces or name not in ("unk_token", "cls_token", "sep_token") or is_so(0.2):
            drew = draws.random()
            settings |= {name: mark(draws.choice(there), __type="AddedToken")} if drew < 0.45 else {name: None} if drew < 0.5 else {}
            settings |= {name: mark(f"<new {name}>", __type="AddedToken")} if drew > 0.95 else {}
    settings |= {"tokenizer_class": draws.choice(PIECES if has_pieces else CLASSES)} if is_so(0.6) else {}
    settings |= {name: draws.choice(values) for name, values in OPTIONS.items() if is_so(0.15)}
    if is_so(0.3):
        texts = {number: text for text, number in ids.items()}
        numbers = draws.sample(range(len(ids) + 3), draws.choice([1, 2, 5]))
        settings["added_tokens_decoder"] = {
            str(number): {"content": texts.get(number, f"<extra {number}>"), "special": is_so(0.5)} | read_as() for number in numbers
        }
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    if is_so(0.2):
        of_map = {name: mark(draws.choice(there)) for name in ("bos_token", "eos_token", "pad_token") if is_so(0.6)}
        of_map |= {"additional_special_tokens": ["<|q|>", "zz"]} if is_so(0.3) else {}
        (place / "special_tokens_map.json").write_text(json.dumps(of_map))
    if is_so(0.1):
        late = {"<late>": len(ids), "<|q|>": ids.get("<|q|>", len(ids) + 1)}
        (place / "added_tokens.json").write_text(json.dumps(late))
    (place / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 400}))
    return place


def is_equal(place: Path) -> bool:
    """Asserts that dpx and transformers read a tokenizer alike; returns whether dpx does not refuse it."""
    try:
        own = of_path(place, 400)
    except ConfigError as refused:
        assert "\n" not in str(refused)
        return False
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(place)
    plain = {"add_special_tokens": False}
    for text in (*TEXTS, *MORE_TEXTS):
        ids = theirs(text)["input_ids"]
        assert own.tokenizer.encode(text).ids == ids and own.tokenizer.encode(text, **plain).ids == theirs(text, **plain)["input_ids"], text
        assert own.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert own.marks == theirs.special_tokens_map and len(own.vocabulary) == len(theirs)
    for texts in (("ab abc 12",), ("ab a b c d", "x y z ab"), ("a", "b c d e f g")):
        parts = [own.tokenizer.encode(one, **plain).ids for one in texts]
        for length in LENGTHS:
            row = marked_examples(own, [parts], length)
            assert row["tokens"][0, : row["length"][0]].tolist() == theirs(*texts, truncation=True, max_length=length)["input_ids"]
    return True


def test_drawn_tokenizers_are_those_of_transformers(tmp_path: Path):
    assert sum(is_equal(drawn(random.Random(seed), tmp_path / str(seed))) for seed in range(12)) >= 8


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(20))
def test_many_drawn_tokenizers_are_those_of_transformers(tmp_path: Path, seed: int):
    found = [is_equal(drawn(random.Random(f"{seed} {number}"), tmp_path / str(number))) for number in range(20)]
    assert sum(found) >= 12


ODD: list[Any] = [
    5,
    True,
    None,
    [],
    {},
    [1],
    {"a": 1},
    "",
    [None],
    [[]],
    {"content": 5},
    {"content": "a", "id": 3},
    1.5,
    {"x": {"content": "a"}},
]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize("family", ["llama", "roberta"])
def test_values_of_another_type_are_read_or_refused_in_one_line(tmp_path: Path, family: str, file: str):
    place = folder(tmp_path, family, None)
    keys = ("bos_token", "cls_token", "image_token", "extra_special_tokens", "added_tokens_decoder", "model_input_names", "trim_offsets")
    refused = 0
    for key in keys:
        for value in ODD:
            (place / file).write_text(json.dumps({key: value}))
            try:
                of_path(place, 400)
            except ConfigError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 20
