"""The model card of exported weights: what a run guarantees and does not, what it began from, what it tuned, how it was made.

It is made of the run's statement alone: no figure measured on protected text enters it.
"""

import json
from typing import Any

from dpx.privacy.origins import in_words


def card(statement: dict[str, Any], *, name: str, architecture: str, trained: str, command: str) -> str:
    """Markdown, with the front matter that model hubs read."""
    guarantee = statement["guarantee"]
    lines = ["---", "library_name: transformers", "tags:", "- differential-privacy", f"- guarantee-{guarantee}", "---", "", f"# {name}", ""]
    lines += [f"A {architecture}, trained with dpx (train={trained}).", "", "## Privacy", "", f"guarantee: **{guarantee}**", ""]
    lines += _claim(statement)
    lines += _listed("Reasons", statement.get("reasons", []))
    lines += _listed("Began from", [in_words(origin) for origin in statement.get("init", {}).get("origins", [])] or ["random parameters"])
    lines += _listed("Assumed", statement.get("assumptions", []))
    lines += _listed("Not covered", statement.get("not_covered", []))
    unsupported = [f"{one['name']} = {one['value']}: {one['reason']}" for one in statement.get("unsupported", [])]
    lines += _listed("Not bounds for this run", unsupported)
    lines += ["## How it was made", "", "The whole config is `dpx_config.yaml`, the whole statement `privacy.json`. Exported by", ""]
    return "\n".join([*lines, "```bash", command, "```", ""])


def _claim(statement: dict[str, Any]) -> list[str]:
    found = [
        f"- epsilon {value:.4g} at delta {statement['delta']:.3g} ({name})" for name, value in statement.get("epsilon", {}).items() if value
    ]
    facts = {key: statement[key] for key in ("unit", "rows_per_unit_max", "adjacency", "declared_size", "steps") if key in statement}
    return [*found, *(f"- {key}: {json.dumps(value)}" for key, value in facts.items()), ""]


def _listed(title: str, lines: list[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {line}" for line in lines), ""] if lines else []
