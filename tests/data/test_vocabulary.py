from pathlib import Path

import pytest

from dpx.data.declared_data import Vocabulary
from dpx.data.tokenizer import SPECIAL_TOKENS, fit, read_tokens, special_ids, token_count, tokenizer_of
from dpx.declaration import ConfigError

from .corpora import SHARED_DATA, text


def test_fitting_gives_the_same_pieces_every_time():
    """The trainer alone does not: its ties fall by a randomly seeded table."""
    texts = [text(seed, 40) for seed in range(30)]
    fitted = [fit(iter(texts), 200) for _ in range(5)]
    assert all(pieces == fitted[0] for pieces in fitted)
    assert fitted[0][:5] == list(SPECIAL_TOKENS) and len(set(fitted[0])) == len(fitted[0]) <= 200


def test_pieces_of_a_word_join_to_it_in_lower_case():
    pieces = fit([text(seed, 40) for seed in range(30)], 300)
    encoded = tokenizer_of(pieces).encode("Silver GARDEN winters", add_special_tokens=False)
    assert "".join(encoded.tokens).replace("##", "") == "silvergardenwinters"
    assert [pieces[number] for number in encoded.ids] == encoded.tokens


def test_no_text_is_refused():
    with pytest.raises(ConfigError, match="has no text"):
        fit([], 100)


def test_ids_are_the_lines_of_the_file(tmp_path: Path):
    path = tmp_path / "vocabulary.txt"
    path.write_text("word\n[SEP]\n[PAD]\n[UNK]\n[MASK]\n[CLS]\n##s\n")
    pieces = read_tokens(path, 64)
    special = special_ids(pieces)
    assert (special.pad_id, special.unk_id, special.cls_id, special.sep_id, special.mask_id) == (2, 3, 5, 1, 4)
    assert tokenizer_of(pieces).encode("words", add_special_tokens=False).ids == [0, 6]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n", r"does not contain \[MASK\]"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n", "more than once"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n" + b"\n".join(b"w%d" % number for number in range(80)), "has 85 tokens"),
        (b"[PAD]\n\xff\n", "not UTF-8"),
        (None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None, reason: str):
    path = tmp_path / "vocabulary.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_tokens(path, 64)


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the shared data is not beside this checkout")
def test_the_published_vocabulary():
    pieces = read_tokens(SHARED_DATA / "vocab" / "bert-base-uncased.txt", 30522)
    assert len(pieces) == 30522
    assert tokenizer_of(pieces).encode("The embeddings", add_special_tokens=False).tokens == ["the", "em", "##bed", "##ding", "##s"]


def test_the_floor_on_sizes_is_for_a_vocabulary_that_is_fitted() -> None:
    assert Vocabulary(size=25, path="checkpoint").size == 25
    with pytest.raises(ConfigError, match="data.vocabulary.size=25: the vocabulary is too small"):
        Vocabulary(size=25)
    with pytest.raises(ConfigError, match="data.vocabulary.size=0"):
        Vocabulary(size=0, path="checkpoint")


def test_the_tokens_of_a_plain_file_are_counted(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "b"]) + "\n")
    assert token_count(tmp_path / "vocab.txt") == len(SPECIAL_TOKENS) + 2
