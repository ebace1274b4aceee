"""Fits WordPiece vocabularies, with the same tokens every time, or reads them from a file."""

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from dpx.declaration import ConfigError, require

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NORMALISER = BertNormalizer(lowercase=True)
_ALPHABET_SHARE = 16  # one sixteenth of the tokens start with a single character, another continue with one
_ALPHABET_MOST = 1000


@dataclass(frozen=True)
class SpecialIds:
    """Holds the ids of the tokens that are not text."""

    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int

    @classmethod
    def from_ids(cls, ids: Any) -> "SpecialIds":
        """Returns the ids of an object that has all five, such as a store's manifest."""
        return cls(*(getattr(ids, field.name) for field in fields(cls)))


def fit(texts: Iterable[str], size: int) -> list[str]:
    """Returns at most `size` tokens of `texts`, by id: special tokens, alphabet, then merged ones.

    `texts` is read once and kept in a temporary file meanwhile. The trainer numbers the continuing characters in the order of a randomly
    seeded hash table, and breaks ties between merges by those numbers. The whole alphabet is named beforehand, so that the tokens depend on
    the text alone. Raises `ConfigError` if the text is missing.
    """
    counts: Counter[str] = Counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogatepass") as held:
        for text in texts:
            counts.update(_NORMALISER.normalize_str(text))
            held.write(text.replace("\n", " ") + "\n")
        # The most frequent characters, ties by code point.
        letters = [letter for letter in counts if not letter.isspace()]
        most = min(_ALPHABET_MOST, size // _ALPHABET_SHARE)
        alphabet = sorted(sorted(letters, key=lambda letter: (-counts[letter], letter))[:most])
        require(
            bool(alphabet),
            "data.vocabulary",
            "the split from which the vocabulary is fitted has no text",
            "Raise data.public_fraction, or name a file with data.vocabulary.path",
        )
        tokenizer = _tokenizer(WordPiece(unk_token=UNKNOWN))
        trainer = WordPieceTrainer(
            vocab_size=size,
            special_tokens=[*SPECIAL_TOKENS, *alphabet, *(f"##{letter}" for letter in alphabet)],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        held.seek(0)
        tokenizer.train_from_iterator(held, trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def read(path: Path, size: int) -> list[str]:
    """Returns the tokens of a vocabulary file, one a line; a token's id is its line, from 0. Raises `ConfigError` for a file that cannot
    be used."""
    try:
        tokens = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except FileNotFoundError:
        raise ConfigError(path, "no such file", "Check data.vocabulary.path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, f"byte {error.start} is not UTF-8", "Convert the file to UTF-8") from None
    tokens = [token.rstrip("\r") for token in tokens]
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    require(not missing, path, f"does not contain {' '.join(missing)}", "Add the special tokens, one on each line")
    repeated = [token for token, count in Counter(tokens).items() if count > 1]
    require(not repeated, path, f"contains {repeated[:1]} more than once", "Keep one line for each token")
    fix = f"Set data.vocabulary.size={len(tokens)}"
    require(len(tokens) <= size, path, f"has {len(tokens)} tokens, but data.vocabulary.size={size}", fix)
    return tokens


def tokenizer_of(tokens: list[str]) -> Tokenizer:
    """Returns the lower-casing BERT tokenizer over `tokens`; it adds no special tokens."""
    ids = {token: number for number, token in enumerate(tokens)}
    return _tokenizer(WordPiece(vocab=ids, unk_token=UNKNOWN, max_input_chars_per_word=100))


def special_ids(tokens: list[str]) -> SpecialIds:
    return SpecialIds(*map(tokens.index, SPECIAL_TOKENS))


def _tokenizer(model: WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _NORMALISER  # type: ignore[assignment]
    tokenizer.pre_tokenizer = BertPreTokenizer()  # type: ignore[assignment]
    return tokenizer
