"""Where cosmic-ray's operators apply in a source file, less the places on which no behaviour hangs, and a seeded choice of them.

Left out are annotations, type aliases, docstrings, messages, decorators, imports and `__repr__`.
"""

import ast
import dataclasses
import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from .mutants import ROOT

# These need arguments, or act on what is left out.
WITHOUT_USE = ("NoOp", "RemoveDecorator", "VariableReplacer", "VariableInserter")

Place = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th place where `operator` applies in `file`: line `line` reads `new` instead of `old`."""

    file: str
    line: int
    operator: str
    occurrence: int
    old: str
    new: str

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What stays when lines move."""
        return self.file, self.operator, self.old, self.new


def without_behaviour(tree: ast.Module) -> Iterator[ast.AST]:
    """The parts of a module whose text changes nothing that a test of behaviour could see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from node.decorator_list
            if isinstance(node, ast.FunctionDef):
                yield from [node] if node.name == "__repr__" else [node.returns] if node.returns else []
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("require", "ConfigError"):
            yield from node.args[1:] if ast.unparse(node.func) == "require" else node.args
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from node.exc.args
        elif isinstance(node, ast.Assert) and node.msg:
            yield node.msg
    yield from (node for node in tree.body if isinstance(node, ast.Assign) and _is_alias(node.value))


def spans_without_behaviour(source: str) -> list[tuple[Place, Place]]:
    """(start, end) of those parts, each a (line, column)."""
    parts: list[Any] = list(without_behaviour(ast.parse(source)))
    return [((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)) for part in parts]


def _is_alias(value: ast.expr) -> bool:
    """Whether a module's assignment names a type: `Runs = list[dict[str, Any]]`, `Sampler = Poisson | FixedSize`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return all(_is_alias(side) or ast.unparse(side)[0].isalpha() for side in (value.left, value.right))
    return isinstance(value, ast.Subscript) and ast.unparse(value.value) in ("dict", "list", "tuple", "Literal", "Callable")


def is_within(place: Place, spans: list[tuple[Place, Place]]) -> bool:
    """Whether (line, column) lies in one of the (start, end) spans."""
    return any(start <= place < end for start, end in spans)


def sites(file: str, source: str) -> dict[Place, list[tuple[str, int]]]:
    """At each place of a file where something can be mutated: (operator, occurrence) of all that apply."""
    plugins, trees = _cosmic_ray("plugins"), _cosmic_ray("ast")
    assert source.isascii(), f"{file}: columns are counted in bytes by one parser and in characters by the other"
    spans = spans_without_behaviour(source)
    found: dict[Place, list[tuple[str, int]]] = {}
    nodes = list(trees.ast_nodes(trees.get_ast(source)))
    for name in sorted(plugins.operator_names()):
        if name.rpartition("/")[2] in WITHOUT_USE:
            continue
        operator = plugins.get_operator(name)()
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(places):
            if not is_within(place, spans):
                found.setdefault(place, []).append((name, occurrence))
    return found


def _cosmic_ray(module: str):
    try:
        return importlib.import_module(f"cosmic_ray.{module}")
    except ImportError:
        sys.exit("cosmic-ray is not installed here: see python -m tests.audit.mutation_score --help for an environment that has it")


def mutated(source: str, operator: str, occurrence: int) -> str | None:
    """The source under one mutation, or nothing where it does not parse or means the same."""
    text = _cosmic_ray("mutating").mutate_code(source, _cosmic_ray("plugins").get_operator(operator)(), occurrence)
    try:
        return text if text and ast.dump(ast.parse(text)) != ast.dump(ast.parse(source)) else None
    except SyntaxError:
        return None


def chosen(patterns: tuple[str, ...], count: int, seed: int) -> tuple[list[Mutant], int]:
    """`count` mutants of the files, and how many places they have: each once in a drawn order, then again under other operators."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern))}
    generator, found = random.Random(seed), []
    places = [(file, generator.sample(all_, len(all_))) for file, text in sources.items() for _, all_ in sorted(sites(file, text).items())]
    generator.shuffle(places)
    while len(found) < count and any(choices for _, choices in places):
        for file, choices in places:
            mutant = _next(file, sources[file], choices)
            found += [mutant] if mutant else []
            if len(found) == count:
                break
    return found, len(places)


def moved(mutant: Mutant, patterns: tuple[str, ...]) -> Mutant | None:
    """The same edit of the same line where it stands today in files of `patterns`; nothing where that line is gone."""
    for path in (path for pattern in patterns for path in sorted(ROOT.glob(pattern))):
        source, file = path.read_text(), path.relative_to(ROOT).as_posix()
        if mutant.old not in map(str.strip, source.splitlines()):
            continue
        for operator, occurrence in (choice for choices in sites(file, source).values() for choice in choices):
            if operator.rpartition("/")[2] == mutant.operator and (text := mutated(source, operator, occurrence)):
                today = _described(file, source, text, operator, occurrence)
                if (today.old, today.new) == (mutant.old, mutant.new):
                    return today
    return None


def _next(file: str, source: str, choices: list[tuple[str, int]]) -> Mutant | None:
    """The first of `choices` that makes another program; it and those before it are taken off."""
    while choices:
        operator, occurrence = choices.pop()
        text = mutated(source, operator, occurrence)
        if text is not None:
            return _described(file, source, text, operator, occurrence)
    return None


def _described(file: str, source: str, text: str, operator: str, occurrence: int) -> Mutant:
    old, new = source.splitlines(), text.splitlines()
    line = next(number for number, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return Mutant(file, line + 1, operator.rpartition("/")[2], occurrence, old[line].strip(), new[line].strip())
