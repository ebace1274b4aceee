"""Writes dp-accounting's events as JSON, so that epsilon can be composed again from a ledger or a statement alone."""

import json
from typing import Any

import dp_accounting
from dp_accounting import dp_event

from dpx.declaration import ConfigError
from dpx.privacy.gaussian_losses import RevealedGaussianDpEvent

# Events that dp-accounting does not have.
_OWN = {kind.__name__: kind for kind in (RevealedGaussianDpEvent,)}


def describe(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns a dp-accounting event as plain data: its class under `class`, its arguments by name."""
    named = event.to_named_tuple()
    described: dict[str, Any] = {"class": named.class_name}
    for name in named._fields:
        if name not in ("module_name", "class_name"):
            described[name] = _described(getattr(event, name))
    return described


def restore(described: dict[str, Any]) -> dp_accounting.DpEvent:
    """Returns the event that `describe` was given. Raises `ConfigError` for a class that is not an event of dp-accounting or of dpx."""
    named = str(described.get("class"))
    kind = _OWN.get(named) or getattr(dp_event, named, None)
    if not isinstance(kind, type) or not issubclass(kind, dp_accounting.DpEvent):
        raise ConfigError(
            f"event={described.get('class')}", "is not an event of dp-accounting", "Restore the file, or use the version that wrote it"
        )
    return kind(**{name: _restored(value) for name, value in described.items() if name != "class"})


def as_text(event: dp_accounting.DpEvent, adjacency: str) -> str:
    """Returns `event` and its neighbouring relation `adjacency` as text, in the form that a ledger holds."""
    return json.dumps({"adjacency": adjacency, "event": describe(event)}, sort_keys=True)


def from_text(text: str, adjacency: str) -> dp_accounting.DpEvent:
    """Returns the event that `as_text` was given. Raises `ConfigError` if it was stored with another neighbouring relation."""
    held = json.loads(text)
    if held["adjacency"] != adjacency:
        reason = f"the package defines the event in the ledger for {held['adjacency']} only"
        raise ConfigError(f"adjacency={adjacency}", reason, f"Use {held['adjacency']}")
    return restore(held["event"])


def _described(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return describe(value)
    return [_described(item) for item in value] if isinstance(value, (list, tuple)) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return restore(value)
    # dp-accounting's events are cached by their values, so the values must be hashable.
    return tuple(_restored(item) for item in value) if isinstance(value, list) else value
