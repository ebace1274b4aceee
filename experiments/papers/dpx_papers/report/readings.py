"""Readings of a recipe, as data of paper.yaml: what the paper says of a setting, what the recipe takes, and why. Needs no extra."""

import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpx.declaration import declaration, require


@declaration
class Reading:
    """A setting that the paper leaves open, contradicts or states otherwise. `recipes` are patterns of the names of recipes."""

    recipes: Sequence[str]
    setting: str
    paper: str
    taken: str
    why: str

    def __post_init__(self) -> None:
        require(bool(self.recipes), f"readings: {self.setting}", "is of no recipe", "Name one, or a pattern, under recipes")

    def is_of(self, recipe: str) -> bool:
        """Returns whether a recipe is read so."""
        return any(fnmatch.fnmatchcase(recipe, pattern) for pattern in self.recipes)

    def words(self) -> str:
        """Returns it in one line."""
        return f"{self.setting}: the paper says {self.paper}; taken: {self.taken}, because {self.why}"


@declaration
class Choice:
    """A setting in which a paper's published code differs from its text. `recipes` are patterns of the names of the recipes whose numbers
    it changes, `options` the override that takes the code's side, and `name` is short, for the numbers of the page."""

    name: str
    recipes: Sequence[str]
    text: str
    code: str
    options: str

    def __post_init__(self) -> None:
        require(bool(self.recipes), f"choices: {self.name}", "is of no recipe", "Name one, or a pattern, under recipes")

    def is_of(self, recipe: str) -> bool:
        """Returns whether the numbers of a recipe depend on it."""
        return any(fnmatch.fnmatchcase(recipe, pattern) for pattern in self.recipes)


def of_recipe(recipe: str, homes: Iterable[Path]) -> list[Reading]:
    """Returns the readings of a recipe in the paper.yaml of each folder; a file that cannot be read has none."""
    found: list[Reading] = []
    for home in homes:
        try:
            plain: Any = OmegaConf.to_container(OmegaConf.load(home / "paper.yaml"), resolve=True)
            found += [Reading(**one) for one in plain.get("readings") or ()]
        except (OSError, YAMLError, OmegaConfBaseException, TypeError, AttributeError):
            continue
    return [one for one in found if one.is_of(recipe)]
