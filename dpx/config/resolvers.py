"""The resolvers `${...:}` of dpx's YAML."""

from omegaconf import DictConfig, OmegaConf

from dpx import packages
from dpx.config.identity import run_name


def register_resolvers() -> None:
    """Registers `${run_name:}` for Hydra's folders, `${at_most_steps:n}` for a default that a short run must not exceed, `${one_minus:x}`
    for a search, and `${packages:}` for the help; safe to call twice."""
    OmegaConf.register_new_resolver("packages", packages.described, replace=True)
    OmegaConf.register_new_resolver("run_name", lambda *, _root_: run_name(_root_), replace=True)
    OmegaConf.register_new_resolver("at_most_steps", _at_most_steps, replace=True)
    # Rounded to twelve digits, as a person would write it: 1 - 0.9 is 0.1 and not 0.09999999999999998.
    OmegaConf.register_new_resolver("one_minus", lambda value: round(1.0 - value, 12), replace=True)


def _at_most_steps(number: int, *, _root_: DictConfig) -> int:
    # A value that is not a number of steps is refused later, by its own check.
    return min(number, _root_.steps) if type(_root_.steps) is int else number
