"""Composes YAML, converts it to declarations, and reads the config of an existing run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpx.config.identity import resolved, run_name
    from dpx.config.instantiate import Job, build, declare, make
    from dpx.config.saved import load, place_of, read
    from dpx.config.with_hydra import register_resolvers

__all__ = ["Job", "build", "declare", "load", "make", "place_of", "read", "register_resolvers", "resolved", "run_name"]

_HOMES = {
    "identity": ("resolved", "run_name"),
    "instantiate": ("Job", "build", "declare", "make"),
    "saved": ("load", "place_of", "read"),
    "with_hydra": ("register_resolvers",),
}


def __getattr__(name: str) -> Any:
    # A typing error is answered from the YAML alone: the declarations take ten times as long to import.
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module(f"dpx.config.{home}"), name)
