"""Expands several recipes in one command, `-m '+experiment=glob(anil_*)'`: the points of each recipe's own sweep, one recipe after another.

It stands for Hydra's basic sweeper, which would make one point of each recipe, and does as that one does in every other command.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpx.config.interpolations import MOST_POINTS
from dpx.config.recipes import points_of
from dpx.declaration import require

# Looking for plugins, once in a process, makes the class below anew.
Plugins.instance()
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

# Composes a recipe whose own sweeper may not be installed.
_PLAIN = "hydra/sweeper=basic"


class RecipeSweeper(BasicSweeper):
    """Hydra's basic sweeper, for which each of several recipes is the points of its own sweep.

    What the command gives takes the place of an axis with the same key, and is an axis of every recipe if it lists values.
    """

    def split_arguments(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, overrides: Sequence[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Returns the overrides of every point, in batches. Raises `ConfigError` for a search and for a pattern without a recipe."""
        recipes = [one for one in overrides if _is_recipe(one)]
        if not any(one.is_sweep_override() for one in recipes):
            return super().split_arguments(list(overrides), max_batch_size)
        (chosen,) = super().split_arguments(recipes, None)
        shown = " ".join(str(one.input_line) for one in recipes)
        require(bool(chosen), shown, "no recipe has such a name", "python -m dpx job=list lists the recipes")
        others = [one for one in overrides if not _is_recipe(one)]
        (given,) = super().split_arguments(others, None)
        fixed = [str(one.input_line) for one in others if not one.is_sweep_override()]
        keys = {one.get_key_element() for one in others}
        points = [[*names, *own, *point] for names in chosen for own in self._own_points(names, fixed, keys) for point in given]
        reason = f"give {len(points):,} points, and a sweep has at most {MOST_POINTS:,}"
        require(len(points) <= MOST_POINTS, shown, reason, "Launch parts of the sweep one after another")
        return list(super().split_overrides_to_chunks(points, max_batch_size))

    def _own_points(self, names: list[str], fixed: list[str], keys: set[str]) -> list[list[str]]:
        """Returns the points of one recipe, without the axes of `keys`. A plan of a search has one, at the recipe's own values."""
        cfg = self._composed([*names, *fixed, _PLAIN])
        is_search = cfg.get("tune") is not None
        reason = "is a search, whose trials follow from each other, and not a list of points"
        fix = "Launch it by itself; job=plan plans it at its own values"
        require(not is_search or cfg.hydra.runtime.choices.get("job") == "plan", " ".join(names), reason, fix)
        found = [tuple(one for one in point if one.partition("=")[0] not in keys) for point in points_of(cfg)]
        return [[*point, *([_PLAIN] if is_search else [])] for point in dict.fromkeys(found)]

    def _composed(self, overrides: list[str]) -> DictConfig:
        """Returns the config of a recipe with the mode of its own, which that of the command would hide."""
        assert self.hydra_context is not None and self.config is not None
        hydra: Any = OmegaConf.to_container(self.config.hydra.overrides.hydra)
        kept = [one for one in hydra if not one.startswith("hydra.mode=")]
        name = self.config.hydra.job.config_name
        return self.hydra_context.config_loader.load_configuration(name, [*kept, *overrides], run_mode=RunMode.RUN)


def _is_recipe(override: Override) -> bool:
    return override.key_or_group.partition("/")[0] == "experiment" and override.package is None
