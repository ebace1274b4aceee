"""Extracts English paragraphs from docstrings, reStructuredText and Markdown; code, tables, signatures and marks are removed.

Every rule looks at one text alone, so the result for a document depends on that document alone.
"""

import inspect
import re
from collections.abc import Iterator

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
