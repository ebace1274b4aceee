"""Lists the named experiments (recipes), and every point that the sweep of a recipe would run; makes a recipe of a command."""

import fnmatch
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from dpx.config.instantiate import build
from dpx.config.with_hydra import register_resolvers, started
from dpx.packages import names_in

# A recipe may ask for a sweeper that is not installed; a plan does not run it.
_PLAIN_SWEEPER = "hydra/sweeper=basic"


def names(match: str = "*") -> list[str]:
    """Returns the names of recipes, those in `laptop/` with their folder, in alphabetical order, including recipes of installed
    packages."""
    return [name for name in names_in("experiment") if fnmatch.fnmatchcase(name, match)]


def compose(overrides: list[str], *, with_hydra: bool = False) -> DictConfig:
    """Returns the composed config of a command line, whether or not Hydra has been started."""
    register_resolvers()
    with started():
        return hydra_compose("config", overrides, return_hydra_config=with_hydra)


def option(group: str, name: str) -> Any:
    """Returns the declaration of `group=name`."""
    return getattr(build(compose([f"{group}={name}"]))[0], group)


def points(name: str) -> list[list[str]]:
    """Returns the overrides of every point of the recipe's sweep, in the order it would run; one empty list for a single run.

    An axis given as an interval (a search, not a grid) keeps the recipe's own value.
    """
    return points_of(compose([f"+experiment={name}", _PLAIN_SWEEPER], with_hydra=True))


def points_of(cfg: DictConfig) -> list[list[str]]:
    """Returns the same as `points`, for a recipe that is already composed together with Hydra's own config."""
    if str(cfg.hydra.mode) != "RunMode.MULTIRUN" and getattr(cfg.hydra.mode, "name", cfg.hydra.mode) != "MULTIRUN":
        return [[]]
    parser = OverridesParser.create()
    axes = [_values(parser.parse_override(f"{key}={value}")) for key, value in (cfg.hydra.sweeper.params or {}).items()]
    return [list(point) for point in itertools.product(*(axis for axis in axes if axis))]


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if override.is_interval_sweep():
        return []
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def plan_config(name: str, point: list[str]) -> DictConfig:
    """Returns the composed config of one point."""
    return compose([f"+experiment={name}", _PLAIN_SWEEPER, *point, "job=plan"])


def plan_config_if_found(name: str, point: list[str]) -> DictConfig | None:
    """Returns the same as `plan_config`, or `None` if no config folder of this process has the recipe, or an option of the point."""
    try:
        return plan_config(name, point)
    except MissingConfigException:
        return None


def of_this_command() -> list[str] | None:
    """Returns the overrides of the command, or of the point of a sweep, that Hydra runs now; `None` outside of it."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else None


def recipe_of(
    overrides: Iterable[str], set_aside: Collection[str], options: Mapping[str, str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a recipe, as plain data for YAML, of what `overrides` say, with the `options` of groups and `values` by dotted key on top.

    What belongs to the groups or keys in `set_aside` is left out.
    """
    recipes, chosen, given = [], dict[str, Any](), OmegaConf.create()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, _plain(override.value())
        if key.partition(".")[0] in set_aside or override.is_delete():
            continue
        if key == "experiment":
            recipes.append(f"/experiment/{value}")
        elif names_in(key):
            chosen[key] = value
        else:
            OmegaConf.update(given, key, value, force_add=True)
    for key, value in values.items():
        OmegaConf.update(given, key, value, force_add=True)
    defaults = [*recipes, *({f"override /{group}": option} for group, option in (chosen | dict(options)).items()), "_self_"]
    plain: Any = OmegaConf.to_container(given)
    return {"defaults": defaults} | plain


def _plain(value: Any) -> Any:
    """Returns a parsed value of a command line without its quotes."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
