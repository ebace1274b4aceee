"""What every trial of a `repeat_and_select` is a draw from: a distribution for each setting that varies, one value for all others.

It is settled before the first trial. Which trial wins says something of the data, so a trial whose settings come from elsewhere, or follow
from other trials, is not a draw of the mechanism that is charged.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

# From overrides to the config that they compose, as plain values, in the form of `TrialDistribution.fixed`.
Compose = Callable[[Sequence[str]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class TrialDistribution:
    """`sampler` holds the classes that draw and their settings; `space` by key the type of a setting (`float`, `int` or `choice`), its
    bounds (`low`, `high`, `step`, `is_log`) or its `values`; `fixed` the config without these keys. All of it is JSON-ready."""

    sampler: dict[str, Any]
    space: dict[str, dict[str, Any]]
    fixed: dict[str, Any]

    def differing(self, other: "TrialDistribution") -> list[str]:
        """The keys at which the two differ, as a user writes them."""
        parts = (("hydra.sweeper.", "sampler"), ("hydra.sweeper.params.", "space"))
        named = [
            f"{prefix}{key}"
            for prefix, part in parts
            for key in sorted(getattr(self, part).keys() | getattr(other, part).keys())
            if getattr(self, part).get(key) != getattr(other, part).get(key)
        ]
        return named + different_keys(self.fixed, other.fixed)

    def refusal(self, point: Sequence[str]) -> str | None:
        """Why a trial with the overrides `point` is not a draw, in words; `None` where it may be one."""
        settings = {key_of(part): part.partition("=")[2] for part in point}
        for key, distribution in self.space.items():
            if key not in settings:
                return f"sets no {key}, which the search draws"
            if not _is_of(distribution, settings[key]):
                return f"has {key}={settings[key]}, which is not of the declared space"
        return None

    def others(self, point: Sequence[str]) -> list[str]:
        """The overrides in `point` that are not drawn."""
        return [part for part in point if key_of(part) not in self.space]


def key_of(override: str) -> str:
    """The config key that an override sets, as a search space names it."""
    return override.lstrip("+~").partition("=")[0]


def different_keys(one: Any, other: Any, path: str = "") -> list[str]:
    """The keys, in dots, at which two plain configs differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [path]
    keys = sorted(one.keys() | other.keys())
    return [key for name in keys for key in different_keys(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))]


def _is_of(distribution: dict[str, Any], value: str) -> bool:
    """Whether `value`, as an override spells it, lies in the support of `distribution`."""
    if distribution["type"] == "choice":
        return value in distribution["values"]
    try:
        number = int(value) if distribution["type"] == "int" else float(value)
    except ValueError:
        return False
    return distribution["low"] <= number <= distribution["high"]
