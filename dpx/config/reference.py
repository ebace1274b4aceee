"""Describes every group, option and key of a config, for `--help` and the page `dpx/docs/config.md`.

Each sentence is read from the place where it is written: that of an option from the top of its file; that of a key from the section
`Attributes` of its declaration; that of a group from the same section of `dpx.config.experiment.Experiment`.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dpx import packages

# Groups and keys that a command has beside the experiment.
BESIDE_THE_EXPERIMENT = {
    "job": "What the command does; the default trains.",
    "analysis": "The computation of a paper's item that trains nothing; its recipe chooses it.",
    "experiment": "A recipe: one experiment of a paper, or yours. Written with a plus: +experiment=<name>.",
    "base": "What several recipes share; recipes name it, users do not.",
    "fork": "Branches a run into a new folder: <run folder>@<step>.",
    "run": "The finished or stopped run that a job works on: its folder or its name.",
}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key that a user can set: its full path, its type as text, the value that the option gives it, and its meaning."""

    path: str
    type: str
    value: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a group with its meaning, and the declaration that it makes; empty if it makes none itself."""

    group: str
    name: str
    meaning: str
    declaration: str


def groups() -> list[str]:
    """Returns the groups of dpx, in the order of the experiment's fields, then the others."""
    folders = sorted({path.name for own in packages.own_folders() for path in own.iterdir() if path.is_dir()} - {"hydra"})
    fields = _of_the_experiment()
    return [name for name in fields if name in folders] + [name for name in folders if name not in fields]


def meanings() -> dict[str, str]:
    """Returns the meaning of every group and of every key at the root of a config."""
    return _of_the_experiment() | BESIDE_THE_EXPERIMENT


@functools.cache
def _of_the_experiment() -> dict[str, str]:
    """Returns the fields of `dpx.config.experiment.Experiment` and their meanings, from its source: importing it takes longer than
    `--help`."""
    source = Path(__file__).with_name("experiment.py").read_text()
    (declared,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Experiment"]
    return _sentences(ast.get_docstring(declared) or "")


def defaults() -> dict[str, str]:
    """Returns the option that the default config takes of each group."""
    listed = _content(packages.conf_directory() / "config.yaml")["defaults"]
    return {group: option for one in listed if isinstance(one, dict) for group, option in one.items() if option}


def default_keys() -> dict[str, Any]:
    """Returns the keys of the default config with their values as written, read from its files: to compose it takes ten times as long."""
    root = _content(packages.conf_directory() / "config.yaml")
    of_groups = {
        group: _content(packages.option_file(group, option)) for group, option in defaults().items() if not group.startswith("optional ")
    }
    return of_groups | {key: value for key, value in root.items() if key not in ("defaults", "hydra")}


def options(group: str) -> list[Option]:
    """Returns the options of a group, those of installed packages too."""
    found = [(name, packages.option_file(group, name)) for name in packages.names_in(group)]
    return [Option(group, name, first_sentence(file), _target(file)) for name, file in found]


def keys(option: Option) -> list[Key]:
    """Returns the keys of an option that a user can set, in the order of their declaration; none if it only combines other options."""
    document = _content(packages.option_file(option.group, option.name))
    node = document.get("job", document) if option.group == "job" else document
    return list(_keys(node, option.group, document)) if isinstance(node, dict) and "_target_" in node else []


def _keys(node: dict[str, Any], path: str, root: dict[str, Any]) -> Iterator[Key]:
    declared = _declared(str(node["_target_"]))
    from dpx.config.node import type_in_words

    told, types_of = attributes(declared), typing.get_type_hints(declared)
    for field in settable(declared):
        value, full = node.get(field.name, _default(field)), f"{path}.{field.name}"
        if isinstance(value, dict) and "_target_" in value:
            yield from _keys(value, full, root)
            continue
        named = re.fullmatch(r"\$\{(\w+\.\w+)\}", str(value))
        if named and named[1].partition(".")[0] in root:
            # A user sets the key in the job's own node.
            full, (group, _, name) = named[1], named[1].partition(".")
            value = root.get(group, {}).get(name, value)
        yield Key(full, type_in_words(types_of[field.name]), _written(value), told.get(field.name, ""))


def settable(declared: type) -> list[dataclasses.Field[Any]]:
    """Returns the fields of a declaration that have more than one possible value."""
    types_of = typing.get_type_hints(declared)
    return [field for field in dataclasses.fields(declared) if field.init and not _is_constant(types_of[field.name])]


def _is_constant(hint: Any) -> bool:
    return hint is type(None) or (typing.get_origin(hint) is typing.Literal and len(typing.get_args(hint)) == 1)


@functools.cache
def attributes(declared: type) -> dict[str, str]:
    """Returns by field what the section `Attributes` of the docstring says of it, or that of a base class."""
    told: dict[str, str] = {}
    for kind in reversed(declared.__mro__):
        told |= _sentences(inspect.cleandoc(vars(kind).get("__doc__") or ""))
    return told


def _sentences(docstring: str) -> dict[str, str]:
    _, _, section = docstring.partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(sentence.split()) for name, sentence in found}


def about(file: Path) -> str:
    """Returns the comment at the top of a config file, as one text."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
    block = []
    for line in lines:
        if not line.startswith("#"):
            break
        block.append(line.removeprefix("#").strip())
    return " ".join(block)


def first_sentence(file: Path) -> str:
    """Returns the first sentence of the comment at the top of a config file."""
    return re.split(r"(?<=\.) (?=[A-Z])", about(file), maxsplit=1)[0]


@functools.cache
def _content(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text()) or {}


def _target(file: Path) -> str:
    """Returns the name of what a file declares, without a parse of the whole file."""
    named = re.search(r"^(?:  )?_target_: (\S+)$", file.read_text(), re.MULTILINE)
    return named[1] if named else ""


def _declared(target: str) -> type:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return "???" if field.default_factory is dataclasses.MISSING else field.default_factory()


def _written(value: Any) -> str:
    """Returns a value as a command line would write it; that of a declaration by its name, and `required` for a missing one."""
    if value == "???":
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and abs(value) >= 1e6:
        return f"{value:g}"
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(list(value) if isinstance(value, tuple) else value)
