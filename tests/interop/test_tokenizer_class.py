"""A checkpoint's tokenizer is built by the class that its files name, as transformers builds it, or refused in one line."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from tokenizers.processors import TemplateProcessing

from dpx import config
from dpx.config.declared_init import RandomStart
from dpx.data.labelled import Table
from dpx.data.rows import marked_examples
from dpx.data.tokenizer import TextTokenizer, of_path, require_read_elsewhere
from dpx.data.tokenizer_class import AS_DEFINED
from dpx.declaration import ConfigError
from dpx.init.start import planned_start
from dpx.models.checkpoint_shape import model_of
from dpx.task.declared_task import CausalLanguageModel

from .cases import Case
from .conftest import composed
from .test_as_it_came import exported, prepared

MARKS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<bos>", "<eos>", "<|endoftext|>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCé0123456789'.,!-", "▁", "Ġ", " ", "Ã", "©", "\u0301", "<", ">", "Ċ", "Ì", "Ģ", "ģ"]
PAIRS = [("a", "b"), ("▁", "a"), ("Ġ", "a"), ("▁a", "b"), ("Ġa", "b"), ("ab", "c"), ("'", "s"), ("1", "2"), ("12", "3"), ("e", "\u0301")]
TEXTS = ["ab abc", " ab  ab's", "Abé e\u0301x 123 12", "a</s>ab <mask> ab", "<|q|>ab<|q|> ab", "\n\nab\nab ", "-!,. ab"]
# What each family's class replaces, so that a definition that says otherwise is another tokenizer.
NAMED = [(family, None) for family in ("gpt2", "qwen2", "qwen3", "gemma2", "gemma3_text", "vaultgemma", "llama", "mistral")]
NAMED += [("llama", "LlamaTokenizer"), ("llama", "LlamaTokenizerFast"), ("mistral", "LlamaTokenizer"), ("vaultgemma", "GemmaTokenizer")]
NAMED += [("llama", "GPT2TokenizerFast"), ("qwen2", AS_DEFINED), ("qwen3", AS_DEFINED), ("gemma2", AS_DEFINED), ("gpt2", "GPT2Tokenizer")]
NAMED += [("llama", AS_DEFINED), ("gpt2", AS_DEFINED), ("llama", "TokenizersBackend"), ("qwen3", "Qwen2Tokenizer"), ("roberta", None)]
NAMED += [
    ("roberta", "RobertaTokenizerFast"),
    ("llama", "PreTrainedTokenizer"),
    ("smollm3", None),
    ("olmo2", None),
    ("olmo2", "GPT2Tokenizer"),
]


def folder(
    place: Path, family: str, named: str | None, settings: dict[str, Any] | None = None, *, byte_level: bool = False, pieces: bool = False
) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    joined = [first + last for first, last in PAIRS]
    tokens = {token: number for number, token in enumerate([*MARKS, *LETTERS, *joined])}
    if pieces:
        tokens |= {f"##{one}": len(tokens) + number for number, one in enumerate(LETTERS)}
    own = Tokenizer(WordPiece(tokens, unk_token="[UNK]") if pieces else BPE(tokens, PAIRS, unk_token="<unk>"))
    own.normalizer = normalizers.Sequence([normalizers.Replace("x", "a"), normalizers.NFD()])  # type: ignore[assignment]
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True) if byte_level else pre_tokenizers.Whitespace()  # type: ignore[assignment]
    own.decoder = decoders.ByteLevel() if byte_level else decoders.WordPiece()  # type: ignore[assignment]
    own.add_special_tokens(["<pad>", "<s>", "<unk>", "[UNK]"])
    own.add_tokens(["<|q|>"])
    own.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)])  # type: ignore[assignment]
    own.save(str(place / "tokenizer.json"))
    told = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"} if not pieces else {}
    told |= ({} if named is None else {"tokenizer_class": named}) | (settings or {})
    (place / "tokenizer_config.json").write_text(json.dumps(told))
    (place / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 400}))
    return place


def require_equal(place: Path, own: TextTokenizer) -> None:
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(place)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert own.tokenizer.encode(text).ids == ids, text
        assert own.tokenizer.encode(text, "ab").ids == theirs(text, "ab")["input_ids"]
        assert own.tokenizer.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert own.tokenizer.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert list(own.begins) == theirs("ab")["input_ids"][: len(own.begins)]
    assert own.marks == theirs.special_tokens_map


@pytest.mark.parametrize("byte_level", [False, True])
@pytest.mark.parametrize(("family", "named"), NAMED)
def test_ids_and_texts_are_those_of_the_class(tmp_path: Path, family: str, named: str | None, byte_level: bool):
    place = folder(tmp_path / "model", family, named, byte_level=byte_level)
    require_equal(place, of_path(place, 400))


@pytest.mark.parametrize(("family", "named"), [("bert", None), ("distilbert", "DistilBertTokenizer"), ("bert", AS_DEFINED)])
@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": True}, {"tokenize_chinese_chars": False}])
def test_pieces_are_cut_by_the_settings(tmp_path: Path, family: str, named: str | None, settings: dict[str, Any]):
    place = folder(tmp_path / "model", family, named, settings, pieces=True)
    require_equal(place, of_path(place, 400))


@pytest.mark.parametrize(
    ("family", "named", "settings"),
    [
        ("llama", "LlamaTokenizer", {"legacy": True}),
        ("llama", "LlamaTokenizer", {"add_prefix_space": False, "add_bos_token": True}),
        ("gpt2", None, {"add_prefix_space": True, "add_bos_token": True}),
        ("roberta", None, {"add_prefix_space": True}),
        ("qwen3", None, {"add_prefix_space": True, "bos_token": None}),
        ("llama", None, {"extra_special_tokens": ["ab"]}),
        ("llama", None, {"additional_special_tokens": ["-!"], "image_token": "abc"}),
        ("gpt2", None, {"added_tokens_decoder": {"2": {"content": "</s>", "lstrip": True, "special": True}, "99": {"content": "abc"}}}),
        ("llama", None, {"added_tokens_decoder": {"2": {"content": "</s>", "rstrip": True, "special": True}}}),
        ("gemma2", None, {"split_special_tokens": True}),
        ("llama", None, {"split_special_tokens": True}),
    ],
)
def test_the_settings_decide_too(tmp_path: Path, family: str, named: str | None, settings: dict[str, Any]):
    place = folder(tmp_path / "model", family, named, settings)
    require_equal(place, of_path(place, 400))


def test_a_map_of_special_tokens_is_read_where_the_settings_list_no_added_tokens(tmp_path: Path):
    for number, listed in enumerate(({}, {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}})):
        place = folder(tmp_path / str(number), "llama", None, listed)
        (place / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "ab", "lstrip": True}}))
        require_equal(place, own := of_path(place, 400))
        assert own.marks["eos_token"] == ("ab" if not listed else "</s>")
        (place / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "tokenizer_class": "LlamaTokenizer"} | listed))
        require_equal(place, of_path(place, 400))


@pytest.mark.parametrize(
    ("family", "named", "line"),
    [
        ("llama", "T5Tokenizer", "tokenizer_config.json: tokenizer_class=T5Tokenizer: transformers builds this class .* Set .*Fast"),
        ("llama", "BertTokenizer", "tokenizer.json: is a BPE model, which the class BertTokenizer of transformers does not read"),
    ],
)
def test_a_class_that_is_not_followed_is_refused(tmp_path: Path, family: str, named: str, line: str):
    with pytest.raises(ConfigError, match=line) as refused:
        of_path(folder(tmp_path, family, named), 400)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("family", "named"), [("qwen3", None), ("gemma2", None), ("qwen2", AS_DEFINED), ("llama", "LlamaTokenizer")])
def test_an_export_names_the_class_of_its_rows(tmp_path: Path, family: str, named: str | None):
    place = folder(tmp_path / "model", family, named)
    rows = [{"ask": f"{one} ab's 123", "say": f"ab {one} x"} for one in LETTERS[:26]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Table(paths=str(tmp_path / "rows.jsonl"), labels=None, prompt_field="ask", completion_field="say")
    store = prepared(tmp_path, place, source, 400, 60)
    own = of_path(place, 400)
    assert store.tokenizer().definition == own.definition and store.tokenizer().marks == own.marks
    to, anew = exported(tmp_path, store, CausalLanguageModel())
    require_equal(to, own)
    assert of_path(to, 400).definition == own.definition
    is_said = any("tokenizer_class" in line for line in anew)
    assert is_said == (named is None or family == "qwen2")


@pytest.mark.parametrize(("family", "is_refused"), [("qwen2", True), ("qwen3", False), ("mistral", False), ("", False)])
def test_a_tokenizer_that_transformers_would_read_otherwise_beside_the_model_is_refused(tmp_path: Path, family: str, is_refused: bool):
    own = of_path(folder(tmp_path / "other", "llama", None), 400)
    require_read_elsewhere(of_path(folder(tmp_path / family, family, None), 400), family)
    with pytest.raises(ConfigError, match="^model.family=qwen2: .* by Qwen2Tokenizer, .* of PreTra") if is_refused else nullcontext():
        require_read_elsewhere(own, family)
    with pytest.raises(ConfigError) if is_refused or family == "mistral" else nullcontext():
        require_read_elsewhere(of_path(folder(tmp_path / "built", "llama", "LlamaTokenizer"), 400), family)
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 400}))
    is_other = of_path(tmp_path / "other", 400).definition != own.definition
    assert is_other is is_refused or family == "qwen3"


@pytest.mark.parametrize("cut", ["right", "left", None])
@pytest.mark.parametrize(("family", "named"), [("llama", None), ("gpt2", None), ("roberta", None), ("bert", None), ("bert", AS_DEFINED)])
def test_texts_and_pairs_that_are_too_long_are_cut_on_the_side_that_the_files_name(
    tmp_path: Path, family: str, named: str | None, cut: Any
):
    place = folder(tmp_path, family, named, {} if cut is None else {"truncation_side": cut}, pieces=family == "bert")
    if cut is None:
        definition = Tokenizer.from_file(str(place / "tokenizer.json"))
        definition.enable_truncation(4, direction="left")
        definition.enable_padding(pad_token="<mask>", pad_id=4)
        definition.save(str(place / "tokenizer.json"))
    own, theirs = of_path(place, 400), pytest.importorskip("transformers").AutoTokenizer.from_pretrained(place)
    assert own.marks == theirs.special_tokens_map
    for texts in (("ab ab's c-d e 123",), ("a b c d e f", "ab a"), ("a", "b c d e f g h i")):
        ids = [own.tokenizer.encode(one, add_special_tokens=False).ids for one in texts]
        for length in (6, 9, 40):
            row = marked_examples(own, [ids], length)
            wanted = theirs(*texts, truncation=True, max_length=length, return_token_type_ids=True)
            assert row["tokens"][0, : row["length"][0]].tolist() == wanted["input_ids"], (texts, length)
            if "token_type_ids" in theirs.model_input_names:
                assert row["segment_start"][0] == row["length"][0] - sum(wanted["token_type_ids"])


def test_a_run_whose_export_would_be_read_otherwise_does_not_begin(place: Path, tmp_path: Path):
    rows = [{"ask": f"{one} ab", "say": f"ab {one}"} for one in LETTERS[:26]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Table(paths=str(tmp_path / "rows.jsonl"), labels=None, prompt_field="ask", completion_field="say")
    receiver = config.build(composed(place))[0].receiver
    for family, is_refused in (("qwen2", True), ("qwen3", False)):
        shape = model_of(Case.read(f"{family}_lm_a").config, "config.json")
        store = prepared(tmp_path, folder(tmp_path / "model", "llama", None), source, 400, 60)
        with pytest.raises(ConfigError, match="^model.family=qwen2: transformers reads") if is_refused else nullcontext():
            planned_start(RandomStart(), replace(receiver, model=shape), store)  # type: ignore[arg-type]
