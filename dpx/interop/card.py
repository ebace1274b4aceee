"""Writes the model card of exported weights: usage, the run's guarantee and its limits, its initial weights, its search, and its settings.

It is made from the run's statement, its config and the released weights alone: it contains no figure that was measured on protected text,
and no path of a machine.
"""

import json
import re
import shlex
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpx.config.declared_init import FromCheckpoint, Init
from dpx.files.records import to_json
from dpx.files.run_folder import told
from dpx.files.weights import hub_name
from dpx.privacy.origins import OWED, VERDICTS, in_words
from dpx.statement import received, seals
from dpx.statement.outside_code import heading
from dpx.statement.statement_records import PlainStatement, RunStatement, Statement, StudyStatement
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task

# In the front matter of a card that dpx wrote: the random id of the release.
RELEASE = "dpx_release"
_FRONT = re.compile(r"\A\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
_HEADING = re.compile(r"^(#+)\s+(.*)$")
_LINK = re.compile(r"\[([^\]]+)\]\(")
_ITEM = re.compile(r"^\s*(?:[-*+]|[0-9]+[.)])\s+(.*)$")
# A key of the front matter that begins a line, and the end of the list that may follow it.
_LISTED = re.compile(r"^datasets:(.*?)(?=^[^\s\-#]|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)


def named_by_card(folder: Path) -> list[str]:
    """Returns the data sets that a checkpoint's `README.md` lists; empty without a card.

    They are in its front matter, and are links, first cells or items under a heading on training data.
    """
    text, front, facts = _read_card(folder)
    if facts is None:
        # Names in front matter that is not valid YAML still count.
        parts = [part for listed in _LISTED.findall(front) for part in re.split(r"[\n,\[\]]", listed)]
        named = [part.strip(" -'\"") for part in parts if _has_letters(part)]
    else:
        named = [name for key, value in facts.items() if str(key).lower() == "datasets" for name in _texts(value)]

    level = 0
    for line in text.split("\n"):
        heading = _HEADING.match(line)
        if heading is not None and (not level or len(heading.group(1)) <= level):
            title = heading.group(2).lower()
            is_on_training = "train" in title or "tuning" in title
            is_on_data = is_on_training and any(word in title for word in ("data", "corpus", "corpora"))
            level = len(heading.group(1)) if "trained on" in title or is_on_data else 0
        elif level and (links := _LINK.findall(line)):
            named += links
        elif level:
            # The first cell of a table's row, or an item of a list.
            item = _ITEM.match(line)
            first = item.group(1) if item else line.strip().strip("|").split("|")[0] if line.strip().startswith("|") else ""
            named += [first.strip()] if _has_letters(first) else []
    return list(dict.fromkeys(named))


def is_card_of_dpx(folder: Path) -> bool:
    """Returns whether the model card in `folder` was written by an export of dpx."""
    return RELEASE in (_read_card(folder)[2] or {})


def _read_card(folder: Path) -> tuple[str, str, dict[Any, Any] | None]:
    """Returns the text of a model card, empty without one, its front matter as text and as values; `None` for what is not valid YAML."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8-sig", errors="replace").replace("\r\n", "\n") if card.is_file() else ""
    match = _FRONT.match(text)
    front = match.group(1) if match else ""
    try:
        facts = yaml.safe_load(front)
    except (yaml.YAMLError, ValueError):  # a date that no month has is a ValueError
        return text, front, None
    return text, front, facts if isinstance(facts, dict) else {}


def _texts(value: Any) -> list[str]:
    """Yields every text in a node of YAML, except the keys of mappings."""
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in _texts(one)]
    return [] if value is None else [str(value)]


def _has_letters(text: str) -> bool:
    return any(map(str.isalnum, text))


def among(known_as: Iterable[str], trained_on: Iterable[str]) -> list[str]:
    """Returns the entries of `trained_on` that contain one of the names `known_as`."""
    patterns: list[re.Pattern[str]] = []
    for letters in ([one for one in _folded(name) if one.isalnum()] for name in known_as):
        if letters:
            # A version may follow a name, as in SQuAD2.0; a longer word or number is another name. Scripts other than Latin have no such
            # words.
            longer = r"[0-9]" if letters[-1].isdigit() else r"[a-z]"
            shorter = r"(?<![a-z0-9])" if letters[0].isascii() else ""
            patterns.append(re.compile(shorter + r"[\W_]*".join(map(re.escape, letters)) + f"(?!{longer})"))
    return [name for name in trained_on if any(pattern.search(_folded(name)) for pattern in patterns)]


def _folded(name: str) -> str:
    """Returns the text without case, accents and width forms."""
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", name).casefold())
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter))


# The hub's names of tasks; the first three are those of a pipeline of transformers too.
_TAGS: dict[type, str] = {
    Classification: "text-classification",
    MaskedLanguageModel: "fill-mask",
    CausalLanguageModel: "text-generation",
    Regression: "text-classification",
    MultiLabel: "text-classification",
    MultipleChoice: "multiple-choice",
}
_NOT_HERE = (
    "Figures on held-out rows are not here: they depend on those rows without noise. `job=evaluate` gives them to whoever has the run"
)
_EXAMPLES = {"text-classification": "A text.", "fill-mask": "A [MASK] text.", "text-generation": "A text"}


@dataclass(frozen=True)
class Published:
    """What the user declares for a card: the hub id of the checkpoint that the run started from, and a licence."""

    base: str | None = None
    license: str | None = None

    def with_defaults(self, init: Init) -> "Published":
        """Returns it with the hub id in `init.path`, and with the licence that the checkpoint's card names, where none is declared."""
        if not isinstance(init, FromCheckpoint):
            return self
        named = (_read_card(Path(init.path))[2] or {}).get("license")
        return Published(self.base or hub_name(init.path), self.license or (named if isinstance(named, str) else None))


@dataclass(frozen=True)
class Model:
    """The exported model: its class in transformers, its task, what was trained, and for adapters the name of their `base`."""

    name: str
    architecture: str
    task: Task
    trained: str
    base: str | None
    published: Published


def card(
    statement: Statement,
    model: Model,
    training: str | None,
    exporting: str,
    changed: Sequence[str] = (),
    checked_by: received.CheckedBy = "ledger",
    anew: Sequence[str] = (),
) -> str:
    """Returns Markdown, with the front matter that model hubs read.

    `training` and `exporting` are the commands that made the run and this folder; `changed` says what training changed, `checked_by` what
    the statement was checked against (`dpx.statement.received`), `anew` which of the checkpoint's files differ for another reason.
    """
    kind = f"A {model.architecture}" if model.base is None else f"Adapters of `{model.base}` as a {model.architecture}"
    tag, base = _TAGS.get(type(model.task)), model.published.base
    # What hubs read; the licence is `unknown` if neither the user nor the checkpoint's card names one.
    lines = ["---", f"library_name: {'transformers' if model.base is None else 'peft'}"]
    lines += [f"license: {json.dumps(model.published.license or 'unknown')}"]
    lines += [f"base_model: {json.dumps(base)}"] if base else []
    lines += [f"pipeline_tag: {tag}"] if tag else []
    lines += [f"{RELEASE}: {json.dumps(seals.release_id(to_json(statement)))}"]
    lines += ["tags:", "- differential-privacy", f"- guarantee-{statement.guarantee}", "---", "", f"# {model.name}", ""]
    lines += [f"{kind}, trained with dpx (train={model.trained}).", "", "## Usage", "", "```python", *_usage(model), "```", ""]
    lines += ["## Privacy", "", f"guarantee: **{statement.guarantee}**{received.said(checked_by)}", ""]
    if isinstance(statement, PlainStatement):
        lines += [f"- steps: {statement.steps}", ""]
    else:
        lines += [f"- epsilon {value:.4g} at delta {statement.delta:.3g} ({name})" for name, value in statement.epsilon.items() if value]
        names = ["unit", "adjacency"]
        if isinstance(statement, RunStatement):
            names = ["unit", "rows_per_unit_max", "adjacency", "declared_size", "steps"]
            if statement.audit is not None:
                verdict = statement.audit.verdict
                lines += [f"- audit: {verdict} (the audit of this run {VERDICTS[verdict]})"]
        lines += [*(f"- {name}: {json.dumps(getattr(statement, name))}" for name in names), ""]
    lines += _listed("Reasons", statement.reasons)
    begins_from = () if isinstance(statement, StudyStatement) else statement.init.origins
    by_kind = {kind: [in_words(one) for one in begins_from if one.kind == kind] for kind in OWED}
    lines += _listed("Began from", [*by_kind["run"], *by_kind["file"]] or ["random parameters"])
    lines += _listed("Vocabulary", by_kind["text"])
    lines += _listed("Settings were chosen by", by_kind["table"])
    lines += _listed("Assumed", () if isinstance(statement, PlainStatement) else statement.assumptions)
    lines += _listed("Not covered", statement.not_covered)
    unsupported = () if isinstance(statement, PlainStatement) else statement.unsupported
    named = [(heading(one.name, statement.guarantee), "infinite" if one.value is None else f"{one.value:.4g}", one) for one in unsupported]
    lines += _listed("Numbers that dpx has not proved", [f"{name}: {value} ({one.reason})" for name, value, one in named])
    lines += _listed("What training changed", [*changed, _NOT_HERE] if changed else ())
    lines += _listed("Written again by the export", anew)
    lines += ["## How it was made", "", "The whole config is `dpx_config.yaml`, the whole statement `privacy.json`."]
    lines += ["Paths are shortened to their last names. Trained and exported by", ""]
    return "\n".join([*lines, "```bash", *([training] if training else []), exporting, "```", ""])


def training_command(private: Path) -> str | None:
    """Returns the command that started the run, from Hydra's files in its private tree; `None` without them.

    A path of the machine is replaced by its last name, as in the released config.
    """
    try:
        overrides = yaml.safe_load((private / "hydra" / "overrides.yaml").read_text())
    except (OSError, yaml.YAMLError):
        return None
    if not isinstance(overrides, list):
        return None
    words = []
    for override in map(str, overrides):
        key, is_set, value = override.partition("=")
        parts = [str(told(part.strip("'\" "))) if "/" in part or "\\" in part else part for part in value.strip("[]").split(",")]
        opened, closed = value[: len(value) - len(value.lstrip("["))], value[len(value.rstrip("]")) :]
        words.append(f"{key}={opened}{','.join(parts)}{closed}" if is_set else override)
    return shlex.join(["python", "-m", "dpx", *words])


def _usage(model: Model) -> list[str]:
    """Returns Python that loads the model, in the folder that holds it."""
    tag = _TAGS.get(type(model.task), "")
    outputs = model.task.pooled_outputs
    if model.base is not None:
        # A class for labels has two without it; one for choices has always one output.
        labels = f", num_labels={outputs}" if outputs and not isinstance(model.task, MultipleChoice) else ""
        loaded = f'PeftModel.from_pretrained({model.architecture}.from_pretrained({json.dumps(model.base)}{labels}), ".")'
        imports = ["from peft import PeftModel", f"from transformers import AutoTokenizer, {model.architecture}"]
    elif tag in _EXAMPLES:
        # Longer texts would be refused by the model's positions, or be read at another length than it was trained at.
        cut = ", truncation=True" if tag == "text-classification" else ""
        return ["from transformers import pipeline", "", f'print(pipeline("{tag}", model=".")("{_EXAMPLES[tag]}"{cut}))']
    else:
        loaded = f'{model.architecture}.from_pretrained(".")'
        imports = [f"from transformers import AutoTokenizer, {model.architecture}"]
    return [*imports, "", f"model = {loaded}", 'tokenizer = AutoTokenizer.from_pretrained(".")']


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    # A line may name a file or a setting of somebody else: it is one line, in which no tag begins.
    plain = [re.sub(r"<(?=[\w/!?])", "&lt;", " ".join(line.split())) for line in lines]
    return ["", f"## {title}", "", *(f"- {line}" for line in plain), ""] if lines else []
