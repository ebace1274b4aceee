"""Edits of source that find what they change by its symbol and its tokens: layout, comments and the rest of the file may change."""

import ast
import io
import tokenize
from collections.abc import Iterator

# What formatting alone decides on.
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)


def edited(source: str, symbol: str, old: str, new: str) -> str:
    """Replaces code inside one function, class or assignment of a module.

    Args:
        source: The module.
        symbol: The qualified name of what holds the code, `Class.method` or `outer.inner`.
        old: The code, whose tokens occur once in the symbol; its brackets are balanced.
        new: The code in its place, as text. A line of which nothing is left is removed.

    Returns:
        The module with the edit.

    Raises:
        ValueError: If there is not one such symbol in the module, or not one such code in the symbol.
    """
    first, last = _lines_of(source, symbol)
    inside = [token for token in _tokens(source) if first <= token.start[0] <= last]
    wanted = [token.string for token in _tokens(old)]
    size, texts = len(wanted), [token.string for token in inside]
    places = [place for place in range(len(texts) - size + 1) if texts[place : place + size] == wanted]
    if len(places) != 1:
        raise ValueError(f"{old!r} occurs {len(places)} times in {symbol}")
    begin, end = (_offset(source, at) for at in (inside[places[0]].start, inside[places[0] + size - 1].end))
    return _replaced(source, begin, end, new)


def _lines_of(source: str, symbol: str) -> tuple[int, int]:
    found = [node for name, node in _symbols(ast.parse(source), "") if name == symbol]
    if len(found) != 1:
        raise ValueError(f"{symbol} is defined {len(found)} times")
    assert found[0].end_lineno is not None
    return found[0].lineno, found[0].end_lineno


def _symbols(node: ast.AST, within: str) -> Iterator[tuple[str, ast.stmt]]:
    """Every function, class and assigned name below `node` with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield within + child.name, child
            yield from _symbols(child, f"{within}{child.name}.")
            continue
        if isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((within + target.id, child) for target in targets if isinstance(target, ast.Name))
        yield from _symbols(child, within)


def _tokens(code: str) -> list[tokenize.TokenInfo]:
    # Dedented code at the end of a fragment is of no interest: fragments are parts of an expression or single statements.
    return [token for token in tokenize.generate_tokens(io.StringIO(code).readline) if token.type not in _LAYOUT]


def _offset(source: str, place: tuple[int, int]) -> int:
    """The position in `source` of (line from 1, column from 0)."""
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: place[0] - 1])) + place[1]


def _replaced(source: str, begin: int, end: int, new: str) -> str:
    if not new:
        start, after = source.rfind("\n", 0, begin) + 1, source.find("\n", end) + 1
        if not (source[start:begin] + source[end:after]).strip():
            return source[:start] + source[after:]
    return source[:begin] + new + source[end:]
