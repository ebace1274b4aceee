"""Reads prompts from the rows of a file, written as the training rows of a run are, by a template over columns, or as conversations."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dpx.console import stage
from dpx.data.completions import ChatTemplate, conversation, fields_of, halves
from dpx.data.declared_data import Source
from dpx.data.labelled import Table
from dpx.data.record_reader import SUFFIXES, records, text_of
from dpx.data.tokenizer import TextTokenizer
from dpx.declaration import require


class Prompt(NamedTuple):
    """The number of a row in its file, from 1, its text and its token ids, with the mark of beginning."""

    row: int
    text: str
    ids: list[int]


@dataclass(frozen=True)
class Style:
    """How a record becomes a prompt: a template with the column of each field, or the chat template and a column of messages.

    `before` and `after` are the texts that training rows have around a completion; `separator` is that of the run's .csv files.
    """

    template: str = "{prompt}"
    columns: Mapping[str, str] = field(default_factory=lambda: {"prompt": "prompt"})
    messages_field: str | None = None
    tools_field: str | None = None
    documents_field: str | None = None
    chat_date: str | None = None
    before: str = ""
    after: str = ""
    separator: str | None = None

    @staticmethod
    def of_rows(source: Source) -> "Style":
        """Returns how the training rows of a run were written; a row of running text is a prompt in the column `prompt`."""
        if not isinstance(source, Table) or not source.has_completions:
            return Style()
        if source.messages_field is not None:
            names = ("messages_field", "tools_field", "documents_field", "chat_date")
            return Style(**{name: getattr(source, name) for name in names})
        first, second = halves(source.template)
        before, _, after = second.format(completion="\0").partition("\0")
        columns = {"prompt": str(source.prompt_field)}
        return Style(first, columns, before=before, after=after, separator=source.csv_separator)

    @staticmethod
    def of_columns(template: str) -> "Style":
        """Returns the style of a template whose fields are columns. Raises `ConfigError` for text without a field."""
        value, fix = (
            f"generate.template={template!r}",
            "Write columns of the file in braces, as in 'About {name}:'; {{ and }} are braces",
        )
        names = fields_of(template, value, fix)
        require(bool(names), value, "has no field, so every prompt would be the same", fix)
        return Style(template.replace("\\n", "\n"), {name: name for name in names})

    def completion(self, text: str) -> str:
        """Returns a completion without what training rows have around it."""
        return text.removeprefix(self.before).removesuffix(self.after)

    def text(self, where: str, record: Mapping[str, Any], chat: ChatTemplate | None) -> str:
        """Returns the prompt of a record; an answer of the assistant at the end of a conversation is left out."""
        needed = [self.messages_field] if self.messages_field is not None else list(self.columns.values())
        missing = [column for column in needed if column not in record]
        there = ", ".join(map(str, list(record)[:8]))
        reason = f"has no column {(missing or [''])[0]!r}; its columns are {there}"
        require(not missing, where, reason, "Name columns of this file with generate.template or generate.messages_field")
        if chat is None or self.messages_field is None:
            return self.template.format(**{name: text_of(where, record, column) for name, column in self.columns.items()})
        whole = conversation(where, record, self.messages_field, self.tools_field, self.documents_field)
        asked = whole.messages[:-1] if whole.messages and whole.messages[-1]["role"] == "assistant" else whole.messages
        require(bool(asked), where, "has no message before the assistant's answer", "Add it, or remove the row")
        return chat.prompt(where, replace(whole, messages=asked))


def require_rows(file: Path) -> None:
    """Raises `ConfigError` for a path that is not a file of rows."""
    fix = f"Name a file that ends in one of {', '.join(SUFFIXES)}"
    require(file.is_file(), f"generate.prompts={file}", "no such file", fix)
    require(file.name.endswith(SUFFIXES), f"generate.prompts={file}", "dpx cannot read this kind of file", fix)


def read(file: Path, style: Style, tokenizer: TextTokenizer, room: int, limit: int | None = None) -> list[Prompt]:
    """Returns the prompts of a file in order, at most `limit`, each once: a later row with the same prompt is left out.

    Raises `ConfigError`, naming the row, for a row without its columns, and for one of these prompts that has more than `room` tokens.
    """
    chat = ChatTemplate(tokenizer, style.chat_date, "generate") if style.messages_field is not None else None
    by_text: dict[str, tuple[int, str]] = {}
    row = 0
    for row, (where, record) in enumerate(records(file, style.separator), start=1):
        by_text.setdefault(style.text(where, record, chat), (row, where))
    if repeated := row - len(by_text):
        stage(f"{file}: left out {repeated:,} of {row:,} rows, whose prompts repeat those of earlier rows")
    by_text = dict(itertools.islice(by_text.items(), limit))
    encodings = tokenizer.tokenizer.encode_batch_fast(list(by_text), add_special_tokens=False)
    # A chat template writes its own marks.
    begin = tokenizer.begins if chat is None else ()
    prompts = [Prompt(row, text, [*begin, *one.ids]) for (text, (row, _)), one in zip(by_text.items(), encodings, strict=True)]
    for prompt, (_, where) in zip(prompts, by_text.values(), strict=True):
        reason = f"has a prompt of {len(prompt.ids)} tokens; beside a completion there is room for {room}"
        require(
            0 < len(prompt.ids) <= room,
            where,
            reason,
            "Shorten it, or lower generate.max_new_tokens (max_length of the checkpoint's files)",
        )
    return prompts
