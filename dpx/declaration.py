"""Defines what all declarations share: they are frozen, keyword-only and type-checked, and their errors give value, reason and fix.

Nothing here (or in any declaration) imports jax: a config is checked before an array can be allocated.
"""

import dataclasses
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar, dataclass_transform

Cls = TypeVar("Cls", bound=type)

_MARK = "__declaration__"

# Metadata of a dataclass field in which infinity has a meaning; in every other number of an experiment's config it is refused.
MAY_BE_INFINITE = {"may_be_infinite": True}


class ConfigError(ValueError):
    """An invalid value that the user can correct; the message is `<value>: <reason>. <fix>` on one line.

    Args:
        value: The key and the value, as the user wrote them.
        reason: Why it is not valid.
        fix: What to do, as a command.
    """

    def __init__(self, value: Any, reason: str, fix: str):
        self.value, self.reason, self.fix = value, reason, fix
        end = "" if fix.endswith(("?", ".")) else "."
        super().__init__(" ".join(f"{value}: {reason.rstrip('.')}. {fix}{end}".split()))


@dataclass_transform(frozen_default=True, kw_only_default=True)
def declaration(cls: Cls) -> Cls:
    """Decorates a class of annotated fields: it becomes a frozen, keyword-only dataclass whose constructor checks the types.

    Args:
        cls: A class. Its `__post_init__` should refuse invalid values with `require`.

    Returns:
        The class that a `_target_` in YAML may name.
    """
    # Imported here: a command that ends before anything is declared raises only a `ConfigError`.
    from beartype import BeartypeConf, beartype

    # YAML writes `1` where a float is meant; the numeric tower accepts it.
    check = beartype(conf=BeartypeConf(is_pep484_tower=True))
    declared = check(dataclasses.dataclass(frozen=True, kw_only=True)(cls))
    setattr(declared, _MARK, declared)
    return declared


def is_declaration(value: Any) -> bool:
    """Returns whether `value` is a class with the decorator `declaration`; a subclass of a declaration needs the decorator itself."""
    return isinstance(value, type) and vars(value).get(_MARK) is value


def at_default(declared: Any) -> list[str]:
    """Returns the fields of a declaration that have their default value, as in a config that leaves them out."""
    found = []
    for field in dataclasses.fields(declared):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found += [field.name] if default == getattr(declared, field.name) else []
    return found


def identifying_values(declared: Any) -> Any:
    """Returns `declared` as plain data that identifies it: for each declaration its class and the fields that differ from their
    defaults.

    So a new field with a default does not change the result. A changed default is detected by the checksum of the code instead.
    """
    if dataclasses.is_dataclass(declared) and not isinstance(declared, type):
        left_out = at_default(declared)
        names = [field.name for field in dataclasses.fields(declared) if field.name not in left_out]
        return {"class": type(declared).__qualname__} | {name: identifying_values(getattr(declared, name)) for name in names}
    if isinstance(declared, dict):
        return {name: identifying_values(value) for name, value in declared.items()}
    if isinstance(declared, (list, tuple)):
        return [identifying_values(value) for value in declared]
    return declared


def several(names: Sequence[str], most: int = 3) -> str:
    """Returns text for a message: the first `most` of `names`, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def require(condition: bool, value: Any, reason: str, fix: str) -> None:
    """Raises `ConfigError(value, reason, fix)` unless `condition` is true."""
    if not condition:
        raise ConfigError(value, reason, fix)


def require_date(key: str, date: str | None) -> None:
    """Raises `ConfigError` unless a date is null or written as 2026-01-31."""
    value, fix = f"{key}={date}", "Write it as 2026-01-31, in quotation marks"
    require(date is None or re.fullmatch(r"\d{4}-\d\d-\d\d", date) is not None, value, "is not a date", fix)
    try:
        datetime.fromisoformat(date or "2000-01-01")
    except ValueError as error:
        raise ConfigError(value, f"is not a date ({error})", fix) from None
