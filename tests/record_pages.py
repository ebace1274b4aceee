"""The JSON Schemas of `privacy.json`, `plan.json`, `chain.json` and `dpx_manifest.json`, and the page of their fields, made from the
records.

`python -m tests.record_pages` writes them into `dpx/docs/`; a test makes them again and compares.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import dpx
from dpx.files.records import TAG, ordered
from dpx.job import run_plan
from dpx.statement import chain_seal, seals, statement_records
from tests import config_page

DOCS = Path(dpx.__file__).parent / "docs"
FILES: dict[str, Any] = {"privacy": statement_records.Statement, "plan": run_plan.PlanDocument, "chain": chain_seal.ChainStatement}
FILES |= {"dpx_manifest": seals.ReleaseManifest}
INTRODUCTION = """# The fields of privacy.json, plan.json, chain.json and dpx_manifest.json

Made from the records in the code by `python -m tests.record_pages`; not edited by hand. The same fields as JSON Schemas:
[schemas/privacy.schema.json](schemas/privacy.schema.json), [schemas/plan.schema.json](schemas/plan.schema.json),
[schemas/chain.schema.json](schemas/chain.schema.json) and [schemas/dpx_manifest.schema.json](schemas/dpx_manifest.schema.json). A file is
one of the records that its section lists first, told apart by `kind`; every field is written, and a field that is not listed is refused.
"""


def schema(name: str) -> str:
    """The JSON Schema of what a writer writes into `<name>.json`, as text."""
    made = TypeAdapter(FILES[name]).json_schema(mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"{name}.json"}
    return json.dumps(head | made, indent=1, sort_keys=True) + "\n"


def page() -> str:
    """The page of all fields, as Markdown."""
    lines, told = [INTRODUCTION], set[type]()
    for name, union in FILES.items():
        kinds = _kinds(union)
        one_of = "One of " if len(kinds) > 1 else ""
        lines.append(f"## {name}.json\n\n{one_of}{', '.join(f'[{kind.__name__}](#{kind.__name__.lower()})' for kind in kinds)}.\n")
        waiting = list(kinds)
        while waiting:
            kind = waiting.pop(0)
            if kind not in told:
                told.add(kind)
                lines.append(_section(kind))
                waiting += [found for field in ordered(kind) for found in _records(typing.get_type_hints(kind)[field.name])]
    return "\n".join(lines)


def _section(kind: type) -> str:
    hints, rows = typing.get_type_hints(kind), []
    for field in ordered(kind):
        sentence = field.metadata.get("description") or f"Always `{field.default}`."
        rows.append(f"| `{field.name}` | {_named(hints[field.name])} | {sentence} |")
    assert kind.__doc__ is not None
    head = [f"### {kind.__name__}\n", kind.__doc__.strip().partition("\n")[0] + "\n", "| field | type | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _records(hint: Any) -> Iterator[type]:
    """The records in a type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for part in typing.get_args(hint):
        yield from _records(part)


def _kinds(union: Any) -> tuple[type, ...]:
    """The records of a union, or the record itself."""
    return typing.get_args(union) or (union,)


_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null", Any: "any"}


def _named(hint: Any) -> str:
    """Returns a type as text, with links to records."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_named, parts))
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is dict:
        return "object" if parts[1] is Any else f"object of {_named(parts[1])}"
    if origin is tuple:
        return f"list of {_named(parts[0])}" if parts[-1] is Ellipsis else f"[{', '.join(map(_named, parts))}]"
    return _NAMES[hint]


def untold() -> list[str]:
    """Fields without a sentence."""
    reached = {kind for union in FILES.values() for kind in _reached(_kinds(union))}
    fields = [(kind, field) for kind in reached for field in dataclasses.fields(kind)]
    return [f"{kind.__name__}.{field.name}" for kind, field in fields if field.name != TAG and not field.metadata.get("description")]


def _reached(kinds: tuple[type, ...]) -> set[type]:
    found, waiting = set[type](), list(kinds)
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting += [other for hint in typing.get_type_hints(kind).values() for other in _records(hint)]
    return found


def contents() -> dict[Path, str]:
    """Each file with its content."""
    made = {DOCS / "schemas" / f"{name}.schema.json": schema(name) for name in FILES}
    return made | {DOCS / "records.md": page(), DOCS / "config.md": config_page.page()}


if __name__ == "__main__":
    for path, text in contents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
