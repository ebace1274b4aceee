"""Generates a corpus from a known Markov chain of words, whose best possible masked-word loss can be computed, and labelled texts of its
words.

The labelled texts are the smallest data that a classifier can be trained and measured on.

Extracts English paragraphs from docstrings, reStructuredText and Markdown; code, tables, signatures and marks are removed.

Every rule looks at one text alone, so the result for a document depends on that document alone.

Shape legend: S states (words), W words of one text.
"""

import hashlib
import inspect
import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from dpx.data.declared_data import Synthetic, SyntheticLabels
from dpx.data.documents import Document, Example

WORDS_PER_SENTENCE = 12
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
_STEPS = ((1, 0.55), (2, 0.25), (5, 0.15), (7, 0.05))  # step 1 visits every state; 1 and 2 together rule out a period


class SyntheticSource:
    """Yields documents of a stationary chain; each is drawn from its number, so none depends on how many there are."""

    def __init__(self, declared: Synthetic):
        self._declared = declared
        self._words = words(declared.states, declared.seed)
        self._cumulative_SS = np.cumsum(transition(declared), axis=1)

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self._declared), sort_keys=True).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        for number in range(self._declared.documents):
            states = self._walk(random.Random(f"document {self._declared.seed} {number}"))
            sentences = [states[start : start + WORDS_PER_SENTENCE] for start in range(0, len(states), WORDS_PER_SENTENCE)]
            paragraphs = tuple(" ".join(self._words[state] for state in sentence) for sentence in sentences)
            yield Document(paragraphs=paragraphs, unit_id=f"synthetic/{number}")

    def _walk(self, draws: random.Random) -> list[int]:
        states = [int(draws.random() * self._declared.states)]  # the stationary distribution is uniform: see `transition`
        for _ in range(self._declared.words_per_document - 1):
            row_S = self._cumulative_SS[states[-1]]
            states.append(min(int(np.searchsorted(row_S, draws.random(), side="right")), self._declared.states - 1))
        return states


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
    stationary_S = _stationary(chain_SS)
    return 2 * _conditional_entropy(stationary_S, chain_SS) - _conditional_entropy(stationary_S, chain_SS @ chain_SS)


def _stationary(chain_SS: np.ndarray) -> np.ndarray:
    size = len(chain_SS)
    equations = np.vstack([chain_SS.T - np.eye(size), np.ones(size)])
    return np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0), rcond=None)[0]


def _conditional_entropy(weights_S: np.ndarray, chain_SS: np.ndarray) -> float:
    logs_SS = np.log(chain_SS, out=np.zeros_like(chain_SS), where=chain_SS > 0)
    return float(-(weights_S @ (chain_SS * logs_SS).sum(axis=1)))


class SyntheticLabelsSource:
    """Yields labelled examples; each is drawn from its number, so none depends on how many there are."""

    def __init__(self, declared: SyntheticLabels):
        self._declared = declared
        self._words = words(declared.states, declared.seed)

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self._declared), sort_keys=True, default=list).encode()).hexdigest()

    def documents(self) -> Iterator[Example]:
        for number in range(self._declared.examples):
            draws = random.Random(f"example {self._declared.seed} {number}")
            label = int(draws.random() * len(self._declared.labels))
            yield Example(texts=((self._text(label, draws),),), label=label, unit_id=f"synthetic/{number}")

    def _text(self, label: int, draws: random.Random) -> str:
        declared = self._declared
        own = self._words[label :: len(declared.labels)]
        count = declared.shortest + int(draws.random() * (declared.longest - declared.shortest + 1))
        return " ".join(_one(own if draws.random() < 0.5 else self._words, draws) for _ in range(count))


def _one(of: list[str], draws: random.Random) -> str:
    return of[int(draws.random() * len(of))]


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
    paragraphs = (_without_marks(" ".join(lines)) for lines in _paragraph_lines(inspect.cleandoc(text).split("\n")))
    return [paragraph for paragraph in paragraphs if is_english(paragraph)]


def _without_marks(paragraph: str) -> str:
    if _MAY_HOLD_MARKS.search(paragraph):
        for pattern, replacement in _INLINE:
            paragraph = pattern.sub(replacement, paragraph)
    return " ".join(paragraph.split())


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
        dropped = in_fence or in_doctest or block_indent is not None or not line.strip() or _is_furniture(line)
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
        yield _without_label(line, directive)


def _is_furniture(line: str) -> bool:
    return any(pattern.match(line) for pattern in _FURNITURE)


def _without_label(line: str, directive: re.Match[str] | None) -> str:
    if directive:
        return "\0" + re.sub(r"^[\d.]+\s*$", "", directive[2])
    item = _ITEM.match(line)
    if item:
        line = line[item.end() :]
    field = _GOOGLE_FIELD.match(line)
    if field and field.end() < len(line) and line[: field.end()].strip(" :").lower() not in _FUNCTION_WORDS:
        line = field[1] + line[field.end() :]
        return "\0" + line
    return "\0" + line if item else line
