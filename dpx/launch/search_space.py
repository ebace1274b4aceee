"""Reads the distribution of a search's trials from a composed config: the sweeper's parameters and the command line."""

import json
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.claim.search_record import TrialDistribution, key_of
from dpx.config import recipes
from dpx.config.hydra_node import require_no_hydra, require_own_resolvers
from dpx.config.identity import identity
from dpx.declaration import ConfigError, require

# As in conf/hydra/sweeper/search.yaml: resolving this number first fixes the search.
TRIALS_LEFT = "${trials_left:}"


def declared(root: DictConfig) -> TrialDistribution:
    """Returns the distribution of the trials of the search in `root`, a base config with Hydra's own node.

    As in the sweeper, an override on the command line replaces the parameter with the same key, and a single value removes it from the
    space. Raises `ConfigError` for a setting with an unsupported distribution.
    """
    params = {str(key): str(value) for key, value in (root.hydra.sweeper.get("params") or {}).items()}
    parser = OverridesParser.create()
    space: dict[str, dict[str, Any]] = {}
    for text in [*(f"{key}={value}" for key, value in params.items()), *root.hydra.overrides.task]:
        override = parser.parse_override(str(text))
        space.pop(key_of(str(text)), None)
        if override.is_sweep_override():
            space[key_of(str(text))] = _distribution(override, str(text))
    return TrialDistribution(sampler=sampler_of(root.hydra.sweeper), space=dict(sorted(space.items())), fixed=_fixed(root))


def sampler_of(sweeper: Any) -> dict[str, Any]:
    """Returns the classes that draw, with every setting of the sampler."""
    node = sweeper.get("sampler") or {}
    sampler = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node)
    return {"_target_": str(sweeper.get("_target_")), "sampler": sampler}


def require_settled(sweeper: Any) -> None:
    """Raises `ConfigError` for a launch that sets its own number of trials.

    Its search space was not compared with that of the first launch, so it could draw from a part of the declared space.
    """
    given = OmegaConf.to_container(sweeper, resolve=False)
    number = given.get("n_trials") if isinstance(given, dict) else None
    require(
        number == TRIALS_LEFT,
        f"hydra.sweeper.n_trials={number}",
        "the number of trials and their search space must be fixed together before the first trial",
        "Remove it; Ctrl-C ends a launch, and the same command resumes it",
    )


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the config of `overrides`, in the form of `TrialDistribution.fixed` (`dpx.claim.search_record.Compose`)."""
    require_no_hydra(overrides)
    require_own_resolvers(overrides)
    return _fixed(recipes.compose(list(overrides)))


def _fixed(cfg: DictConfig) -> dict[str, Any]:
    """Returns the settings that decide a trial's result and score, without the replicate number and the settings of how it is computed."""
    plain = config.resolved(cfg)
    told = {key: value for key, value in identity(plain).items() if key != "replicate"}
    told["schedule"] = {"evaluation_rows": (plain.get("schedule") or {}).get("evaluation_rows")}
    return json.loads(json.dumps(told, default=str))


def _distribution(override: Override, text: str) -> dict[str, Any]:
    value = override.value()
    if isinstance(value, IntervalSweep):
        numbers = {"low": value.start, "high": value.end, "step": None, "is_log": "log" in value.tags}
        return {"type": _type_of(value.start, value.end)} | numbers
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = {"low": value.start, "high": value.stop, "step": value.step, "is_log": False}
        return {"type": _type_of(value.start, value.stop, value.step)} | numbers
    try:
        return {"type": "choice", "values": [str(one) for one in override.sweep_iterator(transformer=Transformer.encode)]}
    except Exception as error:
        raise ConfigError(text, "is not a distribution from which a search can draw", "Use interval, range or choice") from error


def _type_of(*bounds: Any) -> str:
    return "int" if all(isinstance(bound, int) for bound in bounds) else "float"
