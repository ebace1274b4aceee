"""What a checkpoint was trained on, as its model card and its user say, and whether a run's protected data may be among it.

A name is found in another whatever stands between its words: "sst2" in "SST-2". What no card names is not known to be absent: that
nothing of the protected data went in stays the user's word (`init.provenance`).
"""

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_HEADING = re.compile(r"^(#+)\s+(.*)$")
_LINK = re.compile(r"\[([^\]]+)\]\(")
_WORDS = re.compile(r"[a-z]+|[0-9]+")


def named_by_card(folder: Path) -> list[str]:
    """The data sets that a checkpoint's `README.md` lists: in its front matter, and as links or first cells under a heading on training
    data. Empty where there is no card."""
    card = folder / "README.md"
    if not card.is_file():
        return []
    text = card.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    return list(dict.fromkeys([*_of_front_matter(text), *_of_sections(text)]))


def _of_front_matter(text: str) -> list[str]:
    match = _FRONT.match(text)
    if match is None:
        return []
    try:
        facts = yaml.safe_load(match.group(1))
    except yaml.YAMLError:
        return []
    listed = facts.get("datasets") if isinstance(facts, dict) else None
    return [str(name) for name in ([listed] if isinstance(listed, str) else listed or [])]


def _of_sections(text: str) -> list[str]:
    named, level = [], 0
    for line in text.split("\n"):
        heading = _HEADING.match(line)
        if heading is not None and (not level or len(heading.group(1)) <= level):
            title = heading.group(2).lower()
            level = len(heading.group(1)) if "training data" in title or "trained on" in title else 0
        elif level:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            named += _LINK.findall(line) or ([cells[0]] if line.strip().startswith("|") and _WORDS.search(cells[0].lower()) else [])
    return named


def among(known_as: Iterable[str], trained_on: Iterable[str]) -> list[str]:
    """Those of `trained_on` that one of the names `known_as` is found in."""
    patterns = [_pattern(words) for name in known_as if (words := _WORDS.findall(name.lower()))]
    return [name for name in trained_on if any(pattern.search(name.lower()) for pattern in patterns)]


def _pattern(words: list[str]) -> re.Pattern[str]:
    # A version may follow a name, as in SQuAD2.0; a longer word or number is another name.
    longer = "0-9" if words[-1].isdigit() else "a-z"
    return re.compile(rf"(?<![a-z0-9]){'[^a-z0-9]*'.join(words)}(?![{longer}])")
