"""Runs chat templates of checkpoints, which are programs of others, within bounds of steps and memory. Imports Jinja (extra `chat`).

Templates get what transformers gives them. Nothing is drawn by chance and no date of today is given: equal conversations have equal rows.
"""

import contextlib
import functools
import json
import resource
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from dpx.data.tokenizer import CHAT_TEMPLATE
from dpx.declaration import ConfigError, require

# Loops and calls of one conversation, and thousands of characters that these make; templates of usual checkpoints need some thousands.
MOST_STEPS = 1_000_000
# What a template may take beside what this process has. Digits of a number are fewer: their time grows faster than their room.
MOST_BYTES = 2**30
MOST_BITS = 2**16


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which refuses a template that takes more than `MOST_STEPS`.

    A template that asks for the time gets `date` (YYYY-MM-DD). `key` is that of the options which refusals name.
    """

    intercepted_binops = frozenset(("*", "**", "+"))
    steps = 0

    def __init__(self, key: str = "data.source", date: str | None = None):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks])
        # What the last conversation has written so far, and its blocks of `{% generation %}`: (position, text).
        self.written: list[str] = []
        self.answers: list[tuple[int, str]] = []
        self._key, self._date = key, date
        # Each draws by chance.
        del self.filters["random"], self.globals["lipsum"]
        self.filters = {name: self._then_weighed(plain) for name, plain in self.filters.items()}
        self.filters |= {"counted": self.counted, "weighed": self.weighed, "tojson": _to_json}
        self.globals |= {"raise_exception": _refuse, "strftime_now": self._formatted, "dict": _Dict(), "namespace": _Namespace}

    def compiled(self, texts: Mapping[str, str]) -> dict[str, Template]:
        """Returns templates by name. Raises `ConfigError` for a text that is not a template."""
        try:
            with _bounded_memory():
                return {name: self.from_string(text) for name, text in texts.items()}
        except TemplateSyntaxError as error:
            reason = f"is not a template of Jinja (line {error.lineno}: {_first_line(error)})"
            raise ConfigError(CHAT_TEMPLATE, reason, "Correct the checkpoint's template") from None

    def rendered(self, where: str, template: Template, given: Mapping[str, Any]) -> str:
        """Returns the text of one conversation, whose `answers` are then known. Raises `ConfigError` if the template refuses it or fails on
        it."""
        self.steps, self.written, self.answers = 0, [], []
        try:
            with _bounded_memory():
                for part in template.generate(given):
                    self.written.append(part)
                return "".join(self.written)
        except ConfigError:
            raise
        except _Refused as error:
            fix = "Correct the roles and their order, or remove the row"
            raise ConfigError(where, f"the chat template refuses the messages ({_first_line(error)})", fix) from None
        except MemoryError:
            reason = f"takes more than {MOST_BYTES / 2**30:.2g} GiB for one conversation"
            raise ConfigError(CHAT_TEMPLATE, reason, "Correct the checkpoint's template") from None
        except Exception as error:  # a template is a program: it may raise anything
            fix = "Give the messages what the template reads, or correct the checkpoint's template"
            reason = f"the chat template fails on the messages ({type(error).__name__}: {_first_line(error)})"
            raise ConfigError(where, reason, fix) from None

    def _generate(self, source: Any, *given: Any, **named: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return super()._generate(_Weighing().visit(source), *given, **named)

    def call(*given: Any, **named: Any) -> Any:  # a template may give an argument any name
        given[0].count()
        return given[0].weighed(ImmutableSandboxedEnvironment.call(*given, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator != "+" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                self._stop("computes a number with too many digits")
        return self.weighed(super().call_binop(context, operator, left, right))

    def count(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > MOST_STEPS:
            self._stop(f"takes more than {MOST_STEPS:,} steps for one conversation")

    def counted(self, iterable: Any) -> Any:
        for one in iterable:
            self.count()
            yield one

    def weighed(self, value: Any) -> Any:
        if isinstance(value, str):
            self.count(len(value) // 1000)
        return value

    def _then_weighed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter whose results count, with the marks by which Jinja knows what it is given."""
        return functools.wraps(plain)(lambda *given, **named: self.weighed(plain(*given, **named)))

    def _stop(self, reason: str) -> NoReturn:
        raise ConfigError(CHAT_TEMPLATE, reason, "Correct the checkpoint's template")

    def _formatted(self, form: str) -> str:
        reason = "the checkpoint's chat template writes the date, and rows would depend on the day on which they are prepared"
        value = f"{self._key}.chat_date"
        require(self._date is not None, f"{value}=null", reason, f"Declare it, as in {value}=2026-01-31")
        return datetime.fromisoformat(str(self._date)).strftime(form)


class _Weighing(NodeTransformer):
    """Makes joined texts count."""

    def visit_Concat(self, node: Any) -> Any:
        return nodes.Filter(self.generic_visit(node), "weighed", [], [], None, None, lineno=node.lineno)


class _GenerationBlocks(Extension):
    """Is the extension for `{% generation %}`, with which a template marks what the assistant wrote: its content is written and noted."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_noted"), [], [], content).set_lineno(line)

    def _noted(self, caller: Callable[[], str]) -> str:
        of: Any = self.environment
        text = caller()
        of.answers.append((sum(map(len, of.written)), text))
        return text


class _Dict:
    """Is `dict` in templates, as transformers has it: what it makes is a dict, and nothing else can be reached from it."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(Namespace):
    """Is `namespace` in templates, which takes no name that begins with an underscore, as in transformers."""

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


class _Refused(Exception):
    """Is raised by a template that refuses messages."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Returns JSON as templates of transformers have it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """Inside the block this process gets no more than `MOST_BYTES`; if the system cannot say what the process has, nothing is limited."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
