"""Reads prompts with completions, and writes each as two texts: by a template with two fields, or by a checkpoint's chat template.

A row holds the tokens of both texts as one, which transformers reads too, if these begin with the tokens of the prompt alone, which
people send (`dpx.data.rows`).
"""

import contextlib
import dataclasses
import functools
import json
import resource
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from string import Formatter
from typing import Any, NoReturn

from dpx.data.documents import Conversation
from dpx.data.record_reader import parsed, require_characters, value_of
from dpx.data.tokenizer import CHAT_TEMPLATE, TextTokenizer
from dpx.declaration import ConfigError, require
from dpx.extras import require_extra

Message = Mapping[str, Any]


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
    where: str, record: Mapping[str, Any], field: str, tools_field: str | None = None, documents_field: str | None = None
) -> Conversation:
    """Returns the conversation of a record. Raises `ConfigError` as `conversation` does, and unless the last message, the completion, is
    the assistant's and not empty."""
    found = conversation(where, record, field, tools_field, documents_field)
    *before, last = found.messages or ({},)
    is_answered = bool(before) and last["role"] == "assistant"
    require(is_answered, where, "does not end in an answer of the assistant to a message before it", "Add it, or remove the row")
    has_text = last.get("content", "").strip() != "" or _calls_tools(last)
    require(has_text, where, "has an empty completion: the last message has no text", "Remove the row")
    return found


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
        is_message = isinstance(one.get("role"), str) and isinstance(one.get("content", "" if _calls_tools(one) else None), str)
        require(is_message, where, "has a message without a role or a text", 'Give each message "role" and "content", both texts')
        require_characters(where, one.get("content", ""))
    beside = (None if one is None else _objects(where, record, one) for one in (tools_field, documents_field))
    return Conversation(messages, *beside)


def _calls_tools(message: Message) -> bool:
    return bool(message.get("tool_calls"))


def _objects(where: str, record: Mapping[str, Any], field: str) -> tuple[Message, ...] | None:
    """Returns the list of objects that a record has under `field`, as such or as JSON; `None` for a record without them."""
    value = record[field] if field in record else None
    value = parsed(where, value) if isinstance(value, str) else value
    is_list = value is None or (isinstance(value, list) and all(isinstance(one, dict) for one in value))
    require(is_list, where, f"has something else than a list of objects under {field!r}", "Write a JSON list of objects, or null")
    return None if value is None else tuple(map(_plain, value))


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
        self._named = tokenizer.chat_templates
        require(
            bool({"default", _WITH_TOOLS} & set(self._named)),
            f"{key}.messages_field",
            self._without_default()
            if self._named
            else f"the checkpoint has no chat template ({CHAT_TEMPLATE}, or chat_template in tokenizer_config.json)",
            f"Copy the one to use to {CHAT_TEMPLATE}"
            if self._named
            else "Name an instruction-tuned checkpoint, or use prompt_field and completion_field with a template",
        )
        require_extra(f"{key}.messages_field", "chat")
        from jinja2 import TemplateSyntaxError

        extensions = ["jinja2.ext.loopcontrols", _generation_blocks()]
        environment = _counting_environment(extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = functools.partial(_formatted, f"{key}.chat_date", date)
        environment.globals["dict"], environment.globals["namespace"] = _Dict(), _namespace()
        try:
            with _bounded_memory():
                self._templates = {name: environment.from_string(text) for name, text in self._named.items()}
        except TemplateSyntaxError as error:
            reason = f"is not a template of Jinja (line {error.lineno}: {_first_line(error)})"
            raise ConfigError(CHAT_TEMPLATE, reason, "Correct the checkpoint's template") from None
        self._marks, self._environment = tokenizer.marks, environment

    def texts(self, where: str, chat: Conversation) -> tuple[str, str]:
        """Returns the text before the last message, with the mark that begins an answer, and the rest.

        Raises `ConfigError` for messages that the template refuses, or if it writes no text that begins with that of the messages before.
        """
        prompt, whole = self.prompt(where, dataclasses.replace(chat, messages=chat.messages[:-1])), self._text(where, chat, False)
        reason = "the chat template does not write the last message after the text of those before it, so its tokens are not known"
        require(whole.startswith(prompt), where, reason, "Use another checkpoint, or prompt_field and completion_field")
        return prompt, whole[len(prompt) :]

    def prompt(self, where: str, chat: Conversation) -> str:
        """Returns the text of messages and the mark that begins an answer. Raises `ConfigError` for messages that the template refuses."""
        return self._text(where, chat, True)

    def _text(self, where: str, chat: Conversation, begins_answer: bool) -> str:
        beside = {"tools": chat.tools, "documents": chat.documents}
        given = {name: None if one is None else list(one) for name, one in beside.items()}
        given["messages"] = [_with_reasoning(one) for one in chat.messages]
        name = _WITH_TOOLS if chat.tools is not None and _WITH_TOOLS in self._templates else "default"
        require(name in self._templates, where, self._without_default(), f"Copy the one to use to {CHAT_TEMPLATE}")
        self._environment.steps = 0
        try:
            with _bounded_memory():
                return self._templates[name].render(given, add_generation_prompt=begins_answer, **self._marks)
        except ConfigError:
            raise
        except _Refused as error:
            fix = "Correct the roles and their order, or remove the row"
            raise ConfigError(where, f"the chat template refuses the messages ({_first_line(error)})", fix) from None
        except MemoryError:
            reason = f"takes more than {_MOST_BYTES / 2**30:.2g} GiB for one conversation"
            raise ConfigError(CHAT_TEMPLATE, reason, "Correct the checkpoint's template") from None
        except Exception as error:  # a template is a program: it may raise anything
            fix = "Give the messages what the template reads, or correct the checkpoint's template"
            reason = f"the chat template fails on the messages ({type(error).__name__}: {_first_line(error)})"
            raise ConfigError(where, reason, fix) from None

    def _without_default(self) -> str:
        return f"the checkpoint has the chat templates {', '.join(self._named)}, and none is named default"


class _Refused(Exception):
    """Is raised by a template that refuses messages."""


# The name of the template that transformers takes for a conversation with tools, if there is one.
_WITH_TOOLS = "tool_use"
# Loops and calls of one conversation, and thousands of characters that these make; templates of usual checkpoints need some thousands.
_MOST_STEPS = 1_000_000
# What a template may take beside what this process has. Digits of a number are fewer: their time grows faster than their room.
_MOST_BYTES = 2**30
_MOST_BITS = 2**16


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """Inside the block this process gets no more than `_MOST_BYTES`; if the system cannot say what the process has, nothing is limited."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _counting_environment(extensions: list[Any]) -> Any:
    """Returns Jinja's sandbox, which refuses a template that takes more than `_MOST_STEPS`, and what draws by chance: equal conversations
    have equal rows."""
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Weighed(NodeTransformer):
        def visit_Concat(self, node: Any) -> Any:
            return nodes.Filter(self.generic_visit(node), "weighed", [], [], None, None, lineno=node.lineno)

    class Counting(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "+"))
        steps = 0

        def _generate(self, source: Any, *given: Any, **named: Any) -> str:
            for loop in source.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
            return super()._generate(Weighed().visit(source), *given, **named)

        def call(*given: Any, **named: Any) -> Any:  # a template may give an argument any name
            given[0].count()
            return given[0].weighed(ImmutableSandboxedEnvironment.call(*given, **named))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator != "+" and isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
                if bits > _MOST_BITS:
                    self._refuse("computes a number with too many digits")
            return self.weighed(super().call_binop(context, operator, left, right))

        def count(self, steps: int = 1) -> None:
            self.steps += steps
            if self.steps > _MOST_STEPS:
                self._refuse(f"takes more than {_MOST_STEPS:,} steps for one conversation")

        def counted(self, iterable: Any) -> Any:
            for one in iterable:
                self.count()
                yield one

        def weighed(self, value: Any) -> Any:
            if isinstance(value, str):
                self.count(len(value) // 1000)
            return value

        def _refuse(self, reason: str) -> NoReturn:
            raise ConfigError(CHAT_TEMPLATE, reason, "Correct the checkpoint's template")

    environment = Counting(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # Each draws by chance.
    del environment.filters["random"], environment.globals["lipsum"]
    for name, plain in environment.filters.items():
        environment.filters[name] = _then(plain, environment.weighed)
    environment.filters |= {"counted": environment.counted, "weighed": environment.weighed}
    return environment


def _then(first: Callable[..., Any], second: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns both functions as one, with the marks by which Jinja knows what `first` is given."""
    return functools.wraps(first)(lambda *given, **named: second(first(*given, **named)))


def _generation_blocks() -> Any:
    """Returns the extension of Jinja for `{% generation %}`, with which a template marks what the assistant wrote: it is read as its
    content."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags: set[str] = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    return GenerationBlocks


class _Dict:
    """Is `dict` in templates, as transformers has it: what it makes is a dict, and nothing else can be reached from it."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


def _namespace() -> Any:
    """Returns `namespace` of templates, which takes no name that begins with an underscore, as in transformers."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class OfTemplate(Namespace):
        def __init__(*given: Any, **named: Any) -> None:  # a template may give an attribute any name
            for name in (attributes := dict(*given[1:], **named)):
                _require_plain(name)
            Namespace.__init__(given[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _require_plain(name)
            Namespace.__setitem__(self, name, value)

    def _require_plain(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace takes no attribute that begins with an underscore, such as {name!r}")

    return OfTemplate


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Returns JSON as templates of transformers have it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _formatted(key: str, date: str | None, form: str) -> str:
    reason = "the checkpoint's chat template writes the date, and rows would depend on the day on which they are prepared"
    require(date is not None, f"{key}=null", reason, f"Declare it, as in {key}=2026-01-31")
    return datetime.fromisoformat(str(date)).strftime(form)


def _with_reasoning(message: Message) -> Message:
    """Returns a message with its reasoning under every name by which templates read it."""
    reasoning = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _refuse(message: str) -> None:
    raise _Refused(message)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]
