"""Reads from a tokenizer's files its marks by name, and the tokens that they add to its definition, as transformers 5.23 does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

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
        _require_types(settings, of_map, late)
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
        by_id = _listed(settings["added_tokens_decoder"]) if has_list else _earlier(late, defined, special)
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


def _require_types(settings: Mapping[str, Any], of_map: Mapping[str, Any], late: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a list of tokens or of inputs that is something else."""
    for key in (_MORE, _FORMER, "model_input_names"):
        for one in (settings, of_map):
            is_tokens = key != "model_input_names" and isinstance(one.get(key), dict | None)
            require(is_tokens or isinstance(one.get(key, []), list), _WHERE, f"has {key}, which is not a list", "Copy the file again")
    are_ids = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in late.values())
    require(are_ids, "added_tokens.json", "has a token without an id", "Copy the file again")


def _listed(tokens: Any) -> dict[int, AddedToken]:
    try:
        return {int(number): _added(token) for number, token in tokens.items()}
    except (AttributeError, ValueError):
        raise ConfigError(_WHERE, "has added_tokens_decoder, which is not a list of tokens by their ids", "Copy the file again") from None


def _earlier(late: Mapping[str, Any], defined: Sequence[Mapping[str, Any]], marks: Sequence[Any]) -> dict[int, AddedToken]:
    """Returns the added tokens where the settings list none: those of `added_tokens.json`, then those of the definition."""
    special = {one.get("content") if isinstance(one, dict) else one for one in marks}
    by_id = {number: AddedToken(text, normalized=text not in special, special=text in special) for text, number in late.items()}
    return by_id | {token["id"]: _added({key: one for key, one in token.items() if key != "id"}) for token in defined}


def _mark(key: str, value: Any) -> Mark:
    return value if isinstance(value, str) else _added({**value, "special": True} if isinstance(value, dict) else value, key)


def _added(token: Any, key: str = "added_tokens_decoder") -> AddedToken:
    is_token = isinstance(token, dict) and isinstance(token.get("content"), str) and set(token) <= {"content", "__type", *_OPTIONS}
    is_token = is_token and all(isinstance(token.get(name, False), bool) for name in _OPTIONS)
    require(is_token, _WHERE, f"has under {key} {str(token)[:60]}, which is not a token", "Copy the file again")
    return AddedToken(**{name: one for name, one in token.items() if name != "__type"})


def _text(mark: Mark) -> str:
    return mark if isinstance(mark, str) else mark.content
