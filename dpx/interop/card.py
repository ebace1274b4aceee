"""Writes the model card of exported weights: usage, the run's guarantee and its limits, its initial weights, its search, and its settings.

It is made from the run's statement, its config and the released weights alone: it contains no figure that was measured on protected text,
and no path of a machine.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dpx.config.declared_init import FromCheckpoint, Init
from dpx.files.checkpoint_folder import hub_name
from dpx.files.records import to_json
from dpx.files.run_folder import told
from dpx.interop.trained_on import RELEASE, license_named_by_card
from dpx.privacy.origins import OWED, VERDICTS, in_words
from dpx.statement import received, seals
from dpx.statement.outside_code import heading
from dpx.statement.statement_records import PlainStatement, RunStatement, Statement, StudyStatement
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task

# The hub's names of tasks; the first three are those of a pipeline of transformers too.
_TAGS: dict[type, str] = {
    Classification: "text-classification",
    MaskedLanguageModel: "fill-mask",
    CausalLanguageModel: "text-generation",
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
        return Published(self.base or hub_name(init.path), self.license or license_named_by_card(init.path))


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
    lines = [*_front_matter(model, statement), f"# {model.name}", ""]
    lines += [f"{kind}, trained with dpx (train={model.trained}).", "", "## Usage", "", "```python", *_usage(model), "```", ""]
    lines += ["## Privacy", "", f"guarantee: **{statement.guarantee}**{received.said(checked_by)}", ""]
    lines += _claim(statement)
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
    return shlex.join(["python", "-m", "dpx", *(_told_override(str(one)) for one in overrides)])


def _told_override(override: str) -> str:
    key, is_set, value = override.partition("=")
    if not is_set:
        return override
    inside = value.strip("[]")
    parts = [str(told(part.strip("'\" "))) if "/" in part or "\\" in part else part for part in inside.split(",")]
    return f"{key}={value[: len(value) - len(value.lstrip('['))]}{','.join(parts)}{value[len(value.rstrip(']')) :]}"


def _front_matter(model: Model, statement: Statement) -> list[str]:
    """Returns the lines that hubs read; the licence is `unknown` if neither the user nor the checkpoint's card names one."""
    tag, base = _TAGS.get(type(model.task)), model.published.base
    return [
        "---",
        f"library_name: {'transformers' if model.base is None else 'peft'}",
        f"license: {json.dumps(model.published.license or 'unknown')}",
        *([f"base_model: {json.dumps(base)}"] if base else []),
        *([f"pipeline_tag: {tag}"] if tag else []),
        f"{RELEASE}: {json.dumps(seals.release_id(to_json(statement)))}",
        *("tags:", "- differential-privacy", f"- guarantee-{statement.guarantee}", "---", ""),
    ]


def _usage(model: Model) -> list[str]:
    """Returns Python that loads the model, in the folder that holds it."""
    tag = _TAGS.get(type(model.task), "")
    outputs = model.task.pooled_outputs
    if model.base is not None:
        labels = f", num_labels={outputs}" if outputs > 1 else ""
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


def _claim(statement: Statement) -> list[str]:
    if isinstance(statement, PlainStatement):
        return [f"- steps: {statement.steps}", ""]
    lines = [f"- epsilon {value:.4g} at delta {statement.delta:.3g} ({name})" for name, value in statement.epsilon.items() if value]
    names = ["unit", "adjacency"]
    if isinstance(statement, RunStatement):
        names = ["unit", "rows_per_unit_max", "adjacency", "declared_size", "steps"]
        if statement.audit is not None:
            verdict = statement.audit.verdict
            lines.append(f"- audit: {verdict} (the audit of this run {VERDICTS[verdict]})")
    return [*lines, *(f"- {name}: {json.dumps(getattr(statement, name))}" for name in names), ""]


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {_without_html(line)}" for line in lines), ""] if lines else []


def _without_html(line: str) -> str:
    """Returns a sentence, which may name a file or a setting of somebody else, as one line in which no tag begins."""
    return re.sub(r"<(?=[\w/!?])", "&lt;", " ".join(line.split()))
