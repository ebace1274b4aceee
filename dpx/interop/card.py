"""Writes the model card of exported weights: the run's guarantee and its limits, its initial weights, its search, and its settings.

It is made from the run's statement alone: it contains no figure that was measured on protected text.
"""

import json
from collections.abc import Sequence

from dpx.claim.document import PlainStatement, RunStatement, Statement, StudyStatement
from dpx.privacy.origins import VERDICTS, in_words


def card(
    statement: Statement, *, name: str, architecture: str, trained: str, command: str, outputs: int = 0, base: str | None = None
) -> str:
    """Returns Markdown, with the front matter that model hubs read.

    For adapters, `base` names the model that they belong to; `outputs` is the number of outputs of their head.
    """
    guarantee = statement.guarantee
    library = ["library_name: transformers"] if base is None else ["library_name: peft", f"base_model: {json.dumps(base)}"]
    lines = ["---", *library, "tags:", "- differential-privacy", f"- guarantee-{guarantee}", "---", "", f"# {name}", ""]
    kind = f"A {architecture}" if base is None else f"Adapters of `{base}` as a {architecture}"
    lines += [f"{kind}, trained with dpx (train={trained}).", "", *(_loading(architecture, outputs, base) if base else [])]
    lines += ["## Privacy", "", f"guarantee: **{guarantee}**", ""]
    lines += _claim(statement)
    lines += _listed("Reasons", statement.reasons)
    begins_from = () if isinstance(statement, StudyStatement) else statement.init.origins
    lines += _listed("Began from", [in_words(origin) for origin in begins_from] or ["random parameters"])
    lines += _listed("Assumed", () if isinstance(statement, PlainStatement) else statement.assumptions)
    lines += _listed("Not covered", statement.not_covered)
    unsupported = () if isinstance(statement, PlainStatement) else statement.unsupported
    lines += _listed("Not bounds for this run", [f"{one.name} = {one.value}: {one.reason}" for one in unsupported])
    lines += ["## How it was made", "", "The whole config is `dpx_config.yaml`, the whole statement `privacy.json`. Exported by", ""]
    return "\n".join([*lines, "```bash", command, "```", ""])


def _loading(architecture: str, outputs: int, base: str) -> list[str]:
    labels = f", num_labels={outputs}" if outputs > 1 else ""
    loaded = f"PeftModel.from_pretrained({architecture}.from_pretrained({base!r}{labels}), folder)"
    return ["```python", "from peft import PeftModel", f"from transformers import {architecture}", "", f"model = {loaded}", "```", ""]


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
    return ["", f"## {title}", "", *(f"- {line}" for line in lines), ""] if lines else []
