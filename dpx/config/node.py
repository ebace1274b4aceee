"""Checks one node of a config against the declaration that it names: keys, required values and types, with errors in the user's terms."""

import collections.abc
import dataclasses
import re
import types
import typing
from typing import Any

from beartype import BeartypeConf
from beartype.door import is_bearable

from dpx.config import hints
from dpx.config.hints import unknown_key
from dpx.declaration import ConfigError

_TOWER = BeartypeConf(is_pep484_tower=True)
_INFINITY = re.compile(r"[+-]?\.?inf", re.IGNORECASE)


def checked_arguments(declared: type, arguments: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns `arguments` after a check that every key exists, every required key is present and every value has its type.

    If a float is expected, `1` becomes 1.0, and the texts `inf` and `.inf` become infinity.
    """
    fields = {field.name: field for field in dataclasses.fields(declared) if field.init}
    types_of = typing.get_type_hints(declared)
    checked = {}
    for key, value in arguments.items():
        full = f"{path}.{key}".lstrip(".")
        if key not in fields:
            raise unknown_key(full, fields)
        value = _with_infinities(value, types_of[key])
        if not _fits(value, types_of[key]):
            has_bool = isinstance(value, list | tuple) and any(isinstance(one, bool) for one in value)
            words = "If true or false (in a file also yes, no, on, off) is meant as a word, put it in quotation marks"
            mend = hints.of_value(full, value) or (words if has_bool else "Correct the value")
            is_number = isinstance(value, str) and re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", value) is not None
            if is_number and {int, float} & set(_parts(types_of[key])):
                reason = f"expected {type_in_words(types_of[key])}, and this is text, as from quotes or an environment variable"
                fix = f"Write {full}={value} without quotes, or {full}=$NAME, which the shell fills in"
                raise ConfigError(f"{full}='{value}'", reason, fix)
            shown = type(value).__name__ if dataclasses.is_dataclass(value) else str(value)
            raise ConfigError(f"{full}={shown}", f"expected {type_in_words(types_of[key])}", mend)
        parts = _parts(types_of[key])
        checked[key] = float(value) if type(value) is int and float in parts and int not in parts else value
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in arguments:
            raise ConfigError(f"{path}.{name}".lstrip("."), "this key has no value", f"Add {path}.{name}=...".replace(" .", " "))
    return checked


def _with_infinities(value: Any, hint: Any) -> Any:
    """Returns `value` with every infinity that was read as text converted to a number.

    YAML reads only `.inf` as a number, the command line only `inf`.
    """
    if isinstance(value, list):
        lists = (collections.abc.Sequence, list, tuple)
        of_items = next((typing.get_args(part)[0] for part in _parts(hint) if typing.get_origin(part) in lists), type(None))
        return [_with_infinities(item, of_items) for item in value]
    is_number = isinstance(value, str) and _INFINITY.fullmatch(value) and not {str, value} & set(_parts(hint))
    return float(value.replace(".", "")) if is_number and float in _parts(hint) else value


def _fits(value: Any, hint: Any) -> bool:
    # In Python True is the integer 1; in a config it is a mistake.
    if isinstance(value, bool) and bool not in _parts(hint):
        return any(isinstance(part, bool) for part in _parts(hint))
    # In Python a text is a sequence of texts; in a config it is a list with missing brackets.
    is_forgotten_bracket = isinstance(value, str) and "Sequence" in str(hint) and not {str, value} & set(_parts(hint))
    if is_forgotten_bracket or not is_bearable(value, hint, conf=_TOWER):
        return False
    # beartype itself checks only one item of a long list, another one each time.
    of_items = [typing.get_args(part)[0] for part in _parts(hint) if typing.get_origin(part) is collections.abc.Sequence]
    if not isinstance(value, list | tuple) or not of_items:
        return True
    return any(all(_fits(one, item) for one in value) for item in of_items)


def _parts(hint: Any) -> list[Any]:
    """Returns the alternatives of a union, the values of a Literal, or the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return [part for argument in typing.get_args(hint) for part in _parts(argument)]
    return [hint]


def type_in_words(hint: Any) -> str:
    """Returns a type as a user reads it: `a number or null`."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    described = []
    for part in _parts(hint):
        if typing.get_origin(part) is not None:
            is_list = typing.get_origin(part) in (collections.abc.Sequence, list, tuple)
            described.append(f"a list (each {type_in_words(typing.get_args(part)[0])})" if is_list else "a mapping")
        else:
            described.append(names.get(part) or (part.__name__ if isinstance(part, type) else str(part)))
    described = list(dict.fromkeys(described))
    if {names[int], names[float]} <= set(described):
        # `int | float` and `float | int` are equal, so that either may be what was declared.
        described.remove(names[int])
        described.insert(described.index(names[float]) + 1, names[int])
    return " or ".join(described)
