"""Describes every group, option and key of a config, for `--help` and the page `dpx/docs/config.md`.

Each sentence is read from the place where it is written: that of an option from the top of its file; that of a key from the section
`Attributes` of its declaration; that of a group from the same section of `dpx.config.experiment.Experiment`.

`dpx --help` shows what a newcomer can type, every job and option with one line, the recipes by paper, and where the pages are.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import dpx
from dpx import packages

# Groups and keys that a command has beside the experiment.
BESIDE_THE_EXPERIMENT = {
    "job": "What the command does; the default trains.",
    "analysis": "The computation of a paper's item that trains nothing; its recipe chooses it.",
    "experiment": "A recipe: one experiment of a paper, or yours. Written with a plus: +experiment=<name>.",
    "base": "What several recipes share; recipes name it, users do not.",
    "debug": "A preset for looking into a run; it changes the values of a recipe too.",
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
    first_sentence = re.compile(r"(?<=\.) (?=[A-Z])")
    return [Option(group, name, first_sentence.split(about(file), maxsplit=1)[0], _target(file)) for name, file in found]


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
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = "???" if default is dataclasses.MISSING else default
        value, full = node.get(field.name, default), f"{path}.{field.name}"
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
    found = []
    for field in dataclasses.fields(declared):
        hint = types_of[field.name]
        is_constant = hint is type(None) or (typing.get_origin(hint) is typing.Literal and len(typing.get_args(hint)) == 1)
        found += [field] if field.init and not is_constant else []
    return found


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


def _written(value: Any) -> str:
    """Returns a value as a command line would write it; that of a declaration by its name, and `required` for a missing one."""
    if value == "???":
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and abs(value) >= 1e6:
        return f"{value:g}"
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(list(value) if isinstance(value, tuple) else value)


# Groups that the text does not list option by option.
_TOLD_ELSEWHERE = ("job", "experiment", "base", "analysis")

_FIRST = """\
dpx trains language models with differential privacy: a config in, a model and its privacy statement out.

== First commands ==
  dpx                                               the main job: a private BERT-Tiny, about four minutes on two cores
  dpx job=plan                                      what it would cost and guarantee; nothing is trained
  dpx data=text data.source.paths=mine.jsonl.gz     the same on your own text
  dpx -m noise.epsilon=1,2,4,8                      a sweep: one run for each value
  dpx +experiment=laptop/anil_2m_batch              an experiment of a paper
  dpx job=explain run=<folder>                      what a run guarantees, as text
  dpx --cfg job                                     the composed config; --info defaults-tree says where it comes from

== Form of a command ==
  dpx [--json | --quiet] [-m] [+experiment=<recipe>] [<group>=<option> ...] [<key>=<value> ...]
  The same line again resumes a run that stopped. A run with another value has another folder.
  --json    prints one JSON object for each run instead of tables; progress stays on standard error
  --quiet   prints errors alone
"""

_LAST = """\
== Exit codes ==
  0 done    1 a defect of dpx    2 a mistake that the message corrects    130, 143 stopped by Ctrl-C or SIGTERM; the same line resumes
  75 another process of the same job was lost; the same line resumes

== More ==
  completion in bash: eval "$(dpx -sc install=bash)"
  pages: {docs} (index.md; config.md has every key with its type and its meaning)
  Hydra's flags: dpx --hydra-help
"""


def help_text() -> str:
    """Returns the text, as wide as the terminal and at most 140 columns."""
    width = min(shutil.get_terminal_size((140, 24)).columns, 140)
    listed = [group for group in groups() if group not in _TOLD_ELSEWHERE]
    told = meanings()
    parts = [_FIRST, "== Jobs: job=<name> ==", _lines("job", width)]
    parts += ["== Groups: <group>=<option> =="]
    for group in listed:
        parts += [f"{group}: {told[group]}", _lines(group, width)]
    # The recipes of other packages are told by `packages.described`.
    names = [name for name in packages.names_in("experiment") if packages.is_own("experiment", name)]
    by_paper: dict[str, list[str]] = {}
    for option in options("experiment"):
        if option.name in names and not option.name.startswith("laptop/"):
            mark = "*" if f"laptop/{option.name}" in names else ""
            by_paper.setdefault(paper_of(option.meaning), []).append(option.name + mark)
    filled = [
        textwrap.fill(f"  {paper}: {', '.join(found)}", width, subsequent_indent="    ", break_on_hyphens=False)
        for paper, found in sorted(by_paper.items(), key=lambda item: (item[0] == OTHERS, item[0]))
    ]
    parts += ["== Recipes: +experiment=<name>; * also as laptop/<name>; dpx job=list says what each is ==", *filled, ""]
    docs = Path(dpx.__file__).parent / "docs"
    return "\n".join([*parts, packages.described(), _LAST.format(docs=docs)])


def _lines(group: str, width: int) -> str:
    """Returns the options of a group, each with one sentence, the default one marked."""
    found, default = options(group), defaults().get(group)
    column = max(len(option.name) for option in found) + 4
    told = [f"  {one.name:<{column - 2}}{'(default) ' if one.name == default else ''}{one.meaning}" for one in found]
    lines = [textwrap.fill(line, width, subsequent_indent=" " * column) for line in told]
    return "\n".join([*lines, ""])


OTHERS = "others"


def paper_of(meaning: str) -> str:
    """Returns the authors and the year with which the sentence of a recipe begins; `others` for a recipe of no paper."""
    named = re.match(r"(?:Ours, from )?([A-Z][^,:]*? (?:et al\. |and [A-Z]\w+ |Team )\d{4})", meaning)
    return named[1] if named else OTHERS
