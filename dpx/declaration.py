"""The common behaviour of declarations: frozen, keyword-only, type-checked, with errors that give value, reason and fix.

Nothing here (or in any declaration) imports jax: a config is checked before an array can be allocated.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, dataclass_transform

from beartype import BeartypeConf, beartype

Cls = TypeVar("Cls", bound=type)

_MARK = "__declaration__"

# YAML writes `1` where a float is meant; the numeric tower accepts it.
_CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))


class ConfigError(ValueError):
    """A value that is not valid; the message is `<value>: <reason>. <fix>` on one line."""

    def __init__(self, value: Any, reason: str, fix: str):
        self.value, self.reason, self.fix = value, reason, fix
        end = "" if fix.endswith(("?", ".")) else "."
        super().__init__(" ".join(f"{value}: {reason.rstrip('.')}. {fix}{end}".split()))


@dataclass_transform(frozen_default=True, kw_only_default=True)
def declaration(cls: Cls) -> Cls:
    """Makes `cls` a frozen, keyword-only dataclass whose constructor checks its annotations."""
    declared = _CHECK(dataclasses.dataclass(frozen=True, kw_only=True)(cls))
    setattr(declared, _MARK, declared)
    return declared


def is_declaration(value: Any) -> bool:
    """Whether `value` is a class that `declaration` made; a subclass of one has to be made so itself."""
    return isinstance(value, type) and vars(value).get(_MARK) is value


def several(names: Sequence[str], most: int = 3) -> str:
    """The first `most` of `names` for a message, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def require(condition: bool, value: Any, reason: str, fix: str) -> None:
    """Raises `ConfigError` unless `condition`."""
    if not condition:
        raise ConfigError(value, reason, fix)
