"""Computes a checksum of the code on which a sum, its noise and its draw depend.

It covers the modules that the training step imports, without docstrings.

Comments, docstrings and formatting do not enter it, nor do modules that no module of the closure imports, such as reports and the papers'
analyses. Imports are read from the source, inside functions too, so a module counts whether or not it was imported yet.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import dpx

# The step, the loop that runs it, what a loss is made of, how rows are read and drawn, the mechanisms, and the keys.
ROOTS = (
    "dpx.training.step",
    "dpx.training.loop",
    "dpx.training.features",
    "dpx.task.objective",
    "dpx.audit.objective",
    "dpx.audit.canaries",
    "dpx.data.store",
    "dpx.sampler",
    "dpx.mechanism.declarations",
    "dpx.randomness",
)
_TOP = Path(dpx.__file__).parent.parent


def code_checksum(modules: Iterable[str] = (), top: Path = _TOP) -> str:
    """Returns the SHA-256 of the import closure of `ROOTS` and `modules`, which are names of modules in the folder `top`."""
    digest = hashlib.sha256()
    for name in sorted(closure((*ROOTS, *modules), top)):
        digest.update(f"{name} {module_at(_file(name, top), top).code}\n".encode())
    return digest.hexdigest()


def closure(roots: Iterable[str], top: Path = _TOP) -> frozenset[str]:
    """Returns the modules of dpx in `top` that `roots` import, directly or through others; a package counts as its `__init__`."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(module_at(_file(name, top), top).imports)
    return frozenset(found)


def _file(name: str, top: Path) -> Path:
    place = top.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


class Module(NamedTuple):
    """The modules of dpx that a file imports, and a checksum of the file's syntax tree without docstrings."""

    imports: tuple[str, ...]
    code: str


@functools.cache
def module_at(file: Path, top: Path) -> Module:
    """Returns the module in `file`; its imports are looked up in `top`."""
    tree = ast.parse(file.read_bytes())
    # Importing a.b.c runs the `__init__` of a and of a.b too.
    names = {part for name in _imported(tree) for part in _with_packages(name)}
    own = sorted(name for name in names if name.partition(".")[0] == dpx.__name__ and _file(name, top).is_file())
    for node in ast.walk(tree):
        has_body = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_body and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return Module(tuple(own), hashlib.sha256(ast.dump(tree).encode()).hexdigest())


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yields the names of all imported modules and of what is imported from them; no module of dpx has a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _with_packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))
