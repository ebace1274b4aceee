"""Builds a checkpoint's tokenizer as transformers does: the class that its files name may replace parts of its definition.

A class keeps the tokens, the merges and (but for BERT and RoBERTa) the marks around a text of `tokenizer.json`. How a text is normalised
and cut before that, and how tokens become text again, is of the class. Marks by name, and tokens added to the definition, are in the files
beside it. All of it is as in transformers 5.23.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from dpx.declaration import ConfigError, require

Mark = str | AddedToken
# The marks that every tokenizer may have, in the order in which missing marks are added.
USUAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The key of special tokens that have no role, and its former name.
_MORE, _FORMER = "extra_special_tokens", "additional_special_tokens"
_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_WHERE = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenSettings:
    """Holds the settings as they came (`options`), the `marks` by name (`None` where the files name none on purpose), the special tokens
    without a name (`more`), and the tokens to add in the order of their ids (`added`)."""

    options: Mapping[str, Any]
    marks: Mapping[str, Mark | None]
    more: tuple[Mark, ...]
    added: tuple[AddedToken, ...]

    @staticmethod
    def read(
        settings: Mapping[str, Any], of_map: Mapping[str, Any], late: Mapping[str, Any], defined: Sequence[Mapping[str, Any]]
    ) -> "TokenSettings":
        """Reads `tokenizer_config.json` (`settings`), and where it does not list all added tokens also `special_tokens_map.json`,
        `added_tokens.json` (`late`), and the added tokens of `tokenizer.json` (`defined`).

        Raises `ConfigError` for a mark or a token that has no meaning.
        """
        has_list = "added_tokens_decoder" in settings
        for key in (_MORE, _FORMER, "model_input_names"):
            for one in (settings, of_map):
                is_tokens = key != "model_input_names" and isinstance(one.get(key), dict | None)
                require(is_tokens or isinstance(one.get(key, []), list), _WHERE, f"has {key}, which is not a list", "Copy the file again")
        are_ids = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in late.values())
        require(are_ids, "added_tokens.json", "has a token without an id", "Copy the file again")

        options, of_names = dict(settings), {}
        if _FORMER in options and not options.get(_MORE):
            options[_MORE] = options.pop(_FORMER)
        for given in ({}, {} if has_list else dict(of_map)):
            if isinstance(given.get(_MORE), list):
                given[_MORE] = [*(options.get(_MORE) or []), *given[_MORE]]
            options |= given
            of_names |= options.pop(_MORE) if isinstance(options.get(_MORE), dict) else {}
        # A token of `added_tokens.json` is special if it is a mark by its text, or by the map of special tokens.
        special = [one for key in USUAL if isinstance(one := options.get(key), str) or (isinstance(one, dict) and key in of_map)]
        special += options.get(_MORE) or []
        if _FORMER in options and _MORE not in options:
            options[_MORE] = options.pop(_FORMER)
        named = {key: one for key, one in options.items() if key.endswith("_token") and (key in USUAL or isinstance(one, str | dict))}
        named |= of_names
        named = {key: one for key, one in named.items() if key in USUAL} | {key: one for key, one in named.items() if key not in USUAL}
        marks = {key: None if one is None else _mark(key, one) for key, one in named.items()}
        more = options.get(_MORE) or []
        unnamed = tuple(_mark(_MORE, one) for one in more)
        if has_list:
            by_id = _listed(settings["added_tokens_decoder"])
        else:
            are_special = {one.get("content") if isinstance(one, dict) else one for one in special}
            of_late = {text: text in are_special for text in late}
            by_id = {late[text]: AddedToken(text, normalized=not is_special, special=is_special) for text, is_special in of_late.items()}
            by_id |= {token["id"]: _added({key: one for key, one in token.items() if key != "id"}) for token in defined}
        by_text = {one.content: one for one in by_id.values()}
        marks = {key: by_text.get(_text(one), one) if key in USUAL and one is not None else one for key, one in marks.items()}
        return TokenSettings(options, marks, unnamed, tuple(by_id[number] for number in sorted(by_id)))

    def complete(self, tokenizer: Tokenizer, usual: Mapping[str, str], adds_again: bool) -> dict[str, str]:
        """Adds to a tokenizer the tokens that it lacks, and returns the texts of all marks by name.

        `usual` are the marks of its class where the files name none. With `adds_again`, the class adds all of them once more without what
        they say of white space.
        """
        marks = {key: one for key in USUAL if (one := self.marks.get(key, usual.get(key))) is not None}
        marks |= {key: one for key, one in self.marks.items() if one is not None}
        known = tokenizer.get_added_tokens_decoder()
        have = {repr(one) for one in known.values()}
        to_add: list[Mark] = [one for one in self.added if repr(one) not in have]
        named = {known[number].content for number in known} | {_text(one) for one in to_add}
        to_add += [one for one in marks.values() if _text(one) not in named and one not in to_add]
        to_add += [one for one in self.more if _text(one) not in named and one not in to_add]
        texts = {key: _text(one) for key, one in marks.items()}
        for place, one in enumerate(to_add):
            token = AddedToken(one, special=True) if isinstance(one, str) else one
            token.special = token.special or token.content in texts.values()
            to_add[place] = token
        if to_add:
            tokenizer.add_tokens(to_add)
        if adds_again:
            every = dict.fromkeys((*texts.values(), *map(_text, self.more)))
            tokenizer.add_tokens([AddedToken(one, special=True) for one in every])
        tokenizer.encode_special_tokens = self.options.get("split_special_tokens") is True  # type: ignore[assignment]
        return texts


def _listed(tokens: Any) -> dict[int, AddedToken]:
    try:
        return {int(number): _added(token) for number, token in tokens.items()}
    except (AttributeError, ValueError):
        raise ConfigError(_WHERE, "has added_tokens_decoder, which is not a list of tokens by their ids", "Copy the file again") from None


def _mark(key: str, value: Any) -> Mark:
    return value if isinstance(value, str) else _added({**value, "special": True} if isinstance(value, dict) else value, key)


def _added(token: Any, key: str = "added_tokens_decoder") -> AddedToken:
    is_token = isinstance(token, dict) and isinstance(token.get("content"), str) and set(token) <= {"content", "__type", *_OPTIONS}
    is_token = is_token and all(isinstance(token.get(name, False), bool) for name in _OPTIONS)
    require(is_token, _WHERE, f"has under {key} {str(token)[:60]}, which is not a token", "Copy the file again")
    return AddedToken(**{name: one for name, one in token.items() if name != "__type"})


def _text(mark: Mark) -> str:
    return mark if isinstance(mark, str) else mark.content


# The class that takes the definition as it is, and the names that transformers also has for it.
AS_DEFINED = "PreTrainedTokenizerFast"
_ALSO_AS_DEFINED = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "BloomTokenizer")
# The class of a family where the files name none; Llama and VaultGemma have none.
_OF_FAMILY = {"bert": "BertTokenizer", "distilbert": "BertTokenizer", "roberta": "RobertaTokenizer", "gpt2": "GPT2Tokenizer"}
_OF_FAMILY |= {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer"}
_OF_FAMILY |= {"mistral": AS_DEFINED, "olmo2": AS_DEFINED}
# Families for which transformers takes its own class, whatever the files name.
_FORCED = ("qwen2", "mistral", "olmo2")
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_END = "<|endoftext|>"
_OF_BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
_OF_ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>"}
_OF_ROBERTA |= {"pad_token": "<pad>", "mask_token": "<mask>"}
_OF_GEMMA = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"}
# The marks that a class has where the files name none.
_MARKS: dict[str, dict[str, str]] = {
    "BertTokenizer": _OF_BERT,
    "RobertaTokenizer": _OF_ROBERTA,
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "GemmaTokenizer": _OF_GEMMA,
}
_SAME = {"DistilBertTokenizer": "BertTokenizer", "ElectraTokenizer": "BertTokenizer"}


def class_of(facts: Mapping[str, Any], config: Mapping[str, Any], definition: str) -> str:
    """Returns the name of the class that transformers builds the tokenizer by, from its settings and the model's `config.json` beside it.

    Raises `ConfigError` for a class that dpx does not know.
    """
    family, given = str(config.get("model_type", "")), facts.get("tokenizer_class") or config.get("tokenizer_class")
    own = _OF_FAMILY.get(family)
    if not isinstance(given, str):
        return own or AS_DEFINED
    name = given if given == AS_DEFINED else given.removesuffix("Fast")
    name = AS_DEFINED if name in _ALSO_AS_DEFINED else _SAME.get(name, name)
    if own is not None and family in _FORCED:
        return own
    if name == "LlamaTokenizer" and '"ByteLevel"' in definition:
        return AS_DEFINED
    reason = "transformers builds this class in a way that dpx does not follow, so that the tokens of rows could differ"
    fix = f'Set "tokenizer_class": "{AS_DEFINED}" there, with which both read tokenizer.json as it is'
    require(name == AS_DEFINED or name in _MARKS, f"tokenizer_config.json: tokenizer_class={given}", reason, fix)
    return name


def has_segments(name: str, facts: Mapping[str, Any]) -> bool:
    """Returns whether the tokenizer says which of two texts an id belongs to, by the inputs that it names for a model."""
    return "token_type_ids" in facts.get("model_input_names", ["token_type_ids"] if name == "BertTokenizer" else [])


def built(name: str, definition: Tokenizer, tokens: TokenSettings) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer of a definition as the class `name` builds it, and the texts of its marks by name (`bos_token`).

    Raises `ConfigError` for another kind of model than the class has, and for settings that it cannot be built with.
    """
    own, usual, padding = definition, _MARKS.get(name, {}), definition.padding
    if padding is not None and name in (AS_DEFINED, "LlamaTokenizer"):
        usual = usual | {"pad_token": padding["pad_token"]}
    if name != AS_DEFINED:
        model = json.loads(definition.to_str())["model"]
        kind, needed = model.get("type"), "WordPiece" if name == "BertTokenizer" else "BPE"
        reason = f"is a {kind} model, which the class {name} of transformers does not read"
        require(kind == needed, "tokenizer.json", reason, f'Set "tokenizer_class": "{AS_DEFINED}" in tokenizer_config.json')
        unknown = tokens.marks.get("unk_token", usual.get("unk_token"))
        with _building(name):
            own = _as_class(name, model, tokens.options, str(unknown))
        own.post_processor = definition.post_processor  # type: ignore[assignment]
    marks = tokens.complete(own, usual, adds_again=name == "Qwen2Tokenizer")
    if name in ("BertTokenizer", "RobertaTokenizer"):
        # These two have their own marks around a text, whatever the definition says.
        missing = [key for key in ("cls_token", "sep_token", "unk_token") if key not in marks]
        require(not missing, "tokenizer_config.json", f"has no {' and no '.join(missing)}, which {name} needs", "Name it there")
        first, last = marks["cls_token"], marks["sep_token"]
        ids: dict[str, Any] = {mark: own.token_to_id(mark) for mark in (first, last)}
        with _building(name):
            if name == "BertTokenizer":
                single, special = f"{first}:0 $A:0 {last}:0", list(ids.items())
                around: Any = processors.TemplateProcessing(single=single, pair=f"{single} $B:1 {last}:1", special_tokens=special)
            else:
                trims, has_space = tokens.options.get("trim_offsets", True), tokens.options.get("add_prefix_space", False)
                around = processors.RobertaProcessing((last, ids[last]), (first, ids[first]), trims, has_space)
            own.post_processor = around
    own.no_truncation()
    own.no_padding()
    return own, marks


@contextlib.contextmanager
def _building(name: str) -> Iterator[None]:
    """Raises `ConfigError` where the library of tokenizers refuses a setting."""
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = f"has a setting with which {name} cannot be built ({str(error)[:60]})"
        raise ConfigError("tokenizer_config.json", reason, "Correct it, or remove it") from None


def _as_class(name: str, model: Mapping[str, Any], facts: Mapping[str, Any], unknown: str) -> Tokenizer:
    """Returns the tokenizer of a model with the class's own normaliser, cuts and decoder."""
    if name == "BertTokenizer":
        own = Tokenizer(WordPiece(model["vocab"], unk_token=unknown))
        own.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=facts.get("tokenize_chinese_chars", True),
            strip_accents=facts.get("strip_accents"),
            lowercase=facts.get("do_lower_case", True),
        )  # type: ignore[assignment]
        own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
        own.decoder = decoders.WordPiece(prefix="##")  # type: ignore[assignment]
        return own

    whole_words: dict[str, Any] = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
    options: dict[str, dict[str, Any]] = {
        "LlamaTokenizer": {"fuse_unk": True, "byte_fallback": True},
        "Qwen2Tokenizer": whole_words | {"byte_fallback": False},
        "GemmaTokenizer": {"fuse_unk": True, "unk_token": unknown, "byte_fallback": True},
    }
    merges: Any = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"]]
    own, has_space = Tokenizer(BPE(vocab=model["vocab"], merges=merges, **options.get(name, whole_words))), facts.get("add_prefix_space")
    of_pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if name == "LlamaTokenizer":
        has_space = True if has_space is None else has_space
        scheme = "never" if not has_space else "always" if facts.get("legacy") else "first"
        own.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)  # type: ignore[assignment]
        own.decoder = decoders.Sequence([*of_pieces, *([decoders.Strip(content=" ", left=1)] if has_space else [])])  # type: ignore[assignment]
    elif name == "GemmaTokenizer":
        own.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
        own.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)  # type: ignore[assignment]
        own.decoder = decoders.Sequence(of_pieces)  # type: ignore[assignment]
    elif name == "Qwen2Tokenizer":
        own.normalizer = normalizers.NFC()  # type: ignore[assignment]
        cut = pre_tokenizers.Split(Regex(_QWEN), behavior="isolated", invert=False)
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(has_space), use_regex=False)
        own.pre_tokenizer = pre_tokenizers.Sequence([cut, by_bytes])  # type: ignore[assignment]
        own.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    else:
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=facts.get("add_prefix_space", False))  # type: ignore[assignment]
        own.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return own
