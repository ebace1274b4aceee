"""Reads prompts with completions, and writes each as two texts: by a template with two fields, or by a checkpoint's chat template.

A row holds the tokens of both texts as one, which transformers reads too, if these begin with the tokens of the prompt alone, which
people send (`dpx.data.rows`).

A conversation gives one row: the turns that fit, with marks on the tokens that are learnt. A turn is a message of the user with all that
follows it up to the user's next message: answers, calls of tools and what tools return. What is before the first turn, such as the system's
message, belongs to every turn. A conversation that is longer than a row loses whole turns from its front, and the template writes what is
left as a conversation of its own; so no row begins within a turn.
"""

import dataclasses
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from string import Formatter
from typing import Any, Literal

import numpy as np

from dpx.data.documents import Conversation
from dpx.data.pairs import Tokens
from dpx.data.record_reader import parsed, require_characters, value_of
from dpx.data.tokenizer import CHAT_TEMPLATE, TextTokenizer
from dpx.declaration import ConfigError, require
from dpx.packages import require_extra

Message = Mapping[str, Any]
# The tokens of a conversation that are learnt: those of the last answer, of all answers of the assistant, or all.
LossOn = Literal["last", "assistant", "all"]
# The name of the template that transformers takes for a conversation with tools, if there is one.
_WITH_TOOLS = "tool_use"
# How a template marks what the assistant wrote, as transformers looks for it.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def halves(template: str) -> tuple[str, str]:
    """Returns the parts of a template that hold `{prompt}` and `{completion}`, as format strings.

    The second part begins with the spaces before `{completion}`, because byte-pair tokenizers join a space to the word after it. `\\n` is a
    line break, which a command line cannot contain otherwise. Raises `ConfigError` for a template without these two fields in this order.
    """
    value = f"data.source.template={template!r}"
    fix = "Write {prompt}, then {completion}, each once, as in {prompt}\\n{completion}; {{ and }} are braces"
    names = fields_of(template, value, fix)
    require(names == ["prompt", "completion"], value, f"has the fields {', '.join(names) or 'none'}", fix)
    first, _, after = template.replace("\\n", "\n").partition("{completion}")
    head = first.rstrip(" ")
    return head, first[len(head) :] + "{completion}" + after


def fields_of(template: str, value: str, fix: str) -> list[str]:
    """Returns the names of a template's fields. Raises `ConfigError` for text that is not a template, or a field that has more than a
    name."""
    try:
        fields = [one for one in Formatter().parse(template) if one[1] is not None]
    except ValueError as error:
        raise ConfigError(value, f"is not a template ({error})", fix) from None
    is_plain = all(name and not form and not conversion for _, name, form, conversion in fields)
    require(is_plain, value, "has a field without a name, or with a format", fix)
    return [str(name) for _, name, _, _ in fields]


def answered(
    where: str,
    record: Mapping[str, Any],
    field: str,
    tools_field: str | None = None,
    documents_field: str | None = None,
    loss_on: LossOn = "last",
) -> Conversation:
    """Returns the conversation of a record, which has something to learn.

    Raises `ConfigError` as `conversation` does, and without an answer: the last message, or for `loss_on=assistant` any message but the
    first, is the assistant's and not empty. `loss_on=all` needs a message.
    """
    found = conversation(where, record, field, tools_field, documents_field)
    if loss_on == "all":
        require(bool(found.messages), where, "has no message", "Remove the row")
        return found
    is_answer = [number > 0 and one["role"] == "assistant" for number, one in enumerate(found.messages)]
    if loss_on == "last":
        reason = "does not end in an answer of the assistant to a message before it"
        require(bool(is_answer) and is_answer[-1], where, reason, "Add it, or remove the row")
        has_text = _says_something(found.messages[-1])
        require(has_text, where, "has an empty completion: the last message has no text", "Remove the row")
        return found
    says = any(_says_something(one) for one, is_one in zip(found.messages, is_answer, strict=True) if is_one)
    require(says, where, "has no answer of the assistant with a text, to a message before it", "Add one, or remove the row")
    return found


def _says_something(message: Message) -> bool:
    return message.get("content", "").strip() != "" or bool(message.get("tool_calls"))


def conversation(
    where: str, record: Mapping[str, Any], field: str, tools_field: str | None = None, documents_field: str | None = None
) -> Conversation:
    """Returns the conversation of a record, without the keys of messages that have no value, as in transformers.

    Raises `ConfigError` unless each message has a role and text, or calls tools instead, and for tools or documents that are not objects.
    """
    value = value_of(where, record, field)
    is_list = isinstance(value, list) and all(isinstance(one, dict) for one in value)
    require(is_list, where, f"has no list of messages under {field!r}", 'Write a list of {"role": ..., "content": ...}')
    messages = tuple({key: _plain(one) for key, one in message.items() if one is not None} for message in value)
    for one in messages:
        is_message = isinstance(one.get("role"), str) and isinstance(one.get("content", "" if one.get("tool_calls") else None), str)
        require(is_message, where, "has a message without a role or a text", 'Give each message "role" and "content", both texts')
        require_characters(where, one.get("content", ""))
    beside: list[tuple[Message, ...] | None] = []
    for name in (tools_field, documents_field):
        # As such or as JSON.
        value = record[name] if name is not None and name in record else None
        value = parsed(where, value) if isinstance(value, str) else value
        is_list = value is None or (isinstance(value, list) and all(isinstance(one, dict) for one in value))
        require(is_list, where, f"has something else than a list of objects under {name!r}", "Write a JSON list of objects, or null")
        beside.append(None if value is None else tuple(map(_plain, value)))
    return Conversation(messages, *beside)


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it; of anything else its type, as transformers gives it to templates."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float) else f"<{type(value).__name__}>"


class ChatTemplate:
    """Writes conversations as text, as `apply_chat_template` of transformers does.

    A template that asks for the time gets the declared `date` (YYYY-MM-DD): rows would otherwise depend on the day of preparation. `key` is
    that of the options which refusals name.
    """

    def __init__(self, tokenizer: TextTokenizer, date: str | None = None, key: str = "data.source"):
        named = tokenizer.chat_templates
        self._lacks_default = f"the checkpoint has the chat templates {', '.join(named)}, and none is named default"
        require(
            bool({"default", _WITH_TOOLS} & set(named)),
            f"{key}.messages_field",
            self._lacks_default
            if named
            else f"the checkpoint has no chat template ({CHAT_TEMPLATE}, or chat_template in tokenizer_config.json)",
            f"Copy the one to use to {CHAT_TEMPLATE}"
            if named
            else "Name an instruction-tuned checkpoint, or use prompt_field and completion_field with a template",
        )
        require_extra(f"{key}.messages_field", "chat")
        from dpx.data.template_sandbox import Sandbox

        self._sandbox, self._marks = Sandbox(key, date), tokenizer.marks
        self._templates = self._sandbox.compiled(named)
        self._marks_answers = {name for name, text in named.items() if _GENERATION.search(text)}
        added = tokenizer.tokenizer.get_added_tokens_decoder().values()
        self._ends = tuple(one.content for one in added if one.content.strip())

    def texts(self, where: str, chat: Conversation) -> tuple[str, str]:
        """Returns the text before the last message, with the mark that begins an answer, and the rest.

        Raises `ConfigError` for messages that the template refuses, or if it writes no text that begins with that of the messages before.
        """
        prompt = self.prompt(where, dataclasses.replace(chat, messages=chat.messages[:-1]))
        whole = self.prompt(where, chat, begins_answer=False)
        reason = "the chat template does not write the last message after the text of those before it, so its tokens are not known"
        require(whole.startswith(prompt), where, reason, "Use another checkpoint, or prompt_field and completion_field")
        return prompt, whole[len(prompt) :]

    def answers(self, where: str, chat: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and where in it what the assistant wrote begins and ends.

        That is what the template marks by `{% generation %}`. A template without these marks is asked for the text before each answer, and
        for that up to its end: the answer is between them, without the white space after a mark that ends it.

        Raises `ConfigError` for messages that the template refuses, and if a text does not begin with that of the messages before.
        """
        whole = self.prompt(where, chat, begins_answer=False)
        if self._name(where, chat) in self._marks_answers:
            marked = list(self._sandbox.answers)
            is_found = all(whole[start : start + len(text)] == text for start, text in marked)
            reason = "the chat template writes an answer within a macro or a variable, so its place in the text is not known"
            require(is_found, where, reason, "Write {% generation %} where the text is written")
            return whole, [(start, start + len(text)) for start, text in marked]
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before = self.prompt(where, dataclasses.replace(chat, messages=chat.messages[:number]))
            until = self.prompt(where, dataclasses.replace(chat, messages=chat.messages[: number + 1]), begins_answer=False)
            reason = "the chat template writes an answer otherwise than it asks for it, or if messages follow, so its tokens are not known"
            fix = "Mark answers in the template by {% generation %}, or use data.source.loss_on=last"
            require(until.startswith(before) and whole.startswith(until), where, reason, fix)
            ended = until.rstrip()
            spans.append((len(before), len(ended if ended.endswith(self._ends) and len(ended) > len(before) else until)))
        return whole, spans

    def _name(self, where: str, chat: Conversation) -> str:
        """Returns the name of the template that writes a conversation."""
        name = _WITH_TOOLS if chat.tools is not None and _WITH_TOOLS in self._templates else "default"
        require(name in self._templates, where, self._lacks_default, f"Copy the one to use to {CHAT_TEMPLATE}")
        return name

    def prompt(self, where: str, chat: Conversation, *, begins_answer: bool = True) -> str:
        """Returns the text of messages and the mark that begins an answer. Raises `ConfigError` for messages that the template refuses."""
        beside = {"tools": chat.tools, "documents": chat.documents}
        given: dict[str, Any] = {name: None if one is None else list(one) for name, one in beside.items()}
        given["messages"] = []
        for message in chat.messages:
            # Reasoning is given under every name by which templates read it.
            reasoning = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if message.get(key) is not None), None)
            own = message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
            given["messages"].append(own)
        given |= {"add_generation_prompt": begins_answer} | dict(self._marks)
        return self._sandbox.rendered(where, self._templates[self._name(where, chat)], given)


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
