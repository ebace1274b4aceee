"""Counts how the lines of code of `dpx/` changed, by the kind of commit: code, without docstrings, comments and blank lines.

python experiments/benchmarks/code_lines.py <first commit> [<kind>]

Prints, for each type of a conventional commit after the first, the number of commits and the sum of their changes; with a kind
(`refactor`), each of its commits.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from functools import cache

IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


@cache
def code_lines(blob: str) -> int:
    """The lines of code of one version of a file; zeros name no version."""
    if set(blob) == {"0"}:
        return 0
    source = git("cat-file", "-p", blob)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IGNORED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def change(commit: str) -> int:
    files = [line.split("\t") for line in git("diff-tree", "-r", "--no-renames", f"{commit}^", commit, "--", "dpx").splitlines()]
    versions = [about.split()[2:4] for about, path in files if path.endswith(".py")]
    return sum(code_lines(new) - code_lines(old) for old, new in versions)


def main(first: str, shown: str = "") -> None:
    changes: dict[str, list[int]] = defaultdict(list)
    for line in git("log", "--reverse", "--no-merges", "--format=%H %s", f"{first}..HEAD").splitlines():
        commit, _, subject = line.partition(" ")
        kind = re.match(r"\w+", subject)
        changes[kind.group() if kind else ""].append(change(commit))
        if kind and kind.group() == shown:
            print(f"{changes[shown][-1]:+6d}  {commit[:8]}  {subject}")
    for name, values in sorted(changes.items()):
        print(f"{name:12s} {len(values):4d} commits {sum(values):+6d}")


if __name__ == "__main__":
    main(*sys.argv[1:])
