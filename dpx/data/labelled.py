"""Declares labelled rows, or prompts with completions, of the user's files, and reads their targets.

Of a number, or of several labels, an empty value is a target that the row lacks.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from dpx.data.completions import LossOn, halves
from dpx.data.record_reader import HUB, RowSet, TextColumns, label_of, label_text, row_sets, value_of
from dpx.data.schema import UNKNOWN, Column, Schema, classes, number, several_labels, texts
from dpx.declaration import ConfigError, declaration, require, require_date

# The most digits of a label that is a number; a longer one is a name made of digits.
_DIGITS = 18
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


@declaration
class Table:
    """Reads labelled texts, or prompts with completions, one a row, from files or data sets.

    Files are `.tsv`, `.csv`, `.jsonl`, each also as `.gz`, and `.parquet`.

    A data set is, with the library `datasets` (extra `hub`), a folder that `save_to_disk` wrote, or `hf://datasets/<name>` with an optional
    `@<revision>`.

    With `select="dev"` the test set is read once, after the last step, and runs are compared by the held-out rows, a share of the training
    files chosen by a hash of the unit. With `select="test"` the test set itself is held out, as in papers, and no rows of the training
    files are.

    With `completion_field` or `messages_field`, rows have no labels: the completion is learnt from the prompt (task=causal_lm). A row
    that is longer than `sequence_length` keeps its completion, and its prompt is cut from the left; a completion that does not fit is cut
    at its end. A conversation loses whole turns instead, the first ones first (`dpx.data.completions`).

    With `target_field` rows have a number in place of a label (task=regression), with `label_names` several labels (task=multi_label). A
    row whose number or label is empty is kept; what it lacks adds nothing to what is learnt.

    Labels that are learnt from protected rows (`labels=null`) make the guarantee `none`.

    Attributes:
        paths: Training files, folders or patterns, a list of them, or a data set.
        labels: Values of the label column in the order of the classes; null takes them from the training rows, sorted.
        test_paths: Files of a test set.
        select: Which rows runs are compared by: dev (held-out training rows) or test (the test set).
        text_field: Column of the text.
        pair_field: Column of a second text, read together with the first.
        choices_field: Column that lists several texts, each read with the text (.jsonl and .parquet); the label is the index of the
            right one, from 0.
        choices: Number of texts in that column.
        label_field: Column of the label.
        target_field: Column of a number, in place of a label.
        label_names: Names of several labels of a row, in place of one: each is a column of 0 or 1, or may be listed in labels_field.
        labels_field: Column that lists those names that are true of a text (.jsonl and .parquet), or has them between semicolons.
        prompt_field: Column of a prompt, given together with the column of its completion.
        completion_field: Column of the completion, the text that is learnt.
        template: How a prompt and its completion are written as one text, with the fields {prompt} and {completion}, and \\n for a line
            break; the prompt ends before {completion} and the spaces before it.
        messages_field: Column of a .jsonl or .parquet file with a conversation, a list of {"role", "content"}, written by the checkpoint's
            chat template; `loss_on` says what of it is learnt.
        loss_on: Which tokens of a conversation are learnt: those of its last message (last), of all messages of the assistant with their
            calls of tools (assistant), or all.
        tools_field: Column with the tools of a conversation, a list of objects or its JSON text, which the chat template reads as `tools`.
        documents_field: Column with the documents of a conversation, as for tools, which the chat template reads as `documents`.
        chat_date: Date (YYYY-MM-DD) that the chat template writes where it asks for today's; null refuses such a template.
        unit_field: Column that names the unit (a document, an author); without it each row is a unit.
        unit_note: A sentence for the statement on what a row is, if a reader could assume more.
        known_as: Names under which these rows are known, which are searched in the training data of a checkpoint.
        equal_rows: Whether training rows of equal content, without a named unit, stay separate rows, each a unit (keep), or count as one
            row and one unit (remove).
        allow_unseen_labels: Whether a declared label that no training row has is accepted.
        split: Split of a data set that is trained on.
        test_split: Split of a data set that is the test set.
        subset: Configuration of a data set on the hub that has several.
        separator: Character between the fields of .csv files, \\t for a tab; null takes the comma, semicolon or tab that separates the
            header into most names.
    """

    paths: str | Sequence[str]
    labels: Sequence[str | int] | None
    test_paths: str | Sequence[str] | None = None
    select: Literal["dev", "test"] = "dev"
    text_field: str = "text"
    pair_field: str | None = None
    choices_field: str | None = None
    choices: int | None = None
    label_field: str = "label"
    unit_field: str | None = None
    unit_note: str | None = None
    target_field: str | None = None
    label_names: Sequence[str] | None = None
    labels_field: str | None = None
    known_as: Sequence[str] = ()
    equal_rows: Literal["keep", "remove"] = "keep"
    allow_unseen_labels: bool = False
    split: str = "train"
    test_split: str = "test"
    subset: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    template: str = "{prompt}\\n{completion}"
    messages_field: str | None = None
    loss_on: LossOn = "last"
    tools_field: str | None = None
    documents_field: str | None = None
    chat_date: str | None = None
    separator: str | None = None
    kind: Literal["table"] = "table"

    def __post_init__(self) -> None:
        self._require_completions()
        self._require_targets()
        if self.labels is not None:
            require_labels(self.classes)
        fields = [self.text_field, self.pair_field, self.choices_field, self.label_field]
        repeated = [field for field in fields if field is not None and fields.count(field) > 1]
        require(
            not repeated,
            f"data.source: {', '.join(repeated[:1])}",
            "the same column cannot be two parts of a row",
            "Name each part's column",
        )
        require(
            self.select == "dev" or self.test_paths is not None,
            "data.source.select=test",
            "this data has no test set",
            "Name its files with data.source.test_paths, or use select=dev",
        )
        self._require_choices()
        is_one = self.separator is None or (len(self.csv_separator or "") == 1 and self.separator not in '"\r\n')
        value = f"data.source.separator={self.separator!r}"
        require(is_one, value, "is not one character that can separate fields", "Use one, such as ';', or \\t for a tab")

    @property
    def csv_separator(self) -> str | None:
        """The separator as it is in the files."""
        return "\t" if self.separator == "\\t" else self.separator

    def _require_completions(self) -> None:
        require_date("data.source.chat_date", self.chat_date)
        value = f"data.source.prompt_field={self.prompt_field}, completion_field={self.completion_field}"
        fix = "Give both, or messages_field alone"
        require((self.prompt_field is None) == (self.completion_field is None), value, "a prompt and a completion are needed", fix)
        reason = "only a conversation has several messages to choose from"
        is_chosen = self.loss_on == "last" or self.messages_field is not None
        require(is_chosen, f"data.source.loss_on={self.loss_on}", reason, "Name the conversations with messages_field, or leave it out")
        if not self.has_completions:
            return
        require(self.prompt_field is None or self.messages_field is None, value, "the messages already hold the prompt", fix)
        given = [name for name in ("tools_field", "documents_field") if getattr(self, name) is not None]
        is_read = self.messages_field is not None or not given
        require(is_read, f"data.source.{(given or [''])[0]}", "only a chat template reads it", "Name the conversations with messages_field")
        same = self.prompt_field is not None and self.prompt_field == self.completion_field
        require(not same, value, "the same column cannot be two parts of a row", "Name each part's column")
        others = {"labels": self.labels, "pair_field": self.pair_field, "choices_field": self.choices_field}
        given = [name for name, one in others.items() if one is not None]
        reason = "rows of prompts and completions have neither labels nor second texts"
        require(not given, f"data.source.{(given or [''])[0]}", reason, "Leave it out")
        halves(self.template)

    def _require_targets(self) -> None:
        """Raises `ConfigError` for a target, or names of several labels, beside another kind of label."""
        kinds = {"target_field": self.target_field, "label_names": self.label_names}
        others = {"labels": self.labels, "choices_field": self.choices_field, "completion_field": self.completion_field}
        others |= {"messages_field": self.messages_field}
        given = [name for name, one in (kinds | others).items() if one is not None]
        both = f"data.source.{' and '.join(given[:2])}"
        require(not any(kinds[name] is not None for name in kinds) or len(given) == 1, both, "are two kinds of labels", "Leave one out")
        fix = "Name the labels with data.source.label_names"
        value = f"data.source.labels_field={self.labels_field}"
        require(self.labels_field is None or self.label_names is not None, value, "lists labels, and none is declared", fix)
        names = list(self.label_names or ())
        value = f"data.source.label_names=[{', '.join(names)}]"
        require(self.label_names is None or bool(names), value, "names no label", "Name one or more")
        require(len(set(names)) == len(names), value, "the list contains a label twice", "Name each label once")
        columns = [one for one in (self.target_field, self.labels_field) if one is not None] or names
        twice = [one for one in columns if one in (self.text_field, self.pair_field)]
        fix = "Name each part's column"
        require(not twice, f"data.source: {', '.join(twice[:1])}", "the same column cannot be two parts of a row", fix)

    def _require_choices(self) -> None:
        value = f"data.source.choices={self.choices}"
        is_given = self.choices_field is not None
        require(
            is_given == (self.choices is not None),
            value,
            "the number of choices and the column of the choices must be given together",
            "Give both or none",
        )
        if self.choices is None:
            return
        require(self.choices >= 2, value, "a choice needs at least two options", "Use 2 or more")
        require(
            self.pair_field is None,
            f"data.source.pair_field={self.pair_field}",
            "with choices, each choice already is the second text of a row",
            "Leave it out",
        )
        places = [str(place) for place in range(self.choices)]
        require(
            self.labels is not None and list(self.classes) == places,
            value,
            "with choices, each label is the position of a choice",
            f"Use labels=[{','.join(places)}]",
        )

    @cached_property
    def classes(self) -> Sequence[str]:
        """The labels in the order of the classes, of a number its column; they are read from the training files if none are declared."""
        if self.has_completions:
            return ()
        if self.target_field is not None:
            return (self.target_field,)
        if self.label_names is not None:
            return tuple(self.label_names)
        if self.labels is not None:
            return tuple(map(label_text, self.labels))
        rows = (row for one in self.training_sets() for row in one.records())
        found = {label_of(where, record, self.label_field) for where, record in rows}
        # As numbers if all are numbers, with `1` and `01` ordered by their text.
        are_whole = all(label.isdecimal() and len(label) <= _DIGITS for label in found)
        labels = tuple(sorted(found, key=lambda label: (int(label), label)) if are_whole else sorted(found))
        are_numbers = all(_NUMBER.fullmatch(label) for label in labels)
        measured = next((label for label in labels if are_numbers and not label.lstrip("+-").isdecimal()), None)
        reason = f"its values are {len(labels)} numbers with decimals, such as {measured}, which are no classes"
        fix = "Use task=regression with data.source.target_field, or name a column of classes"
        require(measured is None, f"data.source.label_field={self.label_field}", reason, fix)
        fix = "Name the column of labels with data.source.label_field, or add rows of another label"
        require(len(labels) >= 2, "data.source.labels=null", f"the training rows have only the label {labels[0]}", fix)
        return labels

    def training_sets(self) -> list[RowSet]:
        """Returns the files and data sets of the training rows. Raises `ConfigError` for a path that does not exist."""
        return row_sets(self.paths, "data.source.paths", self.split, self.subset, self.csv_separator)

    def test_sets(self) -> list[RowSet]:
        """Returns the files and data sets of the test set; empty without a test set."""
        if self.test_paths is None:
            return []
        return row_sets(self.test_paths, "data.source.test_paths", self.test_split, self.subset, self.csv_separator)

    @property
    def has_completions(self) -> bool:
        """Whether a row is a prompt and its completion, without a label."""
        return self.completion_field is not None or self.messages_field is not None

    @property
    def hub_names(self) -> tuple[str, ...]:
        """The data sets on the hub that contain the training rows, by the last part of their names."""
        declared = [self.paths] if isinstance(self.paths, str) else self.paths
        return tuple(path.partition("@")[0].rpartition("/")[2] for path in declared if path.startswith(HUB))

    @property
    def texts(self) -> TextColumns:
        """The columns that hold the texts of a row."""
        return TextColumns(self.text_field, self.pair_field, self.choices_field, self.choices)

    def columns(self, sequence_length: int, vocabulary_size: int, is_paired: bool) -> Schema:
        """Returns the columns of marked texts, and their labels or which tokens are learnt, if they have any."""
        of_text = texts(sequence_length, vocabulary_size, self.choices)
        if self.loss_on == "assistant":
            return of_text | {"is_learnt": Column("uint8", (sequence_length,), 2, is_text=True)}
        if self.target_field is not None:
            return of_text | number()
        if self.label_names is not None:
            return of_text | several_labels(len(self.label_names))
        return of_text if self.has_completions else of_text | {"label": classes(len(self.classes))}


def require_labels(labels: Sequence[str]) -> None:
    """Raises `ConfigError` for fewer than two labels, or for a label that is declared twice."""
    value = f"data.source.labels=[{', '.join(labels)}]"
    require(len(labels) >= 2, value, "a classifier needs at least two labels", "Declare 2 labels or more")
    require(len(set(labels)) == len(labels), value, "the list contains a label twice", "Declare each label once")


_TRUTHS = {"0": 0, "1": 1, "false": 0, "true": 1, "": UNKNOWN}


def number_of(where: str, record: Mapping[str, Any], field: str) -> float | None:
    """Returns the number of a record; `None` if it is empty. Raises `ConfigError` for what is not a finite number of 32 bits."""
    value = value_of(where, record, field)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    # What float32 cannot hold would be infinite in a row.
    is_number = math.isfinite(number) and abs(number) < 3.4e38
    require(is_number, where, f"has {str(value)[:40]!r} under {field!r}, which is not a number", "Correct it, or leave it empty")
    return number


def labels_of(where: str, record: Mapping[str, Any], names: Sequence[str], listed: str | None) -> tuple[int, ...]:
    """Returns 1 for each of the `names` that is true of a record, 0 for one that is not, and `UNKNOWN` for one that the record lacks.

    Each name is a column of 0 or 1; or the column `listed` has the names that are true: a list, its JSON text, or names between
    semicolons. Raises `ConfigError` for another value, or another name.
    """
    if listed is None:
        found = []
        for name in names:
            value = value_of(where, record, name)
            truth = _TRUTHS.get("" if value is None else label_text(value).strip().lower())
            if truth is None:
                raise ConfigError(where, f"has {str(value)[:40]!r} under {name!r}, which is neither 0 nor 1", "Write 0, 1, or nothing")
            found.append(truth)
        return tuple(found)
    value = value_of(where, record, listed)
    if value is None:
        return (UNKNOWN,) * len(names)
    if isinstance(value, str):
        value = _listed(where, value, listed)
    require(isinstance(value, list), where, f"has {str(value)[:40]!r} under {listed!r}, which is not a list of labels", "Correct the row")
    true = [label_text(one) for one in value]
    known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    other = [one for one in true if one not in names]
    reason = f"has the label {(other or [''])[0]!r}, which is not among {known}"
    require(not other, where, reason, "Correct the row, or data.source.label_names")
    return tuple(int(name in true) for name in names)


def _listed(where: str, text: str, field: str) -> Any:
    """Returns the names in a field of text, as a list; none in an empty one."""
    if not text.lstrip().startswith("["):
        return [one.strip() for one in text.split(";") if one.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(where, f"has a list under {field!r} that is not JSON", "Write it as JSON, or its names with ; between") from None
