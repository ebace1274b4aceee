"""Defines records: frozen dataclasses that are stored as JSON or passed from one package of the code to another.

Only `to_json` writes a record, and only `from_json` reads it. A field is declared once, with its type and a sentence that describes its
content; the JSON Schemas and the page of fields (`dpx/docs/records.md`) are made from these. The reader refuses an undeclared field, a
value of another type and a missing field without a default, so no other code tests whether a field is there. If a value is one of several
records, each record has a field `kind` with a different constant, and the reader chooses by that alone.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, dataclass_transform

from dpx.declaration import ConfigError, declaration

Cls = TypeVar("Cls", bound=type)
Made = TypeVar("Made")

FIX = "Restore the file, or use the version of dpx that wrote it"
# The field that distinguishes the records of a union.
TAG = "kind"


def described(sentence: str, *, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of a record, whose content `sentence` describes; without a `default` it is required."""
    return dataclasses.field(default=default, metadata={"description": sentence})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(described,))
def record(cls: Cls) -> Cls:
    """Makes `cls` a declaration (`dpx.declaration`) that `to_json` writes and `from_json` reads."""
    # How a JSON Schema of the record treats undeclared fields, for pydantic, which is not imported here.
    cls.__pydantic_config__ = {"extra": "forbid"}  # pyright: ignore[reportAttributeAccessIssue]
    return declaration(cls)


def to_json(value: Any) -> Any:
    """Returns `value`, a record or a value that a record may hold, as JSON: every field by name, a sequence as a list."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in ordered(type(value))}
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def ordered(kind: type) -> list[dataclasses.Field[Any]]:
    """Returns the fields of a record, its tag first."""
    return sorted(dataclasses.fields(kind), key=lambda field: field.name != TAG)


def from_json(kind: Any, node: Any, source: Any, fix: str = FIX) -> Any:
    """Returns the record of type `kind`, or of a union of records, that `to_json` wrote into `source` as `node`.

    Raises `ConfigError`, naming `source`, the field and the reason, for anything else; its last sentence is `fix`.
    """
    try:
        return _value(kind, node, "")
    except _UnreadableError as error:
        raise ConfigError(source, str(error), fix) from error


class _UnreadableError(Exception):
    def __init__(self, path: str, reason: str):
        super().__init__(f"{path or 'its content'} {reason}")


def _value(kind: Any, node: Any, path: str) -> Any:
    if kind is Any:
        return node
    if dataclasses.is_dataclass(kind):
        return _record(kind, node, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # Null, the record whose tag is in `node`, or the first other type that fits.
        if node is None and type(None) in arguments:
            return None
        others = [one for one in arguments if one is not type(None)]
        if len(others) == 1:
            return _value(others[0], node, path)
        tagged = _tagged(tuple(others))
        if tagged and isinstance(node, dict):
            named = node.get(TAG)
            chosen = tagged.get(named) if isinstance(named, str) else None
            _require(chosen is not None, node, path, f"is of the kind {named}, not {_listed(list(tagged))}")
        else:
            chosen = next((one for one in others if typing.get_origin(one) is None and _is_a(one, node)), None)
            _require(chosen is not None, node, path, "is of another type")
        return _value(chosen, node, path)
    if origin is typing.Literal:
        return _require(any(node == one and type(node) is type(one) for one in arguments), node, path, f"is not {_listed(arguments)}")
    if origin in (list, tuple):
        _require(isinstance(node, list), node, path, "is not a list")
        is_fixed = origin is tuple and arguments[-1] is not Ellipsis
        _require(not is_fixed or len(node) == len(arguments), node, path, f"has not {len(arguments)} items")
        kinds = arguments if is_fixed else [arguments[0]] * len(node)
        return origin(_value(kind, item, f"{path}[{number}]") for number, (kind, item) in enumerate(zip(kinds, node, strict=True)))
    if origin is dict:
        _require(isinstance(node, dict), node, path, "is not a JSON object")
        return {name: _value(arguments[1], item, f"{path}.{name}".lstrip(".")) for name, item in node.items()}
    _require(_is_a(kind, node), node, path, f"is not {_NAMES.get(kind, kind)}")
    return float(node) if kind is float else node


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null", dict: "a JSON object"}


def _is_a(kind: type, node: Any) -> bool:
    if kind is float:
        return isinstance(node, (int, float)) and not isinstance(node, bool)
    return isinstance(node, kind) and (kind is bool or not isinstance(node, bool))


def _record(kind: Any, node: Any, path: str) -> Any:
    _require(isinstance(node, dict), node, path, "is not a JSON object")
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in node if name not in fields]
    _require(
        not unknown,
        node,
        path,
        f"has {_several(unknown)}, unknown here, so that its cost is too",
    )
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in node]
    _require(not missing, node, path, f"has no value for {_several(missing)}")
    read = {name: _value(hints[name], item, f"{path}.{name}".lstrip(".")) for name, item in node.items()}
    try:
        return kind(**read)
    except ConfigError as error:
        raise _UnreadableError(path, f"is not valid: {error.value}: {error.reason}") from error


@functools.cache
def _tagged(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the record types among `kinds` by the constant in their field `kind`."""
    records = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    return {str(next(field.default for field in dataclasses.fields(kind) if field.name == TAG)): kind for kind in records}


_hints = functools.cache(typing.get_type_hints)


def _require(condition: bool, node: Any, path: str, reason: str) -> Any:
    if not condition:
        raise _UnreadableError(path, reason)
    return node


def _listed(names: Sequence[Any]) -> str:
    return f"one of {', '.join(map(str, names))}" if len(names) > 1 else str(names[0])


def _several(names: Sequence[str]) -> str:
    return f"the field{'s' if len(names) > 1 else ''} {', '.join(names)}"


def as_written(lines: Sequence[Any], kind: Any, where: Any) -> tuple[list[Any], list[Any]]:
    """Returns lines of a file as JSON, and as they will be read from it: its reader takes these, so that nothing is known that a kill could
    lose."""
    nodes = [to_json(line) for line in lines]
    read = [from_json(kind, json.loads(json.dumps(node)), where) for node in nodes]
    assert read == list(lines), "what is written would be read as something else"
    return nodes, read
