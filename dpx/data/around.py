"""Reads which ids a tokenizer puts around a text, and around two texts that are read together.

They come from the tokenizer's definition, as in transformers, whatever its settings say of `add_bos_token`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from dpx.declaration import require


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


def around_one(tokenizer: Tokenizer, vocabulary: Sequence[str]) -> Around:
    """Returns what is around one text."""
    return _read(tokenizer, vocabulary, False, False)


def around_two(tokenizer: Tokenizer, vocabulary: Sequence[str], has_segments: bool) -> Around:
    """Returns what is around two texts; `has_segments` says whether a model is told which of them an id belongs to."""
    return _read(tokenizer, vocabulary, True, has_segments)


def _read(tokenizer: Tokenizer, vocabulary: Sequence[str], is_pair: bool, has_segments: bool) -> Around:
    """Returns what is around a text that the tokenizer has tokens for, or around this text twice; nothing if the tokenizer adds nothing.

    Raises `ConfigError` for another order, or for segments that are not one part after the other.
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
