"""Converts text to token ids: WordPiece over a list of tokens, which it fits or reads, or a checkpoint's own tokenizer with its marks."""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordPieceTrainer

from dpx.data.tokenizer_class import AS_DEFINED, TokenSettings, built, class_of, has_segments
from dpx.declaration import ConfigError, require, several
from dpx.files.run_folder import read_json

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


def read_tokens(path: Path, size: int) -> list[str]:
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


DEFINITION, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# The folder of a store, or of a checkpoint's copy, that holds a tokenizer's files as they came.
AS_IT_CAME = "tokenizer"
# The setting of a store that names the class of `dpx.data.tokenizer_class` by which its tokenizer was built.
BUILT_AS = "tokenizer_class"
# How a conversation becomes one text, in the language of Jinja.
CHAT_TEMPLATE = "chat_template.jinja"
_TOKENS_FILE = "vocab.txt"
_LATE = "added_tokens.json"
_MORE_TEMPLATES = "additional_chat_templates"
# What is read beside a definition, and what else is kept for an export: transformers reads most of it if a definition is missing.
_READ = (SETTINGS, "special_tokens_map.json", CHAT_TEMPLATE)
_KEPT = (_LATE, "chat_template.json", _TOKENS_FILE, "vocab.json", "merges.txt", "tokenizer.model")
# The names of the marks if a checkpoint does not give them; GPT-2 has one mark for all.
_END_OF_TEXT = "<|endoftext|>"
_ROLES = {
    "pad_id": ("pad_token", ("[PAD]", "<pad>", _END_OF_TEXT)),
    "unk_id": ("unk_token", ("[UNK]", "<unk>", _END_OF_TEXT)),
    "cls_id": ("cls_token", ("[CLS]", "<s>", _END_OF_TEXT)),
    "sep_id": ("sep_token", ("[SEP]", "</s>", _END_OF_TEXT)),
    "mask_id": ("mask_token", ("[MASK]", "<mask>", _END_OF_TEXT)),
}

# Decoders name the marks of a text's two ends otherwise.
_OF_DECODERS = {"cls_id": "bos_token", "sep_id": "eos_token"}


@dataclass(frozen=True)
class Around:
    """Holds the ids `before` the first text, `between` two texts, and `after` the last one.

    The second segment begins with the last `in_second` ids of `between`; with `None`, all ids are of the first segment.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    in_second: int | None = None

    @property
    def count(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def row(self, first: Sequence[int], second: Sequence[int] = ()) -> tuple[list[int], int]:
        """Returns the ids of a row, and the position of its second segment, its length if it has none."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        start = len(self.before) + len(first) + len(self.between)
        return ids, len(ids) if self.in_second is None else start - self.in_second


def marks_around(tokenizer: Tokenizer, vocabulary: Sequence[str], *, is_pair: bool = False, has_segments: bool = False) -> Around:
    """Returns what is around a text, or around two, by the tokenizer's definition, as in transformers, whatever its settings say of
    `add_bos_token`.

    It is what is around a text that the tokenizer has tokens for, or around this text twice; nothing if the tokenizer adds nothing.
    `has_segments` says whether a model is told which of two texts an id belongs to. Raises `ConfigError` for another order, or for segments
    that are not one part after the other.
    """
    ids, text = next(((ids, one) for one in ("a", *vocabulary) if (ids := tokenizer.encode(one, add_special_tokens=False).ids)), ([], ""))
    whole = tokenizer.encode(text, text if is_pair else None, add_special_tokens=True)
    first, second = ([place for place, number in enumerate(whole.sequence_ids) if number == one] for one in (0, 1))
    if not ids or not first:
        return Around()
    end = first[0] + len(ids)
    begin, last = (second[0], second[0] + len(ids)) if second else (end, end)
    before, between, after = whole.ids[: first[0]], whole.ids[end:begin], whole.ids[last:]
    start = whole.type_ids.index(1) if has_segments and 1 in whole.type_ids else None
    found = Around(tuple(before), tuple(between), tuple(after), None if start is None else begin - start)
    is_plain = found.row(ids, ids if second else ())[0] == whole.ids
    is_plain &= start is None or (end <= start <= begin and set(whole.type_ids[start:]) == {1})
    reason = "puts marks around texts in an order, or gives them segments, that dpx does not follow"
    require(is_plain, "tokenizer.json: post_processor", reason, "Put marks before, between and after the texts, which stay in their order")
    return found


@dataclass(frozen=True)
class TextTokenizer:
    """Converts texts to token ids.

    `vocabulary` holds its tokens by id. It also has the ids of the marks, and, for a checkpoint's own tokenizer, its `definition`, the
    text of a `tokenizer.json`, its `chat_templates` by name, of which the usual one is `default`, the texts of its `marks`, such as
    `bos_token`, which a template may name, the class of transformers that it is `built_as`, whether it says which of two texts an id
    belongs to (`has_segments`), and whether a text that is too long loses its beginning (`cuts_left`).
    """

    tokenizer: Tokenizer
    vocabulary: list[str]
    special: SpecialIds
    definition: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)
    built_as: str = AS_DEFINED
    has_segments: bool = True
    cuts_left: bool = False

    @cached_property
    def around_one(self) -> Around:
        """The ids around a text."""
        return marks_around(self.tokenizer, self.vocabulary)

    @cached_property
    def around_two(self) -> Around:
        """The ids around two texts that are read together."""
        return marks_around(self.tokenizer, self.vocabulary, is_pair=True, has_segments=self.has_segments)

    @property
    def begins(self) -> tuple[int, ...]:
        """The ids before a text."""
        return self.around_one.before

    @property
    def checksum(self) -> str:
        """The checksum by which a store's manifest names the vocabulary."""
        return hashlib.sha256(as_lines(self.vocabulary).encode()).hexdigest()


def of_vocabulary(vocabulary: list[str]) -> TextTokenizer:
    """Returns the lower-casing BERT tokenizer of a vocabulary."""
    special, tokenizer = special_ids(vocabulary), tokenizer_of(vocabulary)
    single, marks = f"{CLASS}:0 $A:0 {SEPARATOR}:0", [(CLASS, special.cls_id), (SEPARATOR, special.sep_id)]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=f"{single} $B:1 {SEPARATOR}:1", special_tokens=marks)  # type: ignore[assignment]
    return TextTokenizer(tokenizer, vocabulary, special)


def of_path(path: Path, size: int, built_as: str | None = None) -> TextTokenizer:
    """Reads a tokenizer from a file of tokens, one on each line, or from a checkpoint's folder or `tokenizer.json`.

    `built_as` names its class where the model's config is not beside it. Raises `ConfigError` for a tokenizer that cannot be used.
    """
    files = _of_checkpoint(path)
    if files is None:
        return of_vocabulary(read_tokens(path, size))
    loaded = _loaded(*files, built_as=built_as)
    # No size is right for both a tokenizer with more tokens than the weights beside it have rows, and these weights.
    config = files[0].with_name("config.json")
    rows = _read(config).get("vocab_size")
    is_whole = isinstance(rows, int) and not isinstance(rows, bool)
    count, more = len(loaded.vocabulary), several(loaded.vocabulary[int(str(rows)) :], 3) if is_whole else ""
    # A larger size is that of a model with new rows; weights that lack them are refused by their shapes.
    more = more if count > size else ""
    reason = f"has {count} tokens, but the table of the weights beside it has {rows} rows (vocab_size in {config.name}): {more}"
    fix = f"Name marks that it has in {SETTINGS}, or add rows with model.new_tokens=mean"
    require(not more, files[0], reason, fix)
    fix = f"Set data.vocabulary.size={count}"
    require(count <= size, path, f"has {count} tokens, but data.vocabulary.size={size}", fix)
    return loaded


def fingerprint(path: Path) -> str | None:
    """Returns the SHA-256 of every file that the tokenizer at `path` is read from; `None` if no such file exists."""
    files = _of_checkpoint(path)
    if files is None:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    named = (f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n" for name, file in files_of(path).items())
    return hashlib.sha256("".join(named).encode()).hexdigest()


def files_of(path: Path) -> dict[str, Path]:
    """Returns the files of the checkpoint's tokenizer at `path`, by the names that they have in a checkpoint's folder; empty for a file of
    tokens."""
    found = _of_checkpoint(path)
    if found is None:
        return {}
    first, folder = found[0], found[0].parent
    files = {DEFINITION if first.suffix == ".json" else first.name: first}
    files |= {name: folder / name for name in (*_READ, *_KEPT) if name not in files and (folder / name).is_file()}
    return files | {f"{_MORE_TEMPLATES}/{file.name}": file for file in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}


def token_count(path: Path) -> int:
    """Returns how many tokens a file of tokens or a checkpoint's tokenizer has, whatever the weights beside it."""
    files = _of_checkpoint(path)
    return len(read_tokens(path, 1 << 31) if files is None else _loaded(*files).vocabulary)


def vocabulary_checksum(folder: Path) -> str:
    """Returns the checksum by which a store's manifest names its vocabulary. Raises `ConfigError` for a folder without a tokenizer."""
    files = _of_checkpoint(folder)
    assert files is not None
    return _loaded(*files).checksum


def class_at(path: Path) -> str | None:
    """Returns the class that transformers builds the checkpoint's tokenizer at `path` by; `None` for a file of tokens."""
    files = _of_checkpoint(path)
    return None if files is None else _class(files[0], _read(files[1]))


def require_read_elsewhere(own: TextTokenizer, family: str) -> None:
    """Raises `ConfigError` for a tokenizer that `AutoTokenizer` of transformers reads by another class beside a model of this `family`."""
    taken = class_of({"tokenizer_class": own.built_as}, {"model_type": family}, own.definition or "")
    reason = f"transformers reads every tokenizer of this family by {taken}, and that of this run's rows is of {own.built_as}"
    fix = f"Name the folder of a {family} checkpoint with data.vocabulary.path, or use a model of another family"
    require(taken == own.built_as, f"model.family={family}", reason, fix)


def as_lines(vocabulary: list[str]) -> str:
    """Returns a vocabulary as the text of a file: one token a line, by id."""
    return "\n".join(vocabulary) + "\n"


def _of_checkpoint(path: Path) -> tuple[Path, ...] | None:
    """Returns the definition (or tokens) of a checkpoint's tokenizer, its settings and its chat template; `None` for a file of tokens or
    nothing."""
    candidates = [path / DEFINITION, path / _TOKENS_FILE] if path.is_dir() else [path] if path.suffix == ".json" else []
    for file in candidates:
        if file.is_file():
            return file, *(file.with_name(name) for name in _READ)
    require(not path.is_dir(), path, f"contains neither {DEFINITION} nor {_TOKENS_FILE}", "Name a checkpoint's folder, or a file of tokens")
    return None


def _loaded(file: Path, *beside: Path, built_as: str | None = None) -> TextTokenizer:
    settings, of_map, template = (*map(_read, beside[:2]), beside[2])
    added: list[dict[str, Any]] = []
    if file.name == _TOKENS_FILE:
        definition = tokenizer_of(read_tokens(file, 1 << 31))
        definition.add_special_tokens(list(SPECIAL_TOKENS))
    else:
        try:
            definition = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(file, f"is not a tokenizer ({str(error).splitlines()[0][:100]})", "Copy the file again") from None
        added = _read(file)["added_tokens"]
    tokens = TokenSettings.read(settings, of_map, _read(file.with_name(_LATE)), added)
    facts, cut = tokens.options, definition.truncation or {}
    name = built_as or _class(file, facts)
    tokenizer, marks = built(name, definition, tokens)
    try:
        tokenizer.encode("\u07f7 \u3400 \U0001f701")
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare exceptions, and its panics are none
        reason = f"fails on characters that it does not know ({str(error).splitlines()[0][:100]})"
        raise ConfigError(file, reason, "Give it the token that stands for unknown text") from None
    by_id = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    vocabulary = [by_id.get(number, "") for number in range(max(by_id) + 1)]
    reason = "has fix_mistral_regex, by which transformers cuts words otherwise than its definition, which dpx does not follow"
    require(len(vocabulary) <= 100_000 or facts.get("fix_mistral_regex") is not True, SETTINGS, reason, "Remove it")
    side, segments = facts.get("truncation_side", cut.get("direction", "right")), has_segments(name, facts)
    require(side in ("left", "right"), SETTINGS, f"has truncation_side={side}, which is neither left nor right", "Correct it")
    by_role: dict[str, int] = {}
    for role, (key, usual) in _ROLES.items():
        # What the checkpoint names comes before usual names: a chat model may begin and end texts otherwise than its family's base model.
        named = (marks.get(key), marks.get(_OF_DECODERS.get(role, "")), *usual)
        ids = [number for token in named if token is not None and (number := tokenizer.token_to_id(token)) is not None]
        by_role |= {role: ids[0]} if ids else {}
    # A decoder's tokenizer need not mark where a text begins, a word that it does not know, or a masked one.
    needed = ("pad_id", "sep_id") if isinstance(tokenizer.model, BPE) else tuple(_ROLES)
    missing = [_ROLES[role][0].replace("_", " ") for role in needed if role not in by_role]
    require(not missing, file, f"has no {', no '.join(missing)}", "Name it in tokenizer_config.json")
    special, by_name = SpecialIds(**(dict.fromkeys(_ROLES, by_role["sep_id"]) | by_role)), _templates(template, facts)
    return TextTokenizer(tokenizer, vocabulary, special, tokenizer.to_str(), by_name, marks, name, segments, side == "left")


def _class(file: Path, facts: Mapping[str, Any]) -> str:
    # From before there were definitions, only BERT's tokenizers are read.
    is_list = file.name == _TOKENS_FILE
    return "BertTokenizer" if is_list else class_of(facts, _read(file.with_name("config.json")), file.read_text(encoding="utf-8"))


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, "Copy the file again") if file.is_file() else {}


def _templates(file: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name: of files, which come first as in transformers, or of the settings."""
    more = sorted((file.parent / _MORE_TEMPLATES).glob("*.jinja"))
    files = {"default": file} if file.is_file() else {}
    files |= {one.stem: one for one in more}
    if files:
        return {name: one.read_text(encoding="utf-8") for name, one in files.items()}
    declared = facts.get("chat_template")
    if isinstance(declared, str):
        return {"default": declared}
    if isinstance(declared, dict):
        return {name: text for name, text in declared.items() if isinstance(text, str)}
    listed = [one for one in declared if isinstance(one, dict)] if isinstance(declared, list) else []
    return {str(one.get("name")): str(one["template"]) for one in listed if isinstance(one.get("template"), str)}
