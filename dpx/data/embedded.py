"""Text that needs no file: the embedded corpus, and text of a known Markov chain of made-up words.

The embedded corpus is the documentation of Python's standard library and of this project's installed dependencies. Source files are parsed,
never imported. One document is one file; its unit is `<distribution>/<path>`. Its text depends on the installed versions alone, so the
fingerprint is the list of versions.

English paragraphs are extracted from docstrings, reStructuredText and Markdown; code, tables, signatures and marks are removed. Every rule
looks at one text alone, so the result for a document depends on that document alone.

The best possible masked-word loss of the chain can be computed, and labelled texts of its words are the smallest data that a classifier can
be trained and measured on.

Shape legend: S states (words), W words of one text.
"""

import ast
import gc
import hashlib
import inspect
import json
import platform
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dpx.data.declared_data import Synthetic, SyntheticLabels
from dpx.data.documents import Document, Example

_FUNCTION_WORDS = frozenset(
    "a about all also an and any are as at be been but by can do does each either for from has have if in into is it its "
    "may more must no not of on only or other over same should so some such than that the their then there these they this "
    "to two until up used using was we were what when where whether which while will with without would you your".split()
)
_PLAIN_WORD = re.compile(r"""["'(\[]*[A-Za-z]+(?:['-][A-Za-z]+)*[)\]"'.,;:!?]*$""")
_CODE_MARK = re.compile(r"[=<>{}\\|@#$%^~_]|\(\)|->|\w\.\w+\(|::")
_UNDERLINE = re.compile(r"""\s*([-=~^"*+#_`:.])\1{2,}[\s\-=+|]*$""")
_DOCTEST = re.compile(r"\s*(>>>|\.\.\. |In \[\d+\]:|\$ )")
_TABLE = re.compile(r"\s*[|+]")
_FENCE = re.compile(r"\s*(```|~~~)")
_DIRECTIVE = re.compile(r"\s*\.\. ([\w-]+)::\s*(.*)$")
_TARGET = re.compile(r"\s*(\.\. (_|\[|\|)|\.\.\s*$|\[\w+\]:\s|<|!\[|\[!)")
_NUMPY_FIELD = re.compile(r"\s*[\w*.,\[\]() `'\"|-]{1,60}\s:(\s|$)")
_GOOGLE_FIELD = re.compile(r"(\s*)(?:\*{0,2}`{0,2}[\w.*]+`{0,2}\s?(?:\([^)]*\))?|:\w+[^:]*):\s+(?=\S)")
_SECTIONS = "args arguments attributes examples? notes? parameters raises references returns? see.also usage yields? warnings?"
_SECTION = re.compile(rf"\s*({_SECTIONS.replace(' ', '|')}):?\s*$", re.I)
_FURNITURE = (_UNDERLINE, _TABLE, _FENCE, _TARGET, _NUMPY_FIELD, _SECTION)
_ITEM = re.compile(r"(\s*)(?:[-*+•]|\(?\d{1,2}[.)]|\[\d+\]|#{1,6}|@)\s+")
_PROSE_DIRECTIVES = frozenset("note warning tip hint important caution seealso admonition deprecated versionchanged versionadded".split())
_INLINE = (
    (re.compile(r":[\w:.+-]+:`~?!?([^`<]+?)\s*(?:<[^`]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`]*>`_{0,2}"), r"\1"),
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"<?\b(?:https?|ftp)://\S+"), ""),
    (re.compile(r"</?[a-zA-Z][^>]*>"), ""),
    (re.compile(r"`{1,2}([^`]*)`{1,2}_{0,2}"), r"\1"),
    (re.compile(r"(?<!\w)[*|]{1,2}([^*|]+)[*|]{1,2}(?!\w)"), r"\1"),
    (re.compile(r"\s*\[[\d, ]+\]_?"), ""),
)
_MAY_HOLD_MARKS = re.compile(r"[`<*|[]|://")

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
_MAY_HOLD_TEXT = ("body", "orelse", "handlers", "finalbody", "value", "args", "values", "elts")
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
        files = list(_standard_library())
        for name, distribution in closure(DEPENDENCIES).items():
            for file in distribution.files or []:
                relative = Path(file)
                if ".." not in relative.parts and _is_documentation(relative):
                    files.append((f"{name}/{relative.as_posix()}", Path(str(distribution.locate_file(file)))))
        documents = (Document(paragraphs=_paragraphs(path), unit_id=unit_id) for unit_id, path in sorted(files))
        # A syntax tree is freed with its last reference, and a search for cycles takes a quarter of the time.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return [document for document in documents if document.paragraphs]
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
        # Of its statements, and of the constants that it assigns, lists or passes on: a walk over every expression takes ten times longer.
        held = [getattr(node, field, None) for field in _MAY_HOLD_TEXT]
        children = [child for one in held for child in (one if isinstance(one, list) else [one]) if isinstance(child, _HOLDERS)]
        for child in children:
            if not isinstance(child, ast.Constant):
                waiting.append(child)
            elif isinstance(child.value, str):
                is_long = len(child.value) >= _LONG_TEXT and child.value.count("\n") >= 2
                if isinstance(node, ast.Expr) or is_long:
                    texts[child.lineno, child.value] = None
    return [text for _, text in sorted(texts, key=lambda one: one[0])]


def is_english(paragraph: str) -> bool:
    """Returns whether `paragraph` reads as an English sentence: plain words, some of them function words, little code."""
    words = paragraph.split()
    if len(words) < 4:
        return False
    if sum(1 for word in words if _PLAIN_WORD.match(word)) < 0.7 * len(words):
        return False
    grammar = sum(1 for word in words if word.strip("\"'(),.;:").lower() in _FUNCTION_WORDS)
    return grammar >= max(1, 0.15 * len(words)) and len(_CODE_MARK.findall(paragraph)) <= 0.25 * len(words)


def prose(text: str) -> list[str]:
    """Returns the English paragraphs of one documentation text, in order, without marks."""
    paragraphs = []
    for lines in _paragraph_lines(inspect.cleandoc(text).split("\n")):
        paragraph = " ".join(lines)
        if _MAY_HOLD_MARKS.search(paragraph):
            for pattern, replacement in _INLINE:
                paragraph = pattern.sub(replacement, paragraph)
        paragraphs.append(" ".join(paragraph.split()))
    return [paragraph for paragraph in paragraphs if is_english(paragraph)]


def _paragraph_lines(lines: list[str]) -> Iterator[list[str]]:
    """Yields groups of lines that form one paragraph: a blank line, a list item, a field or another indent starts the next."""
    held: list[str] = []
    held_indent: int | None = 0  # None: the first line of an item or field, whose continuation may hang at any indent
    for line in _text_lines(lines):
        indent = len(line) - len(line.lstrip())
        if held and line.strip() and not line.startswith("\0") and held_indent in (None, indent):
            held_indent = indent
            held.append(line.strip())
            continue
        if held:
            yield held
        body = line.strip("\0 ")
        held, held_indent = ([body] if body else []), None if line.startswith("\0") else indent
    if held:
        yield held


def _text_lines(lines: list[str]) -> Iterator[str]:
    """Yields the lines that may be prose; a dropped line becomes blank, and a line that starts a new paragraph begins with NUL."""
    block_indent: int | None = None
    in_doctest = in_fence = False
    for position, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if _FENCE.match(line):
            in_fence = not in_fence
        if not line.strip():
            in_doctest = False
        elif block_indent is not None and indent <= block_indent:
            block_indent = None
        in_doctest = in_doctest or bool(_DOCTEST.match(line))
        dropped = in_fence or in_doctest or block_indent is not None or not line.strip()
        dropped = dropped or any(pattern.match(line) for pattern in _FURNITURE)
        if dropped or (position + 1 < len(lines) and _UNDERLINE.match(lines[position + 1])):
            yield ""
            continue
        directive = _DIRECTIVE.match(line)
        if directive and directive[1] not in _PROSE_DIRECTIVES:
            block_indent = indent
            yield ""
            continue
        if line.rstrip().endswith("::") and not directive:
            block_indent = indent
            line = line.rstrip()[:-1]
        if directive:
            yield "\0" + re.sub(r"^[\d.]+\s*$", "", directive[2])
            continue
        item = _ITEM.match(line)
        if item:
            line = line[item.end() :]
        field = _GOOGLE_FIELD.match(line)
        if field and field.end() < len(line) and line[: field.end()].strip(" :").lower() not in _FUNCTION_WORDS:
            yield "\0" + field[1] + line[field.end() :]
        else:
            yield "\0" + line if item else line


WORDS_PER_SENTENCE = 12
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
_STEPS = ((1, 0.55), (2, 0.25), (5, 0.15), (7, 0.05))  # step 1 visits every state; 1 and 2 together rule out a period


class _Drawn:
    """Is the base class of sources of made-up words; each record is drawn from its number, so none depends on how many there are."""

    def __init__(self, declared: Any):
        self._declared, self._words = declared, words(declared.states, declared.seed)

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self._declared), sort_keys=True, default=list).encode()).hexdigest()


class SyntheticSource(_Drawn):
    """Yields documents of a stationary chain."""

    def documents(self) -> Iterator[Document]:
        declared: Synthetic = self._declared
        cumulative_SS = np.cumsum(transition(declared), axis=1)
        for number in range(declared.documents):
            draws = random.Random(f"document {declared.seed} {number}")
            states = [int(draws.random() * declared.states)]  # the stationary distribution is uniform: see `transition`
            for _ in range(declared.words_per_document - 1):
                row_S = cumulative_SS[states[-1]]
                states.append(min(int(np.searchsorted(row_S, draws.random(), side="right")), declared.states - 1))
            sentences = [states[start : start + WORDS_PER_SENTENCE] for start in range(0, len(states), WORDS_PER_SENTENCE)]
            paragraphs = tuple(" ".join(self._words[state] for state in sentence) for sentence in sentences)
            yield Document(paragraphs=paragraphs, unit_id=f"synthetic/{number}")


def words(states: int, seed: int) -> list[str]:
    """Returns a word for each of `states`: two syllables or more, all different, in an order drawn from the seed."""
    made = [first + second for first in _SYLLABLES for second in _SYLLABLES]
    while len(made) < states:
        made += [word + syllable for word in made for syllable in _SYLLABLES]
    made = list(dict.fromkeys(made))
    random.Random(f"words {seed}").shuffle(made)
    return made[:states]


def transition(declared: Synthetic) -> np.ndarray:
    """Returns P[a, b], float64[S, S], the probability that word b follows word a.

    P is a mixture of cyclic shifts, so its columns sum to one as its rows do, and the stationary distribution is uniform.
    """
    size = declared.states
    chain_SS = np.zeros((size, size))
    for step, chance in _STEPS:
        chain_SS[np.arange(size), (np.arange(size) + step) % size] += chance
    return chain_SS


def best_masked_loss(chain_SS: np.ndarray) -> float:
    """Returns the least possible cross-entropy (nats) of a masked word whose two neighbours are visible: H(X1 | X0, X2).

    For a stationary chain H(X1 | X0, X2) = 2 H(X1 | X0) - H(X2 | X0). A model that sees fewer neighbours cannot do better.
    """
    size = len(chain_SS)
    equations = np.vstack([chain_SS.T - np.eye(size), np.ones(size)])
    stationary_S = np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0), rcond=None)[0]
    return 2 * _conditional_entropy(stationary_S, chain_SS) - _conditional_entropy(stationary_S, chain_SS @ chain_SS)


def _conditional_entropy(weights_S: np.ndarray, chain_SS: np.ndarray) -> float:
    logs_SS = np.log(chain_SS, out=np.zeros_like(chain_SS), where=chain_SS > 0)
    return float(-(weights_S @ (chain_SS * logs_SS).sum(axis=1)))


class SyntheticLabelsSource(_Drawn):
    """Yields labelled examples."""

    def documents(self) -> Iterator[Example]:
        declared: SyntheticLabels = self._declared
        for number in range(declared.examples):
            draws = random.Random(f"example {declared.seed} {number}")
            label = int(draws.random() * len(declared.labels))
            own = self._words[label :: len(declared.labels)]
            count = declared.shortest + int(draws.random() * (declared.longest - declared.shortest + 1))
            text = []
            for _ in range(count):
                among = own if draws.random() < 0.5 else self._words
                text.append(among[int(draws.random() * len(among))])
            yield Example(texts=((" ".join(text),),), label=label, unit_id=f"synthetic/{number}")
