"""The text of `dpx --help`: what a newcomer can type, every job and option with one line, the recipes by paper, and where the pages are."""

import re
import shutil
import textwrap
from pathlib import Path

import dpx
from dpx import packages
from dpx.config import reference

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
    listed = [group for group in reference.groups() if group not in _TOLD_ELSEWHERE]
    told = reference.meanings()
    parts = [_FIRST, "== Jobs: job=<name> ==", _lines("job", width)]
    parts += ["== Groups: <group>=<option> =="]
    for group in listed:
        parts += [f"{group}: {told[group]}", _lines(group, width)]
    parts += ["== Recipes: +experiment=<name>; * also as laptop/<name>; dpx job=list says what each is ==", _recipes(width)]
    docs = Path(dpx.__file__).parent / "docs"
    return "\n".join([*parts, packages.described(), _LAST.format(docs=docs)])


def _lines(group: str, width: int) -> str:
    """Returns the options of a group, each with one sentence, the default one marked."""
    found, default = reference.options(group), reference.defaults().get(group)
    column = max(len(option.name) for option in found) + 4
    told = [f"  {one.name:<{column - 2}}{'(default) ' if one.name == default else ''}{one.meaning}" for one in found]
    lines = [textwrap.fill(line, width, subsequent_indent=" " * column) for line in told]
    return "\n".join([*lines, ""])


def _recipes(width: int) -> str:
    """Returns the names of dpx's recipes by paper; those of other packages are told by `packages.described`."""
    names = [name for name in packages.names_in("experiment") if packages.is_own("experiment", name)]
    by_paper: dict[str, list[str]] = {}
    for option in reference.options("experiment"):
        if option.name in names and not option.name.startswith("laptop/"):
            mark = "*" if f"laptop/{option.name}" in names else ""
            by_paper.setdefault(paper_of(option.meaning), []).append(option.name + mark)
    filled = [
        textwrap.fill(f"  {paper}: {', '.join(found)}", width, subsequent_indent="    ", break_on_hyphens=False)
        for paper, found in sorted(by_paper.items(), key=lambda item: (item[0] == OTHERS, item[0]))
    ]
    return "\n".join([*filled, ""])


OTHERS = "others"


def paper_of(meaning: str) -> str:
    """Returns the authors and the year with which the sentence of a recipe begins; `others` for a recipe of no paper."""
    named = re.match(r"(?:Ours, from )?([A-Z][^,:]*? (?:et al\. |and [A-Z]\w+ |Team )\d{4})", meaning)
    return named[1] if named else OTHERS
