"""Finds the training data of a checkpoint in its model card and its user's statement, and whether it may include a run's protected data.

A name is found in another despite characters between its letters, and despite accents: "sst2" in "SST-2", "bookcorpus" in "Book Corpus". A
data set that no card names may still have been used: that no protected data was used remains the user's assertion (`init.provenance`).
"""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

# In the front matter of a card that dpx wrote: the random id of the release.
RELEASE = "dpx_release"
_FRONT = re.compile(r"\A\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
_HEADING = re.compile(r"^(#+)\s+(.*)$")
_LINK = re.compile(r"\[([^\]]+)\]\(")
_ITEM = re.compile(r"^\s*(?:[-*+]|[0-9]+[.)])\s+(.*)$")
# A key of the front matter that begins a line, and the end of the list that may follow it.
_LISTED = re.compile(r"^datasets:(.*?)(?=^[^\s\-#]|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)


def named_by_card(folder: Path) -> list[str]:
    """Returns the data sets that a checkpoint's `README.md` lists; empty without a card.

    They are in its front matter, and are links, first cells or items under a heading on training data.
    """
    card = folder / "README.md"
    if not card.is_file():
        return []
    text = card.read_text(encoding="utf-8-sig", errors="replace").replace("\r\n", "\n")
    return list(dict.fromkeys([*_of_front_matter(text), *_of_sections(text)]))


def license_named_by_card(path: str) -> str | None:
    """Returns the licence in the front matter of the model card of the checkpoint in the folder `path`; `None` if it names none."""
    named = _facts_of_card(Path(path)).get("license")
    return named if isinstance(named, str) else None


def is_card_of_dpx(folder: Path) -> bool:
    """Returns whether the model card in `folder` was written by an export of dpx."""
    return RELEASE in _facts_of_card(folder)


def _facts_of_card(folder: Path) -> dict[str, Any]:
    """Returns the front matter of a model card; empty without a card, and for what is not valid YAML."""
    card = folder / "README.md"
    match = _FRONT.match(card.read_text(encoding="utf-8-sig", errors="replace").replace("\r\n", "\n")) if card.is_file() else None
    try:
        facts = yaml.safe_load(match.group(1)) if match else None
    except (yaml.YAMLError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _of_front_matter(text: str) -> list[str]:
    match = _FRONT.match(text)
    if match is None:
        return []
    try:
        facts = yaml.safe_load(match.group(1))
    except (yaml.YAMLError, ValueError):  # a date that no month has is a ValueError
        return _of_no_yaml(match.group(1))
    named = [value for key, value in facts.items() if str(key).lower() == "datasets"] if isinstance(facts, dict) else []
    return [name for value in named for name in _texts(value)]


def _of_no_yaml(front: str) -> list[str]:
    """Returns the names in front matter that is not valid YAML; they still count."""
    parts = [part for listed in _LISTED.findall(front) for part in re.split(r"[\n,\[\]]", listed)]
    return [part.strip(" -'\"") for part in parts if _has_letters(part)]


def _texts(value: Any) -> list[str]:
    """Yields every text in a node of YAML, except the keys of mappings."""
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in _texts(one)]
    return [] if value is None else [str(value)]


def _of_sections(text: str) -> list[str]:
    named, level = [], 0
    for line in text.split("\n"):
        heading = _HEADING.match(line)
        if heading is not None and (not level or len(heading.group(1)) <= level):
            level = len(heading.group(1)) if _is_on_training_data(heading.group(2).lower()) else 0
        elif level:
            named += _LINK.findall(line) or _of_line(line)
    return named


def _is_on_training_data(title: str) -> bool:
    return "trained on" in title or ("train" in title or "tuning" in title) and any(word in title for word in ("data", "corpus", "corpora"))


def _of_line(line: str) -> list[str]:
    """Returns the first cell of a table's row, or an item of a list."""
    item = _ITEM.match(line)
    first = item.group(1) if item else line.strip().strip("|").split("|")[0] if line.strip().startswith("|") else ""
    return [first.strip()] if _has_letters(first) else []


def _has_letters(text: str) -> bool:
    return any(map(str.isalnum, text))


def among(known_as: Iterable[str], trained_on: Iterable[str]) -> list[str]:
    """Returns the entries of `trained_on` that contain one of the names `known_as`."""
    patterns = [_pattern(letters) for name in known_as if (letters := [one for one in _folded(name) if one.isalnum()])]
    return [name for name in trained_on if any(pattern.search(_folded(name)) for pattern in patterns)]


def _folded(name: str) -> str:
    """Returns the text without case, accents and width forms."""
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", name).casefold())
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter))


def _pattern(letters: list[str]) -> re.Pattern[str]:
    # A version may follow a name, as in SQuAD2.0; a longer word or number is another name. Scripts other than Latin have no such words.
    longer = r"[0-9]" if letters[-1].isdigit() else r"[a-z]"
    shorter = r"(?<![a-z0-9])" if letters[0].isascii() else ""
    return re.compile(shorter + r"[\W_]*".join(map(re.escape, letters)) + f"(?!{longer})")
