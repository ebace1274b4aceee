"""On whose word a claim rests: which parts of a declared experiment are code from outside this tree.

What dpx proves and tests is its own code. A part of any other package may draw, clip or count otherwise than it says, so that a run with
one is stated as that package's word: `guarantee` is `dp_by_<package>`, and epsilon stands under `unsupported`.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from dpx import packages

# What joins the names of several packages, here and in the ledger.
AND = "+"
BY = "dp_by_"


class Part(NamedTuple):
    """One part of an experiment: the config key where it stands, the package it is of, and its class."""

    key: str
    package: str
    kind: str


def parts(declared: Any) -> list[Part]:
    """Every part of `declared` whose class is not dpx's own."""
    return list(_parts(declared, ""))


def of(declared: Any) -> tuple[str, ...]:
    """The packages whose code `declared` rests on, by name; none where all of it is dpx's own."""
    return joined(part.package for part in parts(declared))


def joined(*names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, in alphabetical order."""
    return tuple(sorted({name for group in names for name in group}))


def of_segments(segments: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """The packages that charged steps rest on, as their ledger noted."""
    return joined(*(segment["by"].split(AND) for segment in segments if segment.get("by")))


def guarantee(is_private: bool, reasons: list[str], by: tuple[str, ...]) -> str:
    """The value of `guarantee` in a statement, a plan or a study: `not_private`, `none`, `dp_by_<packages>` or `dp`."""
    if not is_private:
        return "not_private"
    if reasons:
        return "none"
    return BY + AND.join(by) if by else "dp"


def of_guarantee(said: str) -> tuple[str, ...] | None:
    """The packages on whose word a stated guarantee stands, none for `dp`; `None` where there is no guarantee."""
    if said == "dp":
        return ()
    return tuple(said.removeprefix(BY).split(AND)) if said.startswith(BY) else None


def words(by: tuple[str, ...]) -> list[str]:
    """Why an epsilon is no bound that dpx has proved, in one sentence; empty where `by` is empty."""
    named = " and ".join(f"{name} {packages.version_of(name)}" for name in by)
    return [f"the word of {named}: code that the claim rests on, and that dpx has neither proved nor tested"] if by else []


def facts(declared: Any) -> list[dict[str, Any]]:
    """What a statement says of the packages whose code takes part: name, version, and the class at each config key."""
    outside = parts(declared)
    return [
        {"package": name, "version": packages.version_of(name), "parts": {one.key: one.kind for one in outside if one.package == name}}
        for name in joined(one.package for one in outside)
    ]


def _parts(value: Any, key: str) -> Iterator[Part]:
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _parts(item, f"{key}.{name}".lstrip("."))
        return
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _parts(item, f"{key}.{number}")
        return
    package = package_of(type(value))
    if package != packages.OWN and package not in sys.stdlib_module_names:
        yield Part(key, package, f"{type(value).__module__}.{type(value).__qualname__}")
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name), f"{key}.{field.name}".lstrip("."))


def package_of(kind: type) -> str:
    """The top-level package that `kind` is defined in; "unknown" for a class that names a module of dpx but is not found there."""
    root = kind.__module__.partition(".")[0]
    looked_up: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        looked_up = getattr(looked_up, name, None)
    return root if root != packages.OWN or looked_up is kind else "unknown"
