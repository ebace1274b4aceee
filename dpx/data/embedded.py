"""Reads the embedded corpus: documentation of Python's standard library and of this project's installed dependencies.

Source files are parsed, never imported. One document is one file; its unit is `<distribution>/<path>`. Its text depends on the installed
versions alone, so the fingerprint is the list of versions.
"""

import ast
import contextlib
import gc
import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterator
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dpx.data.documents import Document
from dpx.data.synthetic import prose

# The dependencies that this project needs to run; extras are left out so that a developer and a user have the same text.
DEPENDENCIES = (
    "beartype", "dp-accounting", "flax", "hydra-core", "jax", "jaxtyping", "markdown-it-py", "numpy", "omegaconf", "optax",
    "orbax-checkpoint", "packaging", "rich", "safetensors", "scipy", "tensorboard", "tensorboardX", "tokenizers",
)  # fmt: skip
# Vendored packages are copies, often several of one file: held-out text must not be a copy of protected text.
_SKIPPED_FOLDERS = frozenset(
    "test tests testing testdata idle_test site-packages dist-packages lib2to3 __pycache__ licenses _vendor _vendored vendored".split()
)
_SKIPPED_NAMES = re.compile(r"(licen[cs]e|copying|notice|authors|requirements|top_level|entry_points|sources|.*(_pb2|_gen|_test)\.)", re.I)
_HOLDERS = (ast.stmt, ast.ExceptHandler, ast.Constant, ast.Call, ast.Dict, ast.List, ast.Tuple)
_LONG_TEXT = 200  # characters; a string this long that is not a docstring may still be documentation held in a constant


class EmbeddedSource:
    """Yields the documents of the embedded corpus in the order of their unit ids; they are read once and kept in memory (about 10 MB)."""

    def fingerprint(self) -> str:
        """Returns a hash of the versions of Python and of every distribution that is read."""
        versions = [f"python=={platform.python_version()}"]
        versions += [f"{name}=={distribution.version}" for name, distribution in sorted(closure(DEPENDENCIES).items())]
        return hashlib.sha256("\n".join(versions).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        return iter(self._documents)

    @cached_property
    def _documents(self) -> list[Document]:
        files = [*_standard_library(), *_dependencies()]
        documents = (Document(paragraphs=_paragraphs(path), unit_id=unit_id) for unit_id, path in sorted(files))
        with _no_collections():
            return [document for document in documents if document.paragraphs]


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Disables the garbage collector: a syntax tree is freed with its last reference, and a search for cycles takes a quarter of the
    time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def closure(roots: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Returns the installed distributions reachable from `roots` through requirements without extras, by canonical name."""
    distributions: dict[str, metadata.Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in distributions:
            continue
        try:
            distributions[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        requirements = map(Requirement, distributions[name].requires or [])
        waiting += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return distributions


def _standard_library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _is_documentation(relative):
            yield f"python/{relative.as_posix()}", path


def _dependencies() -> Iterator[tuple[str, Path]]:
    for name, distribution in closure(DEPENDENCIES).items():
        for file in distribution.files or []:
            relative = Path(file)
            if ".." not in relative.parts and _is_documentation(relative):
                yield f"{name}/{relative.as_posix()}", Path(str(distribution.locate_file(file)))


def _is_documentation(relative: Path) -> bool:
    if _SKIPPED_FOLDERS.intersection(relative.parts) or _SKIPPED_NAMES.match(relative.name):
        return False
    return relative.suffix in {".py", ".pyi", ".rst", ".md", ".txt"} or relative.name == "METADATA"


def _paragraphs(path: Path) -> tuple[str, ...]:
    """Returns the English paragraphs of one file, each once.

    A paragraph is dropped only if it repeats one of the same document. If it were dropped because another document has it, the deletion of
    that document would bring it back, and one unit's rows would depend on another unit.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ()
    if path.suffix in {".py", ".pyi"}:
        may_hold_text = '"""' in text or "'''" in text or "pydoc_data" in path.parts  # the language reference, quoted line by line
        texts = _documentation_strings(text) if may_hold_text else []
    else:
        texts = [text.partition("\n\n")[2] if path.name == "METADATA" else text]
    return tuple(dict.fromkeys(paragraph for one in texts for paragraph in prose(one)))


def _documentation_strings(source: str) -> list[str]:
    """Returns docstrings, and long texts held in constants, of a Python source in their order."""
    try:
        waiting: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError):
        return []
    texts: dict[tuple[int, str], None] = {}
    while waiting:
        node = waiting.pop()
        for child in _children_that_may_hold_text(node):
            if not isinstance(child, ast.Constant):
                waiting.append(child)
            elif isinstance(child.value, str) and (isinstance(node, ast.Expr) or _is_long_text(child.value)):
                texts[child.lineno, child.value] = None
    return [text for _, text in sorted(texts, key=lambda one: one[0])]


def _children_that_may_hold_text(node: ast.AST) -> Iterator[ast.AST]:
    """Returns the statements below `node`, and the constants that it assigns, lists or passes on.

    A walk over every expression takes ten times longer.
    """
    for field in _fields_that_may_hold_text(type(node)):
        child = getattr(node, field, None)
        if isinstance(child, list):
            yield from (one for one in child if isinstance(one, _HOLDERS))
        elif isinstance(child, _HOLDERS):
            yield child


@cache
def _fields_that_may_hold_text(kind: type[ast.AST]) -> tuple[str, ...]:
    return tuple(name for name in ("body", "orelse", "handlers", "finalbody", "value", "args", "values", "elts") if name in kind._fields)


def _is_long_text(text: str) -> bool:
    return len(text) >= _LONG_TEXT and text.count("\n") >= 2
