"""The distribution that every trial of a `repeat_and_select` is drawn from: one for each setting that varies, and a fixed value for all
others.

It is fixed before the first trial. Which trial wins reveals something about the data, so a trial whose settings come from elsewhere, or
depend on other trials, is not a draw of the charged mechanism.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dpx.records import described, record

# A function from overrides to the config that they compose, as plain values, in the form of `TrialDistribution.fixed`.
Compose = Callable[[Sequence[str]], dict[str, Any]]


@record
class TrialDistribution:
    """Declares what the trials of a search are drawn from.

    A setting of the space has a type (`float`, `int` or `choice`), and its bounds (`low`, `high`, `step`, `is_log`) or its `values`. All
    values can be written as JSON.
    """

    sampler: dict[str, Any] = described("The classes that draw, and their settings.")
    space: dict[str, dict[str, Any]] = described("The distribution of each setting that is drawn, by its key.")
    fixed: dict[str, Any] = described("The config without the settings that are drawn.")

    def differing(self, other: "TrialDistribution") -> list[str]:
        """Returns the keys with different values in the two, as a user writes them."""
        parts = (("hydra.sweeper.", "sampler"), ("hydra.sweeper.params.", "space"))
        named = [
            f"{prefix}{key}"
            for prefix, part in parts
            for key in sorted(getattr(self, part).keys() | getattr(other, part).keys())
            if getattr(self, part).get(key) != getattr(other, part).get(key)
        ]
        return named + different_keys(self.fixed, other.fixed)

    def refusal(self, point: Sequence[str]) -> str | None:
        """Returns the reason, as text, why a trial with the overrides `point` is not a draw; `None` if it may be a draw."""
        settings = {key_of(part): part.partition("=")[2] for part in point}
        for key, distribution in self.space.items():
            if key not in settings:
                return f"sets no {key}, which the search draws"
            if not _is_of(distribution, settings[key]):
                return f"has {key}={settings[key]}, which is not of the declared space"
        return None

    def others(self, point: Sequence[str]) -> list[str]:
        """Returns the overrides in `point` that are not drawn."""
        return [part for part in point if key_of(part) not in self.space]


def key_of(override: str) -> str:
    """Returns the config key that an override sets, as a search space names it."""
    return override.lstrip("+~").partition("=")[0]


def different_keys(one: Any, other: Any, path: str = "") -> list[str]:
    """Returns the dotted keys with different values in two plain configs."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [path]
    keys = sorted(one.keys() | other.keys())
    return [key for name in keys for key in different_keys(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))]


def _is_of(distribution: dict[str, Any], value: str) -> bool:
    """Returns whether `value`, as an override writes it, is in the support of `distribution`."""
    if distribution["type"] == "choice":
        return value in distribution["values"]
    try:
        number = int(value) if distribution["type"] == "int" else float(value)
    except ValueError:
        return False
    return distribution["low"] <= number <= distribution["high"]
