"""Makes one row of a conversation: the turns that fit, and which of their tokens are learnt.

A turn is a message of the user with all that follows it up to the user's next message: answers, calls of tools and what tools return. What
is before the first turn, such as the system's message, belongs to every turn. A conversation that is longer than a row loses whole turns
from its front, and the template writes what is left as a conversation of its own; so no row begins within a turn.
"""

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from dpx.data.completions import ChatTemplate, LossOn
from dpx.data.documents import Conversation
from dpx.data.pairs import Tokens
from dpx.data.tokenizer import TextTokenizer
from dpx.declaration import require

# What conversations lose, as fields of `dpx.data.left_out.LeftOut`.
COUNTED = ("conversations_cut", "turns_cut", "turns_too_long", "conversations_without_rows")
_BEFORE_TURNS = ("system", "developer")


@dataclasses.dataclass(frozen=True)
class ConversationRow:
    """Holds the tokens of a row, the position from which all are learnt (their number if none is), and for `loss_on=assistant` whether
    each is learnt, uint8 [n]."""

    tokens: Tokens
    start: int
    is_learnt: np.ndarray | None = None


class ConversationCutter:
    """Makes rows of at most `length` tokens."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate, loss_on: LossOn, length: int):
        self._tokenizer, self._template, self._loss_on, self._length = tokenizer.tokenizer, template, loss_on, length

    def row(self, where: str, chat: Conversation, counts: Counter[str]) -> ConversationRow | None:
        """Returns the row of a conversation, or `None` if none of its turns is left, or these hold no answer.

        Where the last turn alone is longer than a row, the turns before it are the conversation; with `loss_on=last`, which learns the
        last answer, nothing is left. What is lost is added to `counts` (`COUNTED`). Raises `ConfigError` for messages that the template
        refuses, and where the tokens of an answer are not known.
        """
        roles = [message["role"] for message in chat.messages]
        # How many messages are before the first turn, and where each turn begins.
        lead = next((place for place, role in enumerate(roles) if role not in _BEFORE_TURNS), len(roles))
        starts = [place for place in range(lead, len(roles)) if place == lead or (roles[place] == "user" and roles[place - 1] != "user")]
        end, first = len(chat.messages), None
        while starts and (first := self._first_kept(where, chat, lead, starts, end)) is None:
            counts["turns_too_long"] += 1
            end = starts.pop()
            starts = [] if self._loss_on == "last" else starts
        row = None if first is None else self._marked(where, _part(chat, lead, starts[first], end))
        counts["turns_cut"] += first or 0
        counts["conversations_cut"] += row is not None and (bool(first) or end < len(chat.messages))
        counts["conversations_without_rows"] += row is None
        return row

    def _first_kept(self, where: str, chat: Conversation, lead: int, starts: Sequence[int], end: int) -> int | None:
        """Returns the number of the first turn from which on all turns before `end` fit a row; `None` if the last one does not."""

        def fits(number: int) -> bool:
            part = _part(chat, lead, starts[number], end)
            return len(self._ids(self._template.prompt(where, part, begins_answer=False))) <= self._length

        first = 0 if fits(0) else 1 + bisect_left(range(1, len(starts)), True, key=fits)
        return first if first < len(starts) else None

    def _marked(self, where: str, chat: Conversation) -> ConversationRow | None:
        """Returns the row of a conversation that fits, `None` without a token to learn."""
        if self._loss_on == "all":
            ids = self._ids(self._template.prompt(where, chat, begins_answer=False))
            return ConversationRow(ids, len(ids))
        if self._loss_on == "last":
            prompt, answer = self._template.texts(where, chat)
            ids, before = self._ids(prompt + answer), self._ids(prompt)
            _require_apart(where, ids, before)
            require(len(ids) > len(before), where, "has an empty completion: the tokenizer reads no token in it", "Remove the row")
            return ConversationRow(ids, len(before))
        text, spans = self._template.answers(where, chat)
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        is_learnt = np.zeros(len(whole.ids), np.uint8)
        for start, end in spans:
            before = self._ids(text[:start])
            _require_apart(where, whole.ids, before)
            until = self._ids(text[:end])
            # A token that holds the end of an answer and what follows it is learnt, as in transformers.
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole.ids, until, strict=False)))
            joined = 0 if shared == len(until) else sum(first < end for first, _ in whole.offsets[shared:])
            is_learnt[len(before) : shared + joined] = 1
        # No token comes before the first, so nothing predicts it.
        return ConversationRow(whole.ids, len(whole.ids), is_learnt) if is_learnt[1:].any() else None

    def _ids(self, text: str) -> Tokens:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _require_apart(where: str, ids: Tokens, before: Tokens) -> None:
    """Raises `ConfigError` unless a row begins with the tokens of the text before an answer, which is what people send."""
    reason = "the tokenizer joins the answer to the mark before it, so no row has the tokens of the prompt that people send"
    fix = "End the chat template's mark of an answer, and begin each answer, without white space; or use prompt_field"
    require(ids[: len(before)] == before, where, reason, fix)


def _part(chat: Conversation, lead: int, start: int, end: int) -> Conversation:
    return dataclasses.replace(chat, messages=(*chat.messages[:lead], *chat.messages[start:end]))
