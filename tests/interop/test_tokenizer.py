"""A checkpoint's own tokenizer cuts and marks text as the `tokenizers` library does by the same files."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.processors import RobertaProcessing

from dpx.data import tokenizer as text_tokenizer
from dpx.data.rows import marked_examples, separators
from dpx.data.tokenizer import SPECIAL_TOKENS
from dpx.declaration import ConfigError

TEXTS = ["The quick brown fox.", "Jumps over, über the lazy dog!", "the fox"]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "u", "##ber", ".", ",", "!", "The", "Jumps"]


@pytest.fixture
def wordpieces(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return tmp_path


@pytest.fixture
def byte_pairs(tmp_path: Path) -> Path:
    """In RoBERTa's form: <s> A </s></s> B </s>."""
    trained = ByteLevelBPETokenizer()
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(iter(TEXTS * 3), vocab_size=300, special_tokens=marks, show_progress=False)
    inner: Tokenizer = trained._tokenizer
    inner.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)  # type: ignore[assignment]
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def cut(folder: Path, texts: list[tuple[str, str]], length: int = 48):
    own = text_tokenizer.of_path(folder, 1000)
    ids = [[own.tokenizer.encode(one, add_special_tokens=False).ids for one in text if one] for text in texts]
    return own, marked_examples(own, ids, length)


def test_byte_pairs_are_marked_as_the_file_says(byte_pairs: Path):
    whole = Tokenizer.from_file(str(byte_pairs / "tokenizer.json"))
    own, rows = cut(byte_pairs, [(TEXTS[0], ""), (TEXTS[0], TEXTS[1])])
    assert separators(own) == 2 and (own.special.pad_id, own.special.cls_id, own.special.sep_id) == (1, 0, 2)
    for number, encoded in enumerate((whole.encode(TEXTS[0]), whole.encode(TEXTS[0], TEXTS[1]))):
        assert rows["tokens"][number, : rows["length"][number]].tolist() == encoded.ids
        assert (rows["tokens"][number, rows["length"][number] :] == 1).all()
    assert rows["segment_start"].tolist() == rows["length"].tolist()


def test_what_is_too_long_is_cut_with_every_mark_in_place(byte_pairs: Path):
    own, rows = cut(byte_pairs, [(TEXTS[0], TEXTS[1])], length=12)
    assert rows["length"][0] == 12 and np.count_nonzero(rows["tokens"][0] == own.special.sep_id) == 3


@pytest.mark.parametrize("is_lower", [True, False])
def test_pieces_of_a_checkpoint_follow_its_own_case(wordpieces: Path, is_lower: bool):
    (wordpieces / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": is_lower}))
    own, _ = cut(wordpieces, [(TEXTS[0], "")])
    assert own.tokenizer.encode(TEXTS[0], add_special_tokens=False).tokens[0] == ("the" if is_lower else "The")
    assert own.vocabulary[:5] == list(SPECIAL_TOKENS) and own.definition is not None
    (wordpieces / "tokenizer.json").write_text(own.definition)
    again = text_tokenizer.of_path(wordpieces, 1000)
    assert again.vocabulary == own.vocabulary and again.tokenizer.encode(TEXTS[1]).ids == own.tokenizer.encode(TEXTS[1]).ids


@pytest.mark.parametrize(("said", "pieces"), [({}, ["中", "国"]), ({"tokenize_chinese_chars": False}, ["中国"])])
def test_chinese_characters_are_parted_unless_the_checkpoint_keeps_them(tmp_path: Path, said: dict[str, bool], pieces: list[str]):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "中", "国", "中国"]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    assert text_tokenizer.of_path(tmp_path, 1000).tokenizer.encode("中国", add_special_tokens=False).tokens == pieces


def test_the_marks_of_gpt2_are_one(tmp_path: Path):
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(iter(TEXTS), vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False)
    trained._tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = text_tokenizer.of_path(tmp_path, 1000)
    assert set(vars(own.special).values()) == {0} and separators(own) == 1


def test_the_marks_that_a_chat_model_names_come_before_usual_ones(tmp_path: Path):
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(iter(TEXTS), vocab_size=280, special_tokens=marks, show_progress=False)
    trained._tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    special = text_tokenizer.of_path(tmp_path, 1000).special
    assert (special.cls_id, special.sep_id, special.pad_id, special.unk_id) == (1, 2, 2, 0)


def test_tokens_without_a_row_of_the_weights_beside_them_are_refused_unless_rows_are_declared_for_all(byte_pairs: Path):
    """A larger size than the table of a run's model is refused by `Experiment`."""
    tokens = len(text_tokenizer.of_path(byte_pairs, 1000).vocabulary)
    (byte_pairs / "config.json").write_text(json.dumps({"vocab_size": tokens - 9}))
    for size in (tokens - 9, tokens - 1):
        with pytest.raises(ConfigError, match=rf"has {tokens} tokens, but the table .* has {tokens - 9} rows .* model.new_tokens=mean"):
            text_tokenizer.of_path(byte_pairs, size)
    assert len(text_tokenizer.of_path(byte_pairs, tokens).vocabulary) == tokens
    (byte_pairs / "config.json").write_text(json.dumps({"vocab_size": tokens}))
    assert len(text_tokenizer.of_path(byte_pairs, tokens).vocabulary) == tokens


def test_what_holds_no_tokenizer_is_said(tmp_path: Path, wordpieces: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="contains neither tokenizer.json nor vocab.txt"):
        text_tokenizer.of_path(tmp_path / "empty", 1000)
    with pytest.raises(ConfigError, match="has 20 tokens, but data.vocabulary.size=10. Set data.vocabulary.size=20"):
        text_tokenizer.of_path(wordpieces, 10)
    (wordpieces / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match="tokenizer.json: is not a tokenizer"):
        text_tokenizer.of_path(wordpieces, 1000)
